"""What `POST /v1/completions` takes, and the checks that need no model.

Fields of later stages are known here: a value that would change the output is refused, never ignored. Unknown fields
are kept apart, so that the answer can name them.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from gateway.bodies import RequestBody
from gateway.errors import BadParameter

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
_LONGEST_STOP = 1024

Prompt = str | list[int]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(BaseModel):
    """How this request is drafted: by the connected draft (its name, its kind or "auto"), or not at all ("off")."""

    model_config = ConfigDict(strict=True, extra="forbid")

    draft: str = "auto"
    k: int | None = Field(
        default=None, ge=0, le=64, description="draft tokens a round; by default the gateway's choice"
    )
    rule: Literal["rejection"] | None = None


class CompletionRequest(RequestBody):
    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int = Field(16, ge=0)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 and -1 keep all tokens")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int = Field(1, ge=1, le=16)
    stop: str | list[str] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: Speculation = Field(default_factory=Speculation)
    return_token_ids: bool = False
    return_metrics: bool = False

    # Of later stages.
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    suffix: str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def chosen_seed(self) -> int:
        """The caller's seed as 64 unsigned bits, or a fresh one."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64


_LATER_AND_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "suffix": (None, ""),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
}


def check(request: CompletionRequest) -> None:
    """What pydantic's types cannot say. Raises BadParameter."""
    for name, neutral in _LATER_AND_NEUTRAL.items():
        if getattr(request, name) not in neutral:
            raise BadParameter(name, f"{name} is not supported yet: leave it out", "unsupported_parameter")
    if request.best_of not in (None, request.n):
        raise BadParameter("best_of", "best_of other than n is not supported yet", "unsupported_parameter")
    if request.max_tokens == 0:
        raise BadParameter("max_tokens", "max_tokens of 0 needs echo, which is not supported yet: ask for at least 1")
    if request.stream_options is not None and not request.stream:
        raise BadParameter("stream_options", "stream_options is only allowed with stream: true")
    _check_stops(request.stops)


def _check_stops(stops: list[str]) -> None:
    if len(stops) > 4:
        raise BadParameter("stop", f"at most 4 stop strings are allowed, {len(stops)} came")
    for stop in stops:
        if not stop:
            raise BadParameter("stop", "a stop string must not be empty")
        if len(stop) > _LONGEST_STOP:
            raise BadParameter("stop", f"a stop string may have {_LONGEST_STOP} characters, one has {len(stop)}")


def prompts_of(value: Any, max_context: int, vocab_size: int, max_prompts: int) -> list[Prompt]:
    """The prompts of a request: texts as they came, token ids checked against vocabulary and context."""
    if isinstance(value, str):
        return [text_prompt(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise BadParameter("prompt", "prompt must be a string, a list of strings, or one or more lists of token ids")
    if _is_token(value[0]):
        return [_token_ids(value, max_context, vocab_size, "prompt")]
    if len(value) > max_prompts:
        raise BadParameter("prompt", f"prompt holds {len(value)} prompts; a request may hold {max_prompts} choices")
    return [_one_of_many(item, value[0], max_context, vocab_size, f"prompt[{at}]") for at, item in enumerate(value)]


def _one_of_many(item: Any, first: Any, max_context: int, vocab_size: int, where: str) -> Prompt:
    if isinstance(first, str) and isinstance(item, str):
        return text_prompt(item, where)
    if isinstance(first, list) and isinstance(item, list):
        return _token_ids(item, max_context, vocab_size, where)
    raise BadParameter("prompt", f"{where} is {_kind(item)}: a prompt list holds only strings or only lists of ids")


def text_prompt(text: str, where: str) -> str:
    """The text itself. Raises BadParameter for none, and for what is no Unicode."""
    if not text:
        raise BadParameter("prompt", f"{where} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameter("prompt", f"{where} is no valid Unicode text: {error.reason}") from error
    return text


def _token_ids(ids: list[Any], max_context: int, vocab_size: int, where: str) -> list[int]:
    if not ids:
        raise BadParameter("prompt", f"{where} is empty")
    if len(ids) >= max_context:
        raise over_context(len(ids), None, max_context)
    for token in ids:
        if not _is_token(token):
            raise BadParameter("prompt", f"{where} holds {_kind(token)} among token ids")
        if not 0 <= token < vocab_size:
            raise BadParameter("prompt", f"{where} holds token id {token}; ids end at {vocab_size - 1}")
    return ids


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "a list"}
    return names.get(type(value), "null or an object")


def over_context(prompt_tokens: int, max_tokens: int | None, max_context: int) -> BadParameter:
    wish = "" if max_tokens is None else f" and {max_tokens} of output are asked for"
    message = f"the model's context is {max_context} tokens, but the prompt has {prompt_tokens}{wish}"
    return BadParameter("prompt" if max_tokens is None else "max_tokens", message, "context_length_exceeded")
