"""Rendering of chat messages to a prompt by the target's own template.

The template is code from the author of the checkpoint: it runs in Jinja's sandbox, with the names that `transformers`
provides, and rendering stops once the output is longer than any context. Does not know: tools, documents and images.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spire.errors import InvalidRequest

# Limit of processor time: a template may take time quadratic in the number of messages.
_MOST_SECONDS = 5.0


class TemplateRefusal(InvalidRequest):
    """Error for messages that cannot be rendered. `code` is the REST API's error code, `param` the field at fault."""

    def __init__(self, message: str, code: str = "invalid_value", param: str = "messages"):
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, empty if the target has none, and the special tokens that the template may name."""

    source: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: list[dict[str, Any]],
        most_characters: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the messages as a prompt. Raises TemplateRefusal if the template fails or exceeds `most_characters`.

        With `continue_final_message` the prompt ends with the last message's text. `variables` are further variables
        of the template.
        """
        if not self.source:
            raise TemplateRefusal("the model's tokenizer has no chat template")
        given = dict(variables or {}) | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        given |= {"tools": None, "documents": None}
        if not continue_final_message:
            return self._written(given, most_characters)
        # A random mark occurs in no message. Its trailing blank shows whether the template keeps trailing blanks.
        mark = f"[{secrets.token_hex(16)}] "
        text = messages[-1]["content"]
        given["messages"] = [*messages[:-1], messages[-1] | {"content": text + mark}]
        written = self._written(given, most_characters + len(mark))
        at = written.rfind(mark.strip())
        if at < 0 or text.strip() not in written:
            message = "continue_final_message: the model's chat template leaves parts of the last message out"
            raise TemplateRefusal(message, param="continue_final_message")
        return written[:at] if written.startswith(mark, at) else written[:at].rstrip()

    def _written(self, given: dict[str, Any], most_characters: int) -> str:
        pieces: list[str] = []
        room, began = most_characters, time.thread_time()
        try:
            for piece in _compiled(self.source).generate(given, **self.special_tokens):
                room -= len(piece)
                if room < 0:
                    break
                if time.thread_time() - began > _MOST_SECONDS:
                    raise TimeoutError(f"it takes more than {_MOST_SECONDS:g} s for them")
                pieces.append(piece)
        except Exception as error:  # a template may raise any exception
            raise TemplateRefusal(f"the model's chat template does not take these messages: {error}") from error
        if room < 0:
            message = f"the messages make a prompt of more than {most_characters} characters: no context holds it"
            raise TemplateRefusal(message, "context_length_exceeded")
        return "".join(pieces)


class _Generation(Extension):
    """The Jinja tag `{% generation %}`, which marks the assistant's text for training. Here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
