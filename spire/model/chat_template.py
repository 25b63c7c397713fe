"""A checkpoint's chat template, as Hugging Face directories keep it: how messages become a prompt.

It is `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`: a text, or a list of named ones of which
`default` is taken. It is only read here; who serves chats renders it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spire.errors import CheckpointError
from spire.model.directory import read_object


@dataclass(frozen=True)
class TemplateSource:
    """A Jinja template, empty where a checkpoint has none, and the special tokens that it may name."""

    template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


def read_chat_template(model: Path) -> TemplateSource:
    """What this directory says about chats. Raises CheckpointError for a file that cannot be read."""
    config = _object(model / "tokenizer_config.json")
    tokens = _object(model / "special_tokens_map.json") | config
    spelled = {name: _spelling(value) for name, value in tokens.items() if name.endswith("_token")}
    return TemplateSource(
        template=_text(model / "chat_template.jinja") or _default(config.get("chat_template")),
        special_tokens={name: text for name, text in spelled.items() if text},
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _object(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _default(template: Any) -> str:
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _spelling(token: Any) -> str:
    """A special token is written as its text or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
