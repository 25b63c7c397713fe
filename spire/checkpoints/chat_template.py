"""Read the chat template of a checkpoint, which formats messages as a prompt.

The first template found is used: `additional_chat_templates/default.jinja`, `chat_template.jinja`, `chat_template` in
`tokenizer_config.json` (a string, or several by name, of which `default` is used), `chat_template.json` of processors.
Does not know: rendering, which the gateway does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from spire.checkpoints.special_tokens import read_declared
from spire.model.directory import read_object_if_any, read_text


class TemplateSource(NamedTuple):
    """A checkpoint's chat template in Jinja, empty if it has none, and the special tokens that it may refer to."""

    template: str
    special_tokens: dict[str, str]


def read_chat_template(model: Path) -> TemplateSource:
    """Read a checkpoint's chat template, skipping empty files. Raises CheckpointError for an unreadable file."""
    declared = read_declared(model, read_object_if_any(model / "tokenizer.json"))
    files = (model / "additional_chat_templates" / "default.jinja", model / "chat_template.jinja")
    processor = read_object_if_any(model / "chat_template.json")
    found = [read_text(file) for file in files if file.is_file() and file.stat().st_size]
    found += [_default(declared.settings.get("chat_template")), _default(processor.get("chat_template"))]
    special_tokens = {name: token.content for name, token in declared.named.items() if token.content}
    return TemplateSource(next(filter(None, found), ""), special_tokens)


def _default(template: Any) -> str:
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else ""
