"""Randomness that is a function and not a stream.

Every number comes from a hash of (seed, choice, absolute position, purpose). So a token depends on nothing that
batching, retries or restarts could change. Draft, acceptance and sampling are different purposes: sharing a number
between them biases the output.

What it does not know: what the numbers are used for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spire import kernels

# 64-bit constants of splitmix64.
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Numbers of 64 bits: an int64 tensor, or numpy's unsigned integers, of which a few are combined in a tenth of the time.
_Bits = Any


class Purpose(IntEnum):
    """What a random number decides. Each has numbers of its own."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3
    NOISE = 4
    TAIL = 5


def random_bits(seed: Tensor, choice: Tensor, position: Tensor, purpose: Purpose, salt: Tensor | int = 0) -> Tensor:
    """64 bits in int64 for each (seed, choice, position, salt), all int64 tensors that broadcast.

    Positions and salts are below 2^31.
    """
    numbers = (seed, choice, position, torch.as_tensor(salt, device=seed.device))
    if seed.device.type != "cpu":
        bits: Tensor = _hash(purpose, *numbers)
        return bits
    with np.errstate(over="ignore"):
        hashed = _hash(purpose, *(number.numpy().view(np.uint64) for number in numbers))
    return torch.from_numpy(np.asarray(hashed).view(np.int64))


def uniform(seed: Tensor, choice: Tensor, position: Tensor, purpose: Purpose, salt: Tensor | int = 0) -> Tensor:
    """A float64 number in [0, 1) for each (seed, choice, position, salt)."""
    return _shift_right(random_bits(seed, choice, position, purpose, salt), 11).double() * 2.0**-53


def uniforms_behind(
    base_B: Tensor, count: int, purpose: Purpose, seed_B: Tensor, choice_B: Tensor, salted_B: Tensor
) -> Tensor:
    """`uniform` [B, count] for the positions behind `base_B`, by one kernel where it can be.

    Where `salted_B` is 1 and not 0 (int64), the position behind the base is the salt.
    """
    if kernels.uniforms is None or seed_B.device.type != "cpu":
        position_BT = base_B[:, None] + torch.arange(1, count + 1, device=base_B.device)
        salt_B = salted_B * (base_B + 1)
        return uniform(seed_B[:, None], choice_B[:, None], position_BT, purpose, salt_B[:, None])
    given = [number_B.contiguous() for number_B in (seed_B, choice_B, salted_B, base_B)]
    found_BT = torch.empty(len(base_B), count, dtype=torch.float64)
    addresses = (number.data_ptr() for number in (*given, found_BT))
    kernels.uniforms(*addresses, len(base_B), count, purpose, len(Purpose))
    return found_BT


def gumbel(bits: Tensor, key: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for `random_bits` and non-negative keys, such as token ids, which broadcast."""
    u = _shift_right(_mix(bits + _times(key + 1, _WEYL)), 11).double() * 2.0**-53 + 2.0**-54
    return -(-u.log()).log()


def _hash(purpose: Purpose, seed: _Bits, choice: _Bits, position: _Bits, salt: _Bits) -> _Bits:
    hashed = _mix(seed + _constant(seed, _WEYL))
    hashed = _mix(hashed + _times(choice * len(Purpose) + int(purpose), _WEYL))
    return _mix(hashed + _times(position + 1 + (salt << 32), _WEYL))


def _mix(x: _Bits) -> _Bits:
    """splitmix64's finaliser: every bit of the input flips each output bit with probability 1/2."""
    x = _times(x ^ _shift_right(x, 30), _MIX_1)
    x = _times(x ^ _shift_right(x, 27), _MIX_2)
    return x ^ _shift_right(x, 31)


def _times(x: _Bits, constant: int) -> _Bits:
    return x * _constant(x, constant)


def _constant(x: _Bits, constant: int) -> int:
    """As the type of `x` takes it: a tensor carries signed bit patterns."""
    return constant - (1 << 64) if isinstance(x, Tensor) else constant


def _shift_right(x: _Bits, bits: int) -> _Bits:
    """Logical shift: the sign bit of int64 is not copied down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1) if isinstance(x, Tensor) else x >> bits
