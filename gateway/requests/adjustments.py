"""Logit adjustments: from a request to the verifier's message, and the field of a request that the verifier refused."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.aside import asker
from gateway.requests.schemas import CompletionRequest
from gateway.requests.structured import OutputShape
from spire.v1.verifier_pb2 import Adjustments, Grammar


def adjustments_of(request: CompletionRequest, end_tokens: Iterable[int]) -> Adjustments | None:
    """Return the adjustments for every choice of a request, or None if there are none. `end_tokens`: the model's."""
    adjustments = Adjustments(
        logit_bias=request.biases,
        allowed_tokens=request.allowed_token_ids,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        grammar=_grammar_of(request.shape),
    )
    if request.repetition_penalty != 1:
        adjustments.repetition_penalty = request.repetition_penalty
    if request.min_tokens:
        adjustments.min_tokens = request.min_tokens
        adjustments.end_tokens.extend(sorted({*end_tokens, *request.stop_token_ids}))
    return adjustments if adjustments.ByteSize() else None


def field_of(request: CompletionRequest, param: str) -> str:
    """Return the name of the request's field that the verifier calls `param`; empty if there is none."""
    match param:
        case "tokens":
            return request.prompt_name
        case "grammar":
            return request.shape.field if request.shape else ""
        case "allowed_tokens":
            return "allowed_token_ids"
        case "end_tokens":
            return "stop_token_ids"
        case "rule":
            return "speculation.rule"
        case _:
            return param if param in type(request).model_fields else ""


def _grammar_of(shape: OutputShape | None) -> Grammar | None:
    if shape is None:
        return None
    match shape.kind:
        case "json_schema":
            return Grammar(json_schema=shape.text, json_whitespace=shape.whitespace, asker=asker.get())
        case "regex":
            return Grammar(regex=shape.text, asker=asker.get())
        case "lark":
            return Grammar(lark=shape.text, asker=asker.get())
