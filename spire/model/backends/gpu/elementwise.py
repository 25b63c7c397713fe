"""Triton kernels for what lies between the matrix products of a layer on a GPU, each in one launch.

Each launch is an operator of torch that returns nothing and names what it writes: so it can be counted, and work runs
on meta tensors without a GPU.

Numbers are computed in fp32 and rounded once, where torch rounds after each operation.

Shapes: R rows (positions of all sequences), D width, H query heads, G key/value heads, K head width, F inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from spire.model.backends.gpu.fp8 import FP8, LARGEST, LEAST_SCALE, Rows8

_BLOCK = 1024


def norm(x_RD: Tensor, weight_D: Tensor, eps: float, fp8: bool = False) -> Tensor | Rows8:
    """Return the RMSNorm of each row, in fp8 if asked."""
    return _normed(x_RD, None, weight_D, eps, x_RD, fp8)


def add_norm(
    x_RD: Tensor, more_RD: Tensor, weight_D: Tensor, eps: float, sum_RD: Tensor | None = None, fp8: bool = False
) -> tuple[Tensor, Tensor | Rows8]:
    """Return the sum of two tensors, written to `sum_RD` if given, and the RMSNorm of each row of the sum."""
    sum_RD = torch.empty_like(x_RD) if sum_RD is None else sum_RD
    return sum_RD, _normed(x_RD, more_RD, weight_D, eps, sum_RD, fp8)


def _normed(
    x_RD: Tensor, more_RD: Tensor | None, weight_D: Tensor, eps: float, sum_RD: Tensor, fp8: bool
) -> Tensor | Rows8:
    out = _empty8(x_RD) if fp8 else (torch.empty_like(x_RD), None)
    _launch_add_norm(x_RD, more_RD, weight_D, sum_RD, *out, eps)
    return out if isinstance(out, Rows8) else out[0]


@custom_op("spire::add_norm", mutates_args=("sum_RD", "out_RD", "scale_R1"))
def _launch_add_norm(
    x_RD: Tensor, more_RD: Tensor | None, weight_D: Tensor, sum_RD: Tensor, out_RD: Tensor, scale_R1: Tensor | None,
    eps: float,
) -> None:  # fmt: skip
    R, D = x_RD.shape
    block = triton.next_power_of_2(D)
    _add_norm[(R,)](
        x_RD, x_RD if more_RD is None else more_RD, weight_D, sum_RD, out_RD,
        weight_D if scale_R1 is None else scale_R1, eps, D, ADD=more_RD is not None, FP8=scale_R1 is not None,
        LARGEST=LARGEST, LEAST=LEAST_SCALE, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def quantise(x_RD: Tensor) -> Rows8:
    """Round rows to fp8."""
    found = _empty8(x_RD)
    _launch_quantise(x_RD, *found)
    return found


@custom_op("spire::quantise", mutates_args=("out_RD", "scale_R1"))
def _launch_quantise(x_RD: Tensor, out_RD: Tensor, scale_R1: Tensor) -> None:
    R, D = x_RD.shape
    block = triton.next_power_of_2(D)
    _quantise[(R,)](x_RD, out_RD, scale_R1, D, LARGEST=LARGEST, LEAST=LEAST_SCALE, BLOCK=block, num_warps=_warps(block))


def _empty8(x_RD: Tensor) -> Rows8:
    return Rows8(torch.empty_like(x_RD, dtype=FP8), x_RD.new_empty(len(x_RD), 1, dtype=torch.float32))


def rotate_and_store(
    projected_RE: Tensor,
    cosine_RK: Tensor,
    signed_sine_RK: Tensor,
    rows_RG: Tensor,
    keys_PK: Tensor,
    values_PK: Tensor,
    heads: int,
    new_tokens: int,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to rows of a cache. Return the queries, [B, H, T, K].

    `projected_RE` has the queries, keys and values of each position, head by head. `rows_RG` (int64) are the rows of
    `keys_PK` and `values_PK` to write to.
    """
    queries_BHTK = projected_RE.new_empty(len(rows_RG) // new_tokens, heads, new_tokens, keys_PK.shape[1])
    _launch_rotate_and_store(
        projected_RE, cosine_RK, signed_sine_RK, rows_RG, queries_BHTK, keys_PK, values_PK, heads, new_tokens
    )
    return queries_BHTK


@custom_op("spire::rotate_and_store", mutates_args=("queries_BHTK", "keys_PK", "values_PK"))
def _launch_rotate_and_store(
    projected_RE: Tensor, cosine_RK: Tensor, signed_sine_RK: Tensor, rows_RG: Tensor,
    queries_BHTK: Tensor, keys_PK: Tensor, values_PK: Tensor, heads: int, new_tokens: int,
) -> None:  # fmt: skip
    R, G = rows_RG.shape
    _rotate_and_store[(R, heads + 2 * G)](
        projected_RE, cosine_RK, signed_sine_RK, rows_RG, queries_BHTK, keys_PK, values_PK, heads, G, new_tokens,
        HALF=keys_PK.shape[1] // 2, num_warps=1,
    )  # fmt: skip


def silu_mul(gate_up_RE: Tensor) -> Tensor:
    """Return silu(gate) · up, [R, F], of rows that hold gate and up one after the other, [R, 2 F]."""
    out_RF = gate_up_RE.new_empty(len(gate_up_RE), gate_up_RE.shape[1] // 2)
    _launch_silu_mul(gate_up_RE, out_RF)
    return out_RF


@custom_op("spire::silu_mul", mutates_args=("out_RF",))
def _launch_silu_mul(gate_up_RE: Tensor, out_RF: Tensor) -> None:
    R, F = out_RF.shape
    _silu_mul[(R, triton.cdiv(F, _BLOCK))](gate_up_RE, out_RF, F, BLOCK=_BLOCK, num_warps=4)


def try_out(dtype: torch.dtype, device: torch.device, width: int, head_dim: int) -> None:
    """Run each kernel once, so that Triton compiles it now. Raises RuntimeError for a wrong result."""
    ones = torch.ones(1, width, dtype=dtype, device=device)
    total, normed = add_norm(ones, ones, ones[0], 0.0)
    normed_alone = norm(ones, ones[0], 0.0)
    assert isinstance(normed, Tensor)
    assert isinstance(normed_alone, Tensor)
    pools = torch.zeros(2, 1, head_dim, dtype=dtype, device=device)
    projected, rows = ones.new_ones(1, 3 * head_dim), torch.zeros(1, 1, dtype=torch.int64, device=device)
    cosine, sine = projected[:, :head_dim], pools[0].clone()
    queries = rotate_and_store(projected, cosine.contiguous(), sine, rows, pools[0], pools[1], 1, 1)
    found = (normed_alone, normed, total / 2, queries, pools, silu_mul(ones * 0 + 1) / 0.7311)
    if not all(torch.allclose(x.float(), torch.ones((), device=device), atol=1e-2) for x in found):
        raise RuntimeError("elementwise kernels of ones do not give ones")


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit(do_not_specialize=["eps"])
def _add_norm(
    x, more, weight, total, out, scales, eps, D,
    ADD: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    used = at < D
    row = tl.program_id(0).to(tl.int64)
    place = row * D + at
    value = tl.load(x + place, mask=used, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(more + place, mask=used, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=used)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    gain = tl.load(weight + at, mask=used, other=0.0).to(tl.float32)
    normed = wide * scale * gain
    if FP8:
        unit = tl.maximum(tl.max(tl.abs(normed), 0) / LARGEST, LEAST)
        tl.store(scales + row, unit)
        tl.store(out + place, (normed / unit).to(tl.float8e4nv), mask=used)
    else:
        tl.store(out + place, normed.to(value.dtype), mask=used)


@triton.jit
def _quantise(x, out, scales, D, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    used = at < D
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * D + at, mask=used, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, LEAST)
    tl.store(scales + row, unit)
    tl.store(out + row * D + at, (value / unit).to(tl.float8e4nv), mask=used)


@triton.jit(do_not_specialize=["H", "G", "T"])
def _rotate_and_store(projected, cosine, sine, rows, queries, keys, values, H, G, T, HALF: tl.constexpr):
    r, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    K: tl.constexpr = 2 * HALF
    at = tl.arange(0, HALF)
    source = projected + (r * (H + 2 * G) + head) * K + at
    first, second = tl.load(source), tl.load(source + HALF)
    if head < H + G:
        angle = r * K + at
        low = first.to(tl.float32) * tl.load(cosine + angle).to(tl.float32)
        low += second.to(tl.float32) * tl.load(sine + angle).to(tl.float32)
        high = second.to(tl.float32) * tl.load(cosine + angle + HALF).to(tl.float32)
        high += first.to(tl.float32) * tl.load(sine + angle + HALF).to(tl.float32)
        first, second = low.to(first.dtype), high.to(second.dtype)
    if head < H:
        to = queries + ((r // T * H + head) * T + r % T) * K + at
        tl.store(to, first)
        tl.store(to + HALF, second)
    elif head < H + G:
        to = keys + tl.load(rows + r * G + head - H) * K + at
        tl.store(to, first)
        tl.store(to + HALF, second)
    else:
        to = values + tl.load(rows + r * G + head - H - G) * K + at
        tl.store(to, first)
        tl.store(to + HALF, second)


@triton.jit
def _silu_mul(gate_up, out, F, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=used, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=used, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * F + at, (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(gate.dtype), mask=used)
