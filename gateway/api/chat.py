"""`POST /v1/chat/completions`: the target's chat template turns a conversation into the prompt of a completion.

Text only: tools and images are refused with an error that names the field (tools: `gateway/requests/fields.toml`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from gateway.api.choice import Piece
from gateway.api.completion import Completion
from gateway.api.logprobs import contents
from gateway.errors import BadParameter, over_context
from gateway.requests.bodies import FIRST_ERROR, Part, RequestBody, TokenCount, check_unicode
from gateway.requests.fields import PartOf
from gateway.requests.prompts import result_of
from gateway.requests.schemas import (
    NEWER_LIMIT,
    OFF,
    PAIRS,
    CompletionRequest,
    GenerationRequest,
    most_scored_output,
    not_both,
    only_with,
)
from gateway.requests.structured import deeper_than, json_text
from gateway.verifier_client import ServedModel
from spire.rpc.limits import MAX_LOGPROBS
from spire.text.chat_messages import ROLES, plain_message
from spire.text.chat_template import TemplateRefusal

# The template variables that the gateway sets, besides the special tokens, whose names end in _SPECIAL_TOKEN.
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_SPECIAL_TOKEN = "_token"
_MOST_VARIABLE_BYTES = 16 << 10
_DEEPEST_VARIABLES = 8
_VARIABLES_SCHEMA = {
    "type": "object",
    "propertyNames": {"not": {"anyOf": [{"enum": [*_OURS]}, {"pattern": f"{_SPECIAL_TOKEN}$"}]}},
}
# The prompt either begins an answer or continues the last message, not both.
TEMPLATE_SCHEMA = not_both(continue_final_message=OFF, add_generation_prompt=OFF)


class TextPart(Part):
    """A text part of a message's content, which `spire.text.chat_messages` reads."""

    type: Literal["text"]
    text: str


_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": TextPart.model_json_schema()}]
}


class Message(Part):
    """One message of a conversation, which `spire.text.chat_messages` reads."""

    passes_others_on: ClassVar[bool] = True
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[Any, PartOf(TextPart), WithJsonSchema(_CONTENT_SCHEMA)]

    @property
    def given(self) -> dict[str, Any]:
        """The message as the client sent it, unknown fields included, because the chat template may use them."""
        return {**(self.model_extra or {}), "role": self.role, "content": self.content}


class TemplateOptions(RequestBody):
    """The options of a request with messages, from which the chat template renders the prompt."""

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
        """Check the request's options of the chat template. Raises BadParameter."""
        if self.continue_final_message and self.begins_answer:
            message = "continue_final_message and add_generation_prompt exclude each other: leave one of them out"
            raise BadParameter("continue_final_message", message)
        name, variables = "chat_template_kwargs", self.chat_template_kwargs or {}
        for variable in variables:
            if variable in _OURS or variable.endswith(_SPECIAL_TOKEN):
                raise BadParameter(f"{name}.{variable[:64]}", f"{name} must not set {variable[:64]}: the gateway does")
        if deeper_than(_DEEPEST_VARIABLES, variables):
            raise BadParameter(name, f"{name} is nested deeper than {_DEEPEST_VARIABLES} levels: give it fewer")
        text = json_text(name, variables, _MOST_VARIABLE_BYTES)
        check_unicode(text, name)
        if len(text.encode()) > _MOST_VARIABLE_BYTES:
            raise BadParameter(name, f"{name} may have {_MOST_VARIABLE_BYTES} bytes of JSON, it has more")


class ConversationRequest(CompletionRequest):
    """A completion request whose prompt was rendered by the chat template."""

    prompt_name: ClassVar[str] = "messages"
    alternatives_name: ClassVar[str] = "top_logprobs"


class ChatRequest(GenerationRequest, TemplateOptions):
    model_config = ConfigDict(
        json_schema_extra={"allOf": [*PAIRS, only_with("logprobs", top_logprobs={"enum": [0, None]}), TEMPLATE_SCHEMA]}
    )

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1)
    max_tokens: TokenCount | None = Field(
        None, ge=1, description="by default what the context and the limit of logprobs have room for"
    )
    max_completion_tokens: TokenCount | None = Field(None, ge=1, description=NEWER_LIMIT)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="only with logprobs")
    add_special_tokens: bool = Field(False, description="put the start token in front, where the template does not")

    def as_completion(self, prompt: list[int], max_context: int) -> CompletionRequest:
        """Return this request as a completion request with the encoded `prompt`. Raises BadParameter."""
        if self.top_logprobs and not self.logprobs:
            raise BadParameter("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        if len(prompt) > max_context:
            raise over_context("messages", max_context, result_of("messages", len(prompt)))
        request = ConversationRequest(
            **{name: getattr(self, name) for name in GenerationRequest.model_fields},
            prompt=prompt,
            max_tokens=self.max_tokens or max(1, max_context - len(prompt)),
            logprobs=self.top_logprobs if self.logprobs else None,
        )
        if self.max_tokens is None and self.max_completion_tokens is None:
            request.max_tokens = int(max(1, min(request.max_tokens, most_scored_output(request, [len(prompt)]))))
        return request


def chat_prompt(messages: list[Message], model: ServedModel, options: TemplateOptions, special: bool) -> list[int]:
    """Return the token ids of messages by the chat template. `special`: add special tokens. Raises InvalidRequest."""
    options.check_template_options()
    context, codec, template = model.info.max_context, model.codec, model.chat_template
    if len(messages) > context:
        raise over_context("messages", context, f"you sent {len(messages)} messages. Please send fewer.")
    plain = [plain_message(message.given, f"messages[{at}]") for at, message in enumerate(messages)]
    if not template.source:
        message = "the model's tokenizer has no chat template: ask /v1/completions with a prompt instead"
        raise BadParameter("messages", message)
    most, variables = context * codec.longest_token, options.chat_template_kwargs
    try:
        text = template.render(plain, most, options.begins_answer, options.continue_final_message, variables)
    except TemplateRefusal as error:
        if error.code == "context_length_exceeded":
            raise over_context("messages", context, f"{error}. Please reduce the length of the messages.") from error
        raise
    check_unicode(text, "messages")
    tokens = codec.encode(text, context, special, "messages")
    if not tokens:
        raise BadParameter("messages", "the messages make a prompt without tokens")
    return tokens


class ChatCompletion(Completion):
    """A completion whose answer has the format of the chat API."""

    id_prefix = "chatcmpl"
    scores_in_choices = False

    @cached_property
    def _begun(self) -> set[int]:
        """Indexes of the choices whose first chunk, the one with the role, has been made."""
        return set()

    def _head(self) -> dict[str, Any]:
        return super()._head() | {"object": "chat.completion.chunk" if self.request.stream else "chat.completion"}

    def _said(self, piece: Piece) -> dict[str, Any]:
        if not self.request.stream:
            return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": piece.text}}

    def _logprobs(self, piece: Piece, top: int) -> dict[str, Any]:
        return {"content": contents(piece.entries, self.model.codec, top), "refusal": None}
