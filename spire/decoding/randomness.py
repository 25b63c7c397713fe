"""Random numbers as a hash of (seed, choice, absolute position, purpose) instead of a stream.

A token therefore depends on nothing that batching, retries or restarts could change. Drafting, acceptance and sampling
are different purposes, because sharing a number between them would bias the output.

Does not know: what the numbers are used for.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from spire import kernels

# 64-bit constants of splitmix64, as the int64 with the same bits.
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class Purpose(IntEnum):
    """The purpose of a random number. Numbers for different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3
    NOISE = 4
    TAIL = 5


def random_bits(seed: Tensor, choice: Tensor, position: Tensor, purpose: Purpose, salt: Tensor | int = 0) -> Tensor:
    """Return 64 random bits as int64 for each (seed, choice, position, salt), int64 tensors that broadcast.

    Positions and salts must be below 2^31.
    """
    hashed = _mix(seed + _WEYL)
    hashed = _mix(hashed + (choice * len(Purpose) + int(purpose)) * _WEYL)
    return _mix(hashed + (position + 1 + (salt << 32)) * _WEYL)


def uniform(seed: Tensor, choice: Tensor, position: Tensor, purpose: Purpose, salt: Tensor | int = 0) -> Tensor:
    """Return a uniform float64 random number in [0, 1) for each (seed, choice, position, salt)."""
    return _shift_right(random_bits(seed, choice, position, purpose, salt), 11).double() * 2.0**-53


def uniforms_behind(
    base_B: Tensor, count: int, purpose: Purpose, seed_B: Tensor, choice_B: Tensor, salted_B: Tensor
) -> Tensor:
    """Return the random numbers of `uniform`, [B, count], for the `count` positions after `base_B`, by a kernel if any.

    `salted_B` (int64) is 1 for sequences whose salt is base + 1, and 0 for sequences without a salt.
    """
    if kernels.uniforms is None or seed_B.device.type != "cpu":
        position_BT = base_B[:, None] + torch.arange(1, count + 1, device=base_B.device)
        salt_B = salted_B * (base_B + 1)
        return uniform(seed_B[:, None], choice_B[:, None], position_BT, purpose, salt_B[:, None])
    given = [number_B.contiguous() for number_B in (seed_B, choice_B, salted_B, base_B)]
    found_BT = torch.empty(len(base_B), count, dtype=torch.float64)
    addresses = (number.data_ptr() for number in (*given, found_BT))
    kernels.uniforms(*addresses, len(base_B), count, purpose)
    return found_BT


def gumbel(bits: Tensor, key: Tensor) -> Tensor:
    """Return float64 Gumbel noise from random bits and non-negative keys, such as token ids. Both broadcast."""
    u = _shift_right(_mix(bits + (key + 1) * _WEYL), 11).double() * 2.0**-53 + 2.0**-54
    return -(-u.log()).log()


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser: flipping an input bit flips each output bit with probability 1/2."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 values right logically, without copying the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
