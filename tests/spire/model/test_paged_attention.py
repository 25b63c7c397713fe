"""Attention over pages is attention. Triton interprets the GPU's kernels here, and compiles them for one."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from spire.model.attention import triton_kernels as choosing
from spire.model.cache import paging
from spire.model.cache.paged import PagedCache
from spire.model.config import ModelConfig
from spire.model.layers import additive, attend
from spire.model.target import Target, WholeSequence
from tests.marks import thoroughly

triton = pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Interpreted, as `tests/conftest.py` has told Triton."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("with a GPU the kernels are compiled: make gpu")
    return importlib.import_module("spire.model.attention.paged_attention")


def reference(queries_HTK: Tensor, keys_GSK: Tensor, values_GSK: Tensor, length: int) -> Tensor:
    """In float64, over the positions that are there."""
    T = queries_HTK.shape[1]
    visible_1TS = torch.arange(length + T) <= length + torch.arange(T)[None, :, None]
    pools = (pool[None, :, : length + T].double() for pool in (keys_GSK, values_GSK))
    return attend(queries_HTK[None].double(), *pools, additive(visible_1TS, torch.float64))[0]


def pools_of(slots: int, heads: int, positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, slots, heads, positions, width).to(dtype)
    return keys, values


def in_pages(keys: Tensor, values: Tensor, slots: list[int], pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [X, G, positions, K] as pages in any order, [pages, G, 64, K], and the page table of `slots`."""
    of_a_slot = keys.shape[2] // 64
    order = torch.randperm(len(keys) * of_a_slot)
    keys, values = (pool.unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)[order] for pool in (keys, values))
    place_XP = order.argsort().view(-1, of_a_slot).int()
    return keys.contiguous(), values.contiguous(), place_XP[slots, :pages].contiguous()


# Queries per key, new tokens, width, positions before: of one page, at its border, over a stretch's border, none.
CASES = [
    (1, 1, 64, [0, 63, 64, 130]),
    thoroughly(4, 5, 32, [1300, 59, 0]),
    thoroughly(8, 16, 16, [1023, 1024]),
    (3, 17, 64, [1010, 47]),
    thoroughly(2, 2, 128, [1087, 1088, 5]),
]


@pytest.mark.parametrize(("dtype", "bound"), [thoroughly(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("group", "tokens", "width", "lengths"), CASES)
@torch.no_grad()
def test_pages_give_what_the_reference_gives_whatever_lies_behind(
    kernels: ModuleType, group: int, tokens: int, width: int, lengths: list[int], dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(len(lengths))
    heads, positions = 2, 1408
    keys, values = pools_of(len(lengths) + 2, heads, positions, width, dtype)
    slots = list(range(len(lengths) + 1, 1, -1))
    for slot, length in zip(slots, lengths, strict=True):
        keys[slot, :, length + tokens :] = values[slot, :, length + tokens :] = torch.nan
    keys[:2], values[:2] = torch.nan, torch.nan
    queries = torch.randn(len(lengths), heads * group, tokens, width).to(dtype)
    pages = -(-(max(lengths) + tokens) // kernels.PAGE)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    found = kernels.attend(queries, *in_pages(keys, values, slots, pages), lengths_B)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        right = reference(queries[row], keys[slot], values[slot], length)
        assert (found[row].double() - right).norm() / right.norm() < bound


@torch.no_grad()
def test_a_sequence_is_attended_alike_alone_and_beside_others(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    keys, values = pools_of(3, 1, 2176, 32, torch.float32)
    queries, lengths = torch.randn(3, 2, 3, 32), [1200, 2100, 9]

    def found(rows: list[int]) -> Tensor:
        longest = max(lengths[row] for row in rows)
        pages = -(-(longest + 3) // kernels.PAGE)
        lengths_B = torch.tensor([lengths[row] for row in rows], dtype=torch.int32)
        return kernels.attend(queries[rows], *in_pages(keys, values, rows, pages), lengths_B)

    together = found([0, 1, 2])
    for row in range(3):
        assert torch.equal(found([row])[0], together[row])


@pytest.mark.thorough
@torch.no_grad()
def test_decoding_over_cache_pages_gives_the_logits_of_the_whole_sequence(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire.model.cache.paged.attention_kernels", lambda pool, group: kernels)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    config = ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **sizes)
    target = Target(config).requires_grad_(False)
    attended: list[int] = []
    whole_attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda q, *rest: attended.append(q.shape[2]) or whole_attend(q, *rest))
    capacity = paging.capacity_of(paging.PAGE)
    cache = PagedCache(config, slots=3, capacity=capacity)
    tokens_NL = torch.randint(40, (3, capacity))
    slots = [cache.allocate() for _ in range(3)]
    for slot, prompt in zip(slots, (70, 3, capacity - 4), strict=True):
        target(tokens_NL[slot, None, :prompt], cache.view([slot], prompt))
        cache.commit([slot], [prompt])
    assert not attended, "prompts are none of the kernels'"
    for T in (1, 3, 5):
        # The last sequence is full by and by: what is behind its last position is padding.
        starts = [cache.lengths[slot] for slot in slots]
        wanted = [min(T, capacity - start) for start in starts]
        tokens_BT = torch.zeros(3, T, dtype=torch.int64)
        for row, (start, count) in enumerate(zip(starts, wanted, strict=True)):
            tokens_BT[row, :count] = tokens_NL[row, start : start + count]
        hidden_BTD = target(tokens_BT, cache.view(slots, T, decoding=True)).hidden_BTD
        for row, (start, count) in enumerate(zip(starts, wanted, strict=True)):
            whole_TD = target(tokens_NL[row, None], WholeSequence(tokens_NL[row, None])).hidden_BTD[0]
            torch.testing.assert_close(hidden_BTD[row, :count], whole_TD[start : start + count], atol=1e-4, rtol=1e-4)
        cache.commit(slots, wanted)
    assert attended == [1, 1, 3, 3, 5, 5]
    assert cache.lengths[slots[2]] == capacity


def test_without_a_gpu_or_its_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(1, 1, 64, 16)
    assert choosing.attention_kernels(pool, 1) is None
    on_gpu = torch.empty(1, 1, 64, 16, device="meta")
    monkeypatch.setattr(choosing, "on_gpu", lambda pool: True)

    def fails(name: str) -> ModuleType:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(choosing.importlib, "import_module", fails)
    assert choosing.attention_kernels(on_gpu, 1) is None

    def is_lost(name: str) -> ModuleType:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(choosing.importlib, "import_module", is_lost)
    with pytest.raises(torch.AcceleratorError):
        choosing.attention_kernels(on_gpu, 1)
