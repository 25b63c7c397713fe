"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, with the target's tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, WithJsonSchema

from gateway.api.answers import json_answer, unless_gone
from gateway.api.chat import TEMPLATE_SCHEMA, Message, TemplateOptions, chat_prompt
from gateway.api.openapi import body_of
from gateway.aside import by_size
from gateway.errors import BadParameter
from gateway.requests.bodies import FIRST_ERROR, RequestBody, TokenIds, ignored_header, read_body, refusals
from gateway.requests.fields import TOKENIZATION, Lists
from gateway.requests.prompts import text_prompt
from gateway.requests.schemas import check_ids
from gateway.rounds.engine import Engine
from gateway.text.json_pieces import Shown
from gateway.verifier_client import ServedModel

_MOST_TOKENS = 1 << 18


def _alone(given: str, absent: str) -> JsonValue:
    return {"required": [given], "properties": {given: {"not": {"type": "null"}}, absent: {"type": "null"}}}


class TokenizeRequest(TemplateOptions):
    """A prompt or chat messages to convert to token ids; exactly one of the two must be given."""

    lists: ClassVar[Lists] = TOKENIZATION

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [{"anyOf": [_alone("prompt", "messages"), _alone("messages", "prompt")]}, TEMPLATE_SCHEMA]
        }
    )

    prompt: Annotated[str | None, WithJsonSchema({"type": "string", "minLength": 1})] = None
    messages: Annotated[list[Message], FIRST_ERROR] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None,
        description="put the start token in front; by default before a prompt, and before a chat its template does",
    )
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = Field(None, description="the vocabulary's spelling of each token, if asked for")


class DetokenizeRequest(RequestBody):
    lists: ClassVar[Lists] = TOKENIZATION

    tokens: Annotated[TokenIds, Field(max_length=_MOST_TOKENS)]


class DetokenizeResponse(BaseModel):
    prompt: str = Field(description="the text, with special tokens spelled out")


def add_tokenization(app: FastAPI, engine: Engine) -> None:
    declared = refusals(400, 403, 404, 408, 413, 415, 429, 431, 500, 503)

    @app.post("/tokenize", response_model=TokenizeResponse, responses=declared, openapi_extra=body_of(TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """Return the token ids of a prompt or of chat messages, as a completion would encode them."""
        request, model, size = await read_body(http, TokenizeRequest, engine)
        tokens = await unless_gone(http.receive, by_size(size, _tokens_of, request, model))
        answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": model.info.max_context}
        if request.return_token_strs:
            answer["token_strs"] = Shown(tokens, lambda token: model.codec.tokenizer.id_to_token(token) or "")
        return json_answer(answer, ignored_header(request))

    @app.post(
        "/detokenize", response_model=DetokenizeResponse, responses=declared, openapi_extra=body_of(DetokenizeRequest)
    )
    async def detokenize(http: Request) -> Response:
        """Return the text of token ids, with special tokens spelled out."""
        request, model, size = await read_body(http, DetokenizeRequest, engine)
        text = await unless_gone(http.receive, by_size(size, _text_of, request.tokens, model))
        return json_answer({"prompt": text}, ignored_header(request))


def _text_of(tokens: list[int], model: ServedModel) -> str:
    check_ids("tokens", tokens, _MOST_TOKENS, model.info.vocab_size)
    return model.codec.decode_long(tokens)


def _tokens_of(request: TokenizeRequest, model: ServedModel) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise BadParameter("prompt", "either a prompt or messages must be given")
    if request.messages is not None:
        return chat_prompt(request.messages, model, request, request.add_special_tokens is True)
    request.check_template_options()
    text, special = text_prompt(request.prompt or "", "prompt"), request.add_special_tokens is not False
    return model.codec.encode(text, model.info.max_context, special)
