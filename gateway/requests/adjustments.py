"""Converts a request's logit adjustments to the verifier's message, and the verifier's field names to the request's."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.aside import asker
from gateway.requests.schemas import CompletionRequest
from spire.v1.verifier_pb2 import Adjustments, Grammar

# The fields of a request by their names at the verifier, where the names differ.
_FIELDS = {"allowed_tokens": "allowed_token_ids", "end_tokens": "stop_token_ids", "rule": "speculation.rule"}


def adjustments_of(request: CompletionRequest, end_tokens: Iterable[int]) -> Adjustments | None:
    """Return the logit adjustments of a request, None if there are none. `end_tokens`: end tokens of the model."""
    adjustments = Adjustments(
        logit_bias=request.biases,
        allowed_tokens=request.allowed_token_ids,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )
    if (shape := request.shape) is not None:
        text: dict[str, str] = {shape.kind: shape.text}
        adjustments.grammar.CopyFrom(Grammar(**text, json_whitespace=shape.whitespace, asker=asker.get()))
    if request.repetition_penalty != 1:
        adjustments.repetition_penalty = request.repetition_penalty
    if request.min_tokens:
        adjustments.min_tokens = request.min_tokens
        adjustments.end_tokens.extend(sorted({*end_tokens, *request.stop_token_ids}))
    return adjustments if adjustments.ByteSize() else None


def field_of(request: CompletionRequest, param: str) -> str:
    """Return the request's name of the field that the verifier calls `param`; empty if there is no such field."""
    if param == "tokens":
        return request.prompt_name
    if param == "grammar":
        return request.shape.field if request.shape else ""
    return _FIELDS.get(param, param if param in type(request).model_fields else "")
