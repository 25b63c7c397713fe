"""The elementwise kernels of a GPU compute what torch computes. Triton interprets them here."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn

from spire.model.config import RopeConfig
from spire.model.layers import Rope, rotate
from tests.marks import thoroughly
from tests.spire.model.test_gpu_layers import near

each_dtype = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@each_dtype
@pytest.mark.parametrize("width", [64, thoroughly(96), thoroughly(4096)])
def test_a_norm_of_a_sum_is_that_of_torch(kernels: ModuleType, dtype: torch.dtype, bound: float, width: int) -> None:
    torch.manual_seed(width)
    x_RD, more_RD = torch.randn(2, 5, width).to(dtype)
    weight_D = torch.rand(width).to(dtype)
    total, normed = kernels.add_norm(x_RD, more_RD, weight_D, 1e-5)
    assert torch.equal(total, x_RD + more_RD)
    right = nn.functional.rms_norm((x_RD + more_RD).double(), (width,), weight_D.double(), 1e-5)
    assert near(normed, right, bound)
    assert torch.equal(kernels.norm(total, weight_D, 1e-5), normed)


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), thoroughly(8, 1, 64), thoroughly(3, 3, 128)])
def test_what_is_rotated_is_stored_where_its_row_says(
    kernels: ModuleType, dtype: torch.dtype, bound: float, heads: int, kv_heads: int, width: int
) -> None:
    torch.manual_seed(heads)
    B, T, rows = 3, 2, 40
    projected = torch.randn(B * T, (heads + 2 * kv_heads) * width).to(dtype)
    positions_BT = torch.tensor([[5, 6], [0, 1], [999, 1000]])
    rope = Rope(width, RopeConfig())(positions_BT, dtype)
    rows_RG = torch.randperm(rows)[: B * T * kv_heads].view(B * T, kv_heads)
    keys, values = torch.full((2, rows, width), torch.nan, dtype=dtype)
    cosine, sine = (part.reshape(B * T, width) for part in rope)
    queries = kernels.rotate_and_store(projected, cosine, sine, rows_RG, keys, values, heads, T)
    heads_BHTK = projected.view(B, T, -1, width).transpose(1, 2)
    rotated = rotate(heads_BHTK[:, :-kv_heads].double(), tuple(part.double() for part in rope))  # type: ignore[arg-type]
    assert near(queries, rotated[:, :heads], bound)
    of_rows = rows_RG.view(B, T, kv_heads).transpose(1, 2)
    assert near(keys[of_rows], rotated[:, heads:], bound)
    assert torch.equal(values[of_rows], heads_BHTK[:, -kv_heads:])
    assert keys.isnan().all(dim=1).sum() == rows - rows_RG.numel(), "nothing else is written"


@each_dtype
def test_a_gate_lets_through_what_torch_s_does(kernels: ModuleType, dtype: torch.dtype, bound: float) -> None:
    gate, up = (3 * torch.randn(2, 4, 1500)).to(dtype)
    right = nn.functional.silu(gate.double()) * up.double()
    assert near(kernels.silu_mul(torch.cat((gate, up), dim=1)), right, bound)
