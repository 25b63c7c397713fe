"""Chat messages as a prompt, by the target's own template.

The template is code of whoever made the checkpoint: it runs in Jinja's sandbox, with what `transformers` gives it, and
its output is cut off where no context could hold it. What it does not know: tools, documents and pictures.
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

# Of processor time: a template may look at each message once for every other.
_MOST_SECONDS = 5.0


class TemplateRefusal(InvalidRequest):
    """These messages make no text; `code` is the REST API's for it, `param` the field that it is about."""

    def __init__(self, message: str, code: str = "invalid_value", param: str = "messages"):
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, empty where the target has none, and the special tokens that it may name."""

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
        """The prompt that these messages make. Raises TemplateRefusal; what is too long is not written to its end.

        With `continue_final_message` it ends with the last message's text. `variables` are what the template may read
        beside what it always is given.
        """
        if not self.source:
            raise TemplateRefusal("the model's tokenizer has no chat template")
        given = dict(variables or {}) | {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        if not continue_final_message:
            return self._written(given, most_characters)
        # No message can hold it. Its blank tells whether the template keeps those at the end of a message.
        mark = f"[{secrets.token_hex(16)}] "
        text = messages[-1]["content"]
        given["messages"] = [*messages[:-1], messages[-1] | {"content": text + mark}]
        return _up_to_mark(self._written(given, most_characters + len(mark)), mark, text)

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
        except Exception as error:  # whatever a template does wrong with these messages
            raise TemplateRefusal(f"the model's chat template does not take these messages: {error}") from error
        if room < 0:
            message = f"the messages make a prompt of more than {most_characters} characters: no context holds it"
            raise TemplateRefusal(message, "context_length_exceeded")
        return "".join(pieces)


def _up_to_mark(written: str, mark: str, text: str) -> str:
    """The prompt up to the end of the last message's text, where the mark is. Raises TemplateRefusal."""
    at = written.rfind(mark.strip())
    if at < 0 or text.strip() not in written:
        message = "continue_final_message: the model's chat template leaves parts of the last message out"
        raise TemplateRefusal(message, param="continue_final_message")
    return written[:at] if written.startswith(mark, at) else written[:at].rstrip()


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
