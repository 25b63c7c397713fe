"""Logprobs in the formats of the completions API (four parallel arrays) and of the chat API (one object per token)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gateway.sequence import Logprob
from gateway.text.json_pieces import Shown
from gateway.text.tokenizer import TextCodec

# The logprob that clients know as "impossible": JSON has no infinity.
_IMPOSSIBLE = -9999.0


class LogprobEntry(NamedTuple):
    """A token, its logprob (None for a prompt's first token), and its offset in the choice's text."""

    token: int
    logprob: Logprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class PromptEntries(Sequence[LogprobEntry]):
    """The logprob entries of a prompt's tokens, each built only when it is accessed."""

    prompt: list[int]
    # Logprobs of all tokens but the first.
    logprobs: Sequence[Logprob]
    offsets: list[int]

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        return LogprobEntry(self.prompt[at], self.logprobs[at - 1] if at else None, self.offsets[at])


def arrays(entries: Sequence[LogprobEntry], codec: TextCodec, top: int) -> dict[str, Shown]:
    """Return the four arrays of the completions format for these entries, with `top` alternatives for each token."""
    return {
        "tokens": Shown(entries, lambda entry: codec.token_text(entry.token)),
        "token_logprobs": Shown(entries, lambda entry: None if entry.logprob is None else _shown(entry.logprob.token)),
        "top_logprobs": Shown(entries, partial(_alternatives, codec, top)),
        "text_offset": Shown(entries, lambda entry: entry.offset),
    }


def contents(entries: Sequence[LogprobEntry], codec: TextCodec, top: int) -> Shown:
    """Return logprob entries in the chat format: one object per token, with `top` alternatives each."""
    return Shown(entries, partial(_content, codec, top))


def of_prompt(prompt: list[int], logprobs: Sequence[Logprob], codec: TextCodec, top: int) -> Shown:
    """Return for each prompt token its logprob and those of the `top` likeliest, by token id; None for the first."""
    return Shown(PromptEntries(prompt, logprobs, [0] * len(prompt)), partial(_by_id, codec, top))


def _content(codec: TextCodec, top: int, entry: LogprobEntry) -> dict[str, Any]:
    logprob = entry.logprob or Logprob(-math.inf, [])
    others = [_named(token, number, codec) for token, number in logprob.top[:top]]
    return _named(entry.token, logprob.token, codec) | {"top_logprobs": others}


def _by_id(codec: TextCodec, top: int, entry: LogprobEntry) -> dict[str, Any] | None:
    if (own := entry.logprob) is None:
        return None
    ranked = [(entry.token, own.token, own.rank)]
    ranked += [(other, number, rank) for rank, (other, number) in enumerate(own.top[:top], 1) if other != entry.token]
    return {
        str(id_): {"logprob": _shown(number), "rank": rank, "decoded_token": codec.token_text(id_)}
        for id_, number, rank in ranked
    }


def _named(token: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    return {"token": codec.token_text(token), "logprob": _shown(logprob), "bytes": list(codec.token_bytes(token))}


def _alternatives(codec: TextCodec, top: int, entry: LogprobEntry) -> dict[str, float] | None:
    """Return {text: logprob} of the `top` likeliest tokens and the token itself; of equal texts, the likelier token."""
    if entry.logprob is None:
        return None
    shown: dict[str, float] = {}
    for token, logprob in [*entry.logprob.top[:top], (entry.token, entry.logprob.token)] if top else []:
        shown.setdefault(codec.token_text(token), _shown(logprob))
    return shown


def _shown(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
