"""Chat messages as a prompt, by the target's own template.

The template is code of whoever made the checkpoint: it runs in Jinja's sandbox, with what `transformers` gives it, and
its output is cut off where no context could hold it. What it does not know: tools, documents and pictures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spire.errors import InvalidRequest


class TemplateRefusal(InvalidRequest):
    """These messages make no text; `code` is the REST API's for it."""

    def __init__(self, message: str, code: str = "invalid_value"):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, empty where the target has none, and the special tokens that it may name."""

    source: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)

    def render(self, messages: list[dict[str, Any]], most_characters: int, add_generation_prompt: bool = True) -> str:
        """The prompt that these messages make. Raises TemplateRefusal; what is too long is not written to its end."""
        if not self.source:
            raise TemplateRefusal("the model's tokenizer has no chat template")
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        pieces: list[str] = []
        room = most_characters
        try:
            for piece in _compiled(self.source).generate(given, **self.special_tokens):
                room -= len(piece)
                if room < 0:
                    break
                pieces.append(piece)
        except Exception as error:  # whatever a template does wrong with these messages
            raise TemplateRefusal(f"the model's chat template does not take these messages: {error}") from error
        if room < 0:
            message = f"the messages make a prompt of more than {most_characters} characters: no context holds it"
            raise TemplateRefusal(message, "context_length_exceeded")
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter writes for HTML.
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
