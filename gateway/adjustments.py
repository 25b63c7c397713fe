"""The part of a request that changes the logits before they are sampled, as the verifier is told it.

And back: the request's own name of what the verifier says is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.aside import asker
from gateway.schemas import CompletionRequest
from gateway.structured import Shape
from spire.v1.verifier_pb2 import Adjustments, Grammar


def adjustments_of(request: CompletionRequest, end_tokens: Iterable[int]) -> Adjustments | None:
    """Those of every choice of a request; None when it changes nothing. `end_tokens` are the model's own."""
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
    """The request's field that came to the verifier as `param`; empty if there is none."""
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


def _grammar_of(shape: Shape | None) -> Grammar | None:
    if shape is None:
        return None
    match shape.kind:
        case "json_schema":
            return Grammar(json_schema=shape.text, json_whitespace=shape.whitespace, asker=asker.get())
        case "regex":
            return Grammar(regex=shape.text, asker=asker.get())
        case "lark":
            return Grammar(lark=shape.text, asker=asker.get())
