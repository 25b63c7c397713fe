"""Converts sequences to protocol messages, and protocol messages to logprobs."""

from __future__ import annotations

import math
import sys
from array import array
from collections import abc
from dataclasses import dataclass
from typing import Any

from gateway.sequence import Logprob, Sequence
from spire.errors import MismatchError
from spire.v1 import tensor_pb2, verifier_pb2

_FORMATS = {tensor_pb2.DTYPE_FLOAT32: "f", tensor_pb2.DTYPE_INT32: "i"}


def wire_start(sequence: Sequence) -> verifier_pb2.Start:
    """Return the Start message of a sequence: its tokens so far and all parameters that determine the next ones."""
    return verifier_pb2.Start(
        sequence_id=sequence.wire_id,
        tokens=sequence.tokens,
        sampling=sequence.sampling,
        draft_id=sequence.draft_id,
        prompt_tokens=len(sequence.prompt),
        adjustments=sequence.adjustments,
        prompt_logprobs=sequence.lacks_prompt_logprobs,
        cache_salt=sequence.cache_salt,
        paused=sequence.paused,
        came_back=sequence.came_back,
        logprobs=sequence.top_logprobs,
    )


@dataclass(frozen=True, slots=True)
class Likeliest(abc.Sequence[tuple[int, float]]):
    """The (token, logprob) pairs of the likeliest tokens at one position, in eight bytes each."""

    ids: array[int]
    numbers: array[float]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Likeliest(self.ids[at], self.numbers[at])
        return self.ids[at], self.numbers[at]


@dataclass(frozen=True, slots=True)
class Logprobs(abc.Sequence[Logprob]):
    """The logprobs of many tokens, in compact arrays as in the protocol message; each Logprob is built on access."""

    numbers: array[float]
    ranks: array[int]
    ids: array[int]
    others: array[float]
    # Number of likeliest tokens at each position.
    width: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        begin = range(len(self))[at] * self.width
        top = Likeliest(self.ids[begin : begin + self.width], self.others[begin : begin + self.width])
        return Logprob(self.numbers[at], top, self.ranks[at] if self.ranks else 0)


def logprobs_of(message: verifier_pb2.Logprobs, tokens: int, top: int, ranked: bool = False) -> Logprobs:
    """Read the logprobs of `tokens` tokens and of up to `top` likeliest tokens at each. Raises MismatchError."""
    numbers = _values(message.tokens, tensor_pb2.DTYPE_FLOAT32)
    ranks = _values(message.ranks, tensor_pb2.DTYPE_INT32) if ranked else array("i")
    if len(numbers) != tokens or (ranked and len(ranks) != tokens):
        raise MismatchError(f"{tokens} tokens came with {len(numbers)} logprobs and {len(ranks)} ranks")
    if not top or not tokens:
        return Logprobs(numbers, ranks, array("i"), array("f"), 0)
    ids = _values(message.top_ids, tensor_pb2.DTYPE_INT32)
    others = _values(message.top, tensor_pb2.DTYPE_FLOAT32)
    width = len(ids) // tokens
    if not 0 < width <= top or len(ids) != width * tokens or len(others) != len(ids):
        came = f"{len(ids)} ids and {len(others)} logprobs"
        raise MismatchError(f"the {top} likeliest of {tokens} tokens were asked for, but {came} came")
    return Logprobs(numbers, ranks, ids, others, width)


def _values(tensor: tensor_pb2.Tensor, dtype: tensor_pb2.DType) -> array[Any]:
    """Return the numbers of a tensor message in row-major order; none if it is absent. Raises MismatchError."""
    count = math.prod(tensor.shape) if tensor.shape else 0
    if count and (tensor.dtype != dtype or len(tensor.data) != 4 * count):
        raise MismatchError(f"{len(tensor.data)} bytes of dtype {tensor.dtype} came for shape {list(tensor.shape)}")
    values = array(_FORMATS[dtype], tensor.data[: 4 * count])
    if sys.byteorder == "big":
        values.byteswap()
    return values
