"""Logprobs as the completions API shows them, in four parallel arrays, and as the chat API does, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gateway.sequence import Logprob
from gateway.tokenizer import TextCodec

# For each token of a prompt the tokens that are told of, by id; None for the first.
PromptLogprobs = list[dict[str, Any] | None]

# What clients know as "could not come": JSON has no infinity.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A token, what is known of it (nothing of a text's first one), and where it begins in the choice's text."""

    token: int
    logprob: Logprob | None
    offset: int


def arrays(entries: list[Entry], codec: TextCodec, top: int) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset` of entries, with `top` alternatives each."""
    return {
        "tokens": [codec.token_text(entry.token) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else _shown(entry.logprob.token) for entry in entries],
        "top_logprobs": [_alternatives(entry, codec, top) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def contents(entries: list[Entry], codec: TextCodec, top: int) -> list[dict[str, Any]]:
    """The same as the chat API shows it: one object for each token that has a logprob."""
    return [
        _named(entry.token, entry.logprob.token, codec)
        | {"top_logprobs": [_named(token, logprob, codec) for token, logprob in entry.logprob.top[:top]]}
        for entry in entries
        if entry.logprob is not None
    ]


def of_prompt(prompt: list[int], logprobs: list[Logprob], codec: TextCodec, top: int) -> PromptLogprobs:
    """For each token of a prompt itself and the `top` likeliest ones, by id; None for the first, which has none."""
    shown: PromptLogprobs = [None]
    for token, logprob in zip(prompt[1:], logprobs, strict=True):
        ranked = [(token, logprob.token, logprob.rank)]
        ranked += [(other, number, rank) for rank, (other, number) in enumerate(logprob.top[:top], 1) if other != token]
        shown.append({str(id_): _ranked(id_, number, rank, codec) for id_, number, rank in ranked})
    return shown


def _ranked(token: int, logprob: float, rank: int, codec: TextCodec) -> dict[str, Any]:
    return {"logprob": _shown(logprob), "rank": rank, "decoded_token": codec.token_text(token)}


def _named(token: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    return {"token": codec.token_text(token), "logprob": _shown(logprob), "bytes": list(codec.token_bytes(token))}


def _alternatives(entry: Entry, codec: TextCodec, top: int) -> dict[str, float] | None:
    """The likeliest tokens by their text, the token itself among them; of two with one text the likelier."""
    if entry.logprob is None:
        return None
    shown: dict[str, float] = {}
    for token, logprob in [*entry.logprob.top[:top], (entry.token, entry.logprob.token)] if top else []:
        shown.setdefault(codec.token_text(token), _shown(logprob))
    return shown


def _shown(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def mean(logprobs: list[Logprob]) -> float:
    """The mean of tokens' logprobs; of no tokens, the worst."""
    return sum(logprob.token for logprob in logprobs) / len(logprobs) if logprobs else -math.inf
