"""The body of `POST /v1/completions`, and its checks.

Does not know: the model, except its vocabulary size; unknown fields, which `gateway/requests/fields.py` checks.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema, model_validator

from gateway.errors import BadParameter
from gateway.requests.bodies import Part, Texts, TokenCount, TokenIds, parse
from gateway.requests.structured import StructuredRequest
from gateway.sequence import Rule, Stop
from spire.rpc.limits import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS

_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "format": "token-id", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        _TOKENS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _TOKENS_SCHEMA},
    ]
}
_MOST_STOPS = 4
_LONGEST_STOP = 1024
_MOST_CANDIDATES = 16
_LARGEST_BIAS = 100.0
_LONGEST_SALT = 256
# The most logprobs that the answer to one request may contain: some 100 MB while it is built and encoded.
MOST_LOGPROBS = 1 << 21

# Limits of fields that the types do not express and `checked` enforces.
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _LONGEST_STOP}
_STOPS_SCHEMA = {"anyOf": [_STOP_SCHEMA, {"type": "array", "maxItems": _MOST_STOPS, "items": _STOP_SCHEMA}]}
_BIAS_SCHEMA = {
    "type": "object",
    "description": "by token id",
    "maxProperties": MAX_LOGIT_BIASES,
    "propertyNames": {"format": "token-id-text"},
    "additionalProperties": {"type": ["number", "null"], "minimum": -_LARGEST_BIAS, "maximum": _LARGEST_BIAS},
}
_TRUNCATION_SCHEMA = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}
NEWER_LIMIT = "the newer name of max_tokens, and counts before it"


def only_with(flag: str, **unset: JsonValue) -> dict[str, Any]:
    """Return the JSON schema of a body whose field in `unset` may differ from that only if `flag` is true."""
    return {"anyOf": [{"properties": {flag: {"const": True}}, "required": [flag]}, {"properties": unset}]}


def not_both(**unset: JsonValue) -> dict[str, Any]:
    """Return the JSON schema of a body of whose two fields in `unset` only one may differ from that."""
    return {"anyOf": [{"properties": {name: value}} for name, value in unset.items()]}


OFF: JsonValue = {"enum": [False, None]}
_ABSENT: JsonValue = {"type": "null"}
# The pairs of fields of GenerationRequest that depend on each other.
PAIRS = [only_with("stream", stream_options=_ABSENT), not_both(stream=OFF, prompt_logprobs=_ABSENT)]

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it may have {MAX_LOGIT_BIASES} entries, {len(value)} came")
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Part):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Part):
    """Speculation options of a request. `draft`: the connected draft's name or kind, "auto", or "off" for none.

    Only Spire has these options, so unknown fields among them are refused.
    """

    model_config = ConfigDict(extra="forbid")

    draft: Annotated[str, Field(json_schema_extra={"format": "draft-name"})] = "auto"
    k: int | None = Field(default=None, ge=0, le=64, description="draft tokens a round; else the gateway's choice")
    rule: Rule | None = Field(default=None, description="by default invariant with a seed, block without")
    stop: Stop | None = Field(
        default=None,
        description="where the draft stops before k tokens, if it has a stop head: cost (where one more is worth less "
        "than it costs, while no other sequence runs), threshold, or off; by default cost if the gateway chooses k",
    )


class GenerationRequest(StructuredRequest):
    """The fields that completion requests and chat requests have in common."""

    model_config = ConfigDict(json_schema_extra={"allOf": [*PAIRS]})

    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 and -1 keep all tokens")
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int = Field(1, ge=1, le=_MOST_CANDIDATES)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_without_nulls), WithJsonSchema(_BIAS_SCHEMA)] = Field(
        default_factory=dict
    )
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    allowed_token_ids: TokenIds | None = Field(None, json_schema_extra={"minItems": 1, "maxItems": MAX_ALLOWED_TOKENS})
    max_completion_tokens: TokenCount | None = Field(None, ge=0, description=NEWER_LIMIT)
    min_tokens: TokenCount = Field(0, ge=0, description="not more than max_tokens")
    stop: Annotated[str | Texts, WithJsonSchema(_STOPS_SCHEMA)] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list, json_schema_extra={"maxItems": MAX_STOP_TOKENS})
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = Field(True, description="false: special tokens are part of the text, by their names")
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of each token of the prompt, and of so many others; not in a stream"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=_LONGEST_SALT,
        description="computed prompts are shared only with requests of the same salt: nobody else can tell by a "
        "faster answer that a prompt was seen before",
    )
    speculation: Speculation = Field(default_factory=Speculation)
    return_token_ids: bool = False
    return_token_origins: bool = False
    return_rounds: bool = False
    return_metrics: bool = False


class CompletionRequest(GenerationRequest):
    # The name of the request field that contained the prompt.
    prompt_name: ClassVar[str] = "prompt"
    # The name of the field that asked for alternatives beside the logprob of each output token.
    alternatives_name: ClassVar[str] = "logprobs"

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: TokenCount = Field(16, ge=0, description="0 only with echo")
    best_of: int | None = Field(None, ge=1, le=_MOST_CANDIDATES, description="not less than n; not in a stream")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, WithJsonSchema(_TRUNCATION_SCHEMA)] = Field(
        None, ge=-1, description="keep this many tokens of each prompt's end; -1 keeps what the context has room for"
    )

    @model_validator(mode="after")
    def _newer_limit_counts(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def limit_name(self) -> str:
        """The name of the field by which the client limits the number of output tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def candidates(self) -> int:
        """The number of texts to generate for each prompt; the best `n` of them are the answer."""
        return self.n if self.best_of is None else self.best_of

    @property
    def candidates_name(self) -> str:
        """The name of the field that sets `candidates`."""
        return "n" if self.best_of is None else "best_of"

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

    @property
    def wanted_logprobs(self) -> dict[str, int]:
        """The number of likeliest tokens to report at each position, by the names of the fields that ask for them."""
        wanted = {self.alternatives_name if self.logprobs else "logprobs": self.logprobs}
        wanted["prompt_logprobs"] = self.prompt_logprobs
        if self.candidates > self.n:
            wanted["best_of"] = 0  # the candidates are ranked by their logprobs
        return {name: number for name, number in wanted.items() if number is not None}

    @property
    def most_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each position; None if no logprobs are needed."""
        return max(self.wanted_logprobs.values(), default=None)

    @property
    def biases(self) -> dict[int, float]:
        return {int(token): bias for token, bias in self.logit_bias.items()}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def checked(request: CompletionRequest) -> CompletionRequest:
    """Return a request that keeps the constraints that pydantic's types cannot express. Raises BadParameter."""
    limit = request.limit_name
    if request.max_tokens == 0 and not request.echo:
        raise BadParameter(limit, f"{limit} of 0 needs echo: ask for at least 1, or for the prompt's echo")
    if request.min_tokens > request.max_tokens:
        message = f"min_tokens of {request.min_tokens} is more than {limit} of {request.max_tokens}"
        raise BadParameter("min_tokens", message)
    if request.stream_options is not None and not request.stream:
        raise BadParameter("stream_options", "stream_options is only allowed with stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise BadParameter("prompt_logprobs", "prompt_logprobs come with the whole answer: leave stream out")
    if request.truncate_prompt_tokens == 0:
        raise BadParameter("truncate_prompt_tokens", "truncate_prompt_tokens of 0 leaves no prompt: keep at least 1")
    if request.candidates < request.n:
        raise BadParameter("best_of", f"best_of of {request.best_of} is less than n of {request.n}")
    if request.stream and request.candidates > request.n:
        raise BadParameter("best_of", f"the best of {request.best_of} texts is known at their end: leave stream out")
    if len(request.stops) > _MOST_STOPS:
        raise BadParameter("stop", f"at most {_MOST_STOPS} stop strings are allowed, {len(request.stops)} came")
    for stop in request.stops:
        if not stop:
            raise BadParameter("stop", "a stop string must not be empty")
        if len(stop) > _LONGEST_STOP:
            raise BadParameter("stop", f"a stop string may have {_LONGEST_STOP} characters, one has {len(stop)}")
    _check_biases(request.logit_bias)
    _ = request.shape  # raises for several shapes, and for an obviously invalid one
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    return checked(parse(body, CompletionRequest))


def _check_biases(biases: dict[str, float]) -> None:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise BadParameter("logit_bias", f"logit_bias has the key {token[:40]!r}: keys are token ids, as text")
        if not abs(bias) <= _LARGEST_BIAS:
            message = f"logit_bias of token {token} is {bias:g}; it may be from {-_LARGEST_BIAS:g} to 100"
            raise BadParameter("logit_bias", message)


def check_tokens(request: CompletionRequest, vocab_size: int) -> None:
    """Check that all token ids in the request's fields are in the vocabulary. Raises BadParameter."""
    check_ids("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKENS, vocab_size)
    check_ids("logit_bias", list(request.biases), MAX_LOGIT_BIASES, vocab_size)
    if request.allowed_token_ids is not None:
        check_ids("allowed_token_ids", request.allowed_token_ids, MAX_ALLOWED_TOKENS, vocab_size)
        if not request.allowed_token_ids:
            raise BadParameter("allowed_token_ids", "allowed_token_ids is empty: no token could come")


def check_logprobs(request: CompletionRequest, prompt_lengths: list[int]) -> None:
    """Check that the answer can have at most MOST_LOGPROBS logprobs, alternatives included. Raises BadParameter."""
    if request.max_tokens > most_scored_output(request, prompt_lengths):
        wanted = request.wanted_logprobs
        name = max(wanted, key=wanted.__getitem__)
        tokens = len(prompt_lengths) * request.candidates * request.max_tokens
        raise BadParameter(
            name,
            f"a request may have {MOST_LOGPROBS} logprobs, and more could come, of {_scored(request, prompt_lengths)} "
            f"tokens of prompts, {tokens} of output and {wanted[name]} others beside each: "
            f"ask for fewer choices, {request.limit_name}, prompts or logprobs",
        )


def most_scored_output(request: CompletionRequest, prompt_lengths: list[int]) -> float:
    """Return the most output tokens of a choice with which the answer has at most MOST_LOGPROBS logprobs."""
    if request.most_logprobs is None:
        return inf
    scored = MOST_LOGPROBS // (1 + request.most_logprobs)
    return (scored - _scored(request, prompt_lengths)) // (len(prompt_lengths) * request.candidates)


def _scored(request: CompletionRequest, prompt_lengths: list[int]) -> int:
    return sum(prompt_lengths) if request.scores_prompt else 0


def check_ids(name: str, ids: list[int], most: int, vocab_size: int) -> None:
    """Raise BadParameter if the field `name` has over `most` token ids, or one outside the vocabulary."""
    if len(ids) > most:
        raise BadParameter(name, f"{name} may have {most} token ids, {len(ids)} came")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadParameter(name, f"{name} holds token id {token}; ids are from 0 to {vocab_size - 1}")
