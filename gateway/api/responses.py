"""Schemas of the answers to completions and chats, for OpenAPI; `gateway/api/completion.py` builds the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Origin = Literal["draft", "target"]


class AnswerModel(BaseModel):
    """Base of the answer schemas. Every field is always present, except fields that must be requested."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)


class PromptTokensDetails(AnswerModel):
    cached_tokens: int


class CompletionTokensDetails(AnswerModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TextLogprobs(AnswerModel):
    """Parallel arrays with one entry for each token; the first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RoundOfChoice(AnswerModel):
    begin: int = Field(description="place in the output of the round's first token")
    tokens: int = Field(description="how many tokens of the output it gave")
    drafted: int
    accepted: int = Field(description="of the drafted ones; the target adds one token of its own to these")


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int = Field(description="1 for the most probable token")
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="with prompt_logprobs: for each token of the prompt but the first, tokens by id"),
]


class AnyChoice(AnswerModel):
    index: int
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] = Field([], description="with return_token_ids")
    token_ids: list[int] = Field([], description="with return_token_ids")
    token_origins: list[Origin] = Field([], description="with return_token_origins: who chose each token")
    rounds: list[RoundOfChoice] = Field([], description="with return_rounds")


class AnyResponse(AnswerModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: dict[str, Any] = Field({}, description="with return_metrics: times, and what speculation did")


class TextChoice(AnyChoice):
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: PromptLogprobs = []


class CompletionResponse(AnyResponse):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class NamedLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(NamedLogprob):
    top_logprobs: list[NamedLogprob]


class ChatLogprobs(AnswerModel):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(AnswerModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(AnyChoice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatResponse(AnyResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = []


def answers(schema: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return a route's OpenAPI declaration of its answer: one object, or events that contain pieces of the object."""
    data = {"type": "string", "description": "a piece of the answer as JSON, or [DONE]"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    content = {"text/event-stream": {"schema": event}}
    return {200: {"model": schema, "description": "The answer, whole or as events", "content": content}}
