"""The fields of a request that control how the chat template turns its messages into a prompt."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, JsonValue, WithJsonSchema

from gateway.errors import BadParameter
from gateway.requests.bodies import RequestBody
from gateway.requests.prompts import check_unicode
from gateway.requests.structured import deeper_than

# The variables of a template that the gateway sets, beside the special tokens, whose names end in _SPECIAL_TOKEN.
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_SPECIAL_TOKEN = "_token"
_MOST_BYTES = 16 << 10
_DEEPEST = 8
_VARIABLES_SCHEMA = {
    "type": "object",
    "propertyNames": {"not": {"anyOf": [{"enum": [*_OURS]}, {"pattern": f"{_SPECIAL_TOKEN}$"}]}},
}
# Either an answer begins or the last message continues, not both.
TEMPLATE_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"properties": {"continue_final_message": {"enum": [False, None]}}},
        {"properties": {"add_generation_prompt": {"enum": [False, None]}}},
    ]
}


class TemplateOptions(RequestBody):
    """A request with messages, which a template makes a prompt of."""

    add_generation_prompt: bool | None = Field(
        None, description="end the prompt where the assistant's answer begins; the default unless the last one goes on"
    )
    continue_final_message: bool = Field(
        False, description="leave the last message open at the end of its text, so that the answer goes on with it"
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, WithJsonSchema(_VARIABLES_SCHEMA)] = Field(
        None, description="variables for the chat template, as enable_thinking"
    )

    @property
    def begins_answer(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check_template_options(self) -> None:
        """Check the options of the chat template. Raises BadParameter."""
        if self.continue_final_message and self.begins_answer:
            raise BadParameter(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other: leave one of them out",
            )
        name, variables = "chat_template_kwargs", self.chat_template_kwargs or {}
        for variable in variables:
            if variable in _OURS or variable.endswith(_SPECIAL_TOKEN):
                raise BadParameter(f"{name}.{variable[:64]}", f"{name} must not set {variable[:64]}: the gateway does")
        if deeper_than(_DEEPEST, variables):
            raise BadParameter(name, f"{name} is nested deeper than {_DEEPEST} levels: give it fewer")
        text = json.dumps(variables, ensure_ascii=False)
        check_unicode(text, name)
        if (size := len(text.encode())) > _MOST_BYTES:
            raise BadParameter(name, f"{name} may have {_MOST_BYTES} bytes of JSON, it has {size}")
