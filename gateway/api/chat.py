"""`POST /v1/chat/completions`: the target's chat template turns a conversation into the prompt of a completion.

Text only: tools and images are refused with an error that names the field (tools: `gateway/requests/fields.toml`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue, WithJsonSchema

from gateway.api.choice import Choice, Piece
from gateway.api.completion import Completion
from gateway.api.logprobs import contents
from gateway.errors import BadParameter, over_context
from gateway.requests.bodies import FIRST_ERROR, Part, TokenCount
from gateway.requests.fields import PartOf
from gateway.requests.prompts import check_unicode, result_of
from gateway.requests.schemas import (
    NEWER_LIMIT,
    PROMPT_LOGPROBS_SCHEMA,
    STREAM_SCHEMA,
    CompletionRequest,
    GenerationRequest,
)
from gateway.requests.template_options import TEMPLATE_SCHEMA, TemplateOptions
from gateway.text.json_pieces import Shared
from gateway.text.tokenizer import PromptTooLong
from gateway.verifier_client import ServedModel
from spire.rpc.limits import MAX_LOGPROBS
from spire.text.chat_messages import ROLES, plain_message
from spire.text.chat_template import TemplateRefusal

# top_logprobs is allowed only with logprobs.
_LOGPROBS_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
        {"properties": {"top_logprobs": {"enum": [0, None]}}},
    ]
}


class TextPart(Part):
    """A piece of a message's content: `spire.text.chat_messages` reads it."""

    type: Literal["text"]
    text: str


_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": TextPart.model_json_schema()}]
}


class Message(Part):
    """One turn, for `spire.text.chat_messages` to read."""

    passes_others_on: ClassVar[bool] = True

    role: Annotated[str, WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[Any, PartOf(TextPart), WithJsonSchema(_CONTENT_SCHEMA)]

    @property
    def given(self) -> dict[str, Any]:
        """The message as the client sent it, with unknown fields, which the template may read."""
        return {**(self.model_extra or {}), "role": self.role, "content": self.content}


class ConversationRequest(CompletionRequest):
    """A completion whose prompt the chat template has made."""

    prompt_name: ClassVar[str] = "messages"


class ChatRequest(GenerationRequest, TemplateOptions):
    model_config = ConfigDict(
        json_schema_extra={"allOf": [STREAM_SCHEMA, PROMPT_LOGPROBS_SCHEMA, _LOGPROBS_SCHEMA, TEMPLATE_SCHEMA]}
    )

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1)
    max_tokens: TokenCount | None = Field(None, ge=1, description="by default what the context has room for")
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
        return ConversationRequest(
            **{name: getattr(self, name) for name in GenerationRequest.model_fields},
            prompt=prompt,
            max_tokens=self.max_tokens or max(1, max_context - len(prompt)),
            logprobs=self.top_logprobs if self.logprobs else None,
        )


def chat_prompt(
    messages: list[Message], model: ServedModel, options: TemplateOptions, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of the prompt that the model's chat template makes of messages. Raises BadParameter."""
    options.check_template_options()
    context, codec = model.info.max_context, model.codec
    if len(messages) > model.info.max_context:
        raise over_context("messages", model.info.max_context, f"you sent {len(messages)} messages. Please send fewer.")
    try:
        plain = [plain_message(message.given, f"messages[{at}]") for at, message in enumerate(messages)]
    except TemplateRefusal as error:
        raise BadParameter(error.param, str(error), error.code) from error
    most = context * codec.longest_token
    if not model.chat_template.source:
        message = "the model's tokenizer has no chat template: ask /v1/completions with a prompt instead"
        raise BadParameter("messages", message)
    try:
        text = model.chat_template.render(
            plain,
            most,
            options.begins_answer,
            options.continue_final_message,
            options.chat_template_kwargs,
        )
    except TemplateRefusal as error:
        if error.code == "context_length_exceeded":
            raise over_context("messages", context, f"{error}. Please reduce the length of the messages.") from error
        raise BadParameter(error.param, str(error), error.code) from error
    check_unicode(text, "messages")
    try:
        tokens = codec.encode(text, context, add_special_tokens)
    except PromptTooLong as error:
        raise over_context("messages", context, error.however) from error
    if not tokens:
        raise BadParameter("messages", "the messages make a prompt without tokens")
    return tokens


class ChatCompletion(Completion):
    """A completion answered in the format of the chat API."""

    id_prefix = "chatcmpl"

    @cached_property
    def _begun(self) -> set[int]:
        """Indexes of the choices whose first chunk, the one with the role, has been made."""
        return set()

    def _head(self) -> dict[str, Any]:
        return super()._head() | {"object": "chat.completion.chunk" if self.request.stream else "chat.completion"}

    def _in_choice(self, choice: Choice, scores: list[Shared]) -> dict[str, Any]:
        return {}

    def _beside_choices(self, scores: list[Shared]) -> dict[str, Any]:
        return {"prompt_logprobs": scores[0]} if scores else {}

    def _said(self, piece: Piece) -> dict[str, Any]:
        if not self.request.stream:
            return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": piece.text}}

    def _logprobs(self, piece: Piece, top: int) -> dict[str, Any]:
        return {"content": contents(piece.entries, self.model.codec, top), "refusal": None}
