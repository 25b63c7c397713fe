"""Attention by kernels of ours gives what attention is, and the same for a query whoever else asks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spire.kernels import Kernels, every_kernels
from spire.model.attention.fused_attention import FusedAttention, FusedPools

L, SLOTS = 640, 5

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")
each_kernels = pytest.mark.parametrize("kernels", every_kernels(), ids=lambda kernels: kernels.name)


def pools(kernels: Kernels, G: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, SLOTS, G, L, K, generator=generator).to(kernels.dtype).unbind()
    return keys.clone(), values.clone()


def reference(queries_BHTK: Tensor, keys: Tensor, values: Tensor, slots: list[int], lengths: list[int]) -> Tensor:
    """In fp64, of the same numbers, when what is new has been stored: fp32 errs by as much as what is allowed."""
    rows, T = [], queries_BHTK.shape[2]
    for query_HTK, slot, length in zip(queries_BHTK.double(), slots, lengths, strict=True):
        total = min(length + T, L)
        seen_TS = torch.arange(total) <= length + torch.arange(T)[:, None]
        held = (pool[slot, :, :total].double() for pool in (keys, values))
        rows.append(scaled_dot_product_attention(query_HTK, *held, seen_TS, enable_gqa=True))
    return torch.stack(rows)


def new(kernels: Kernels, B: int, H: int, G: int, T: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a layer gives them: neighbours in one tensor."""
    heads_BHTK = torch.randn(B, T, H + 2 * G, K).to(kernels.dtype).transpose(1, 2)
    return heads_BHTK[:, :H], heads_BHTK[:, H:-G], heads_BHTK[:, -G:]


def attended(
    kernels: Kernels, slots: list[int], lengths: list[int], keys: Tensor, values: Tensor, *new_BHTK: Tensor
) -> Tensor:
    """What queries find behind `lengths` of these slots, when the new keys and values have been stored."""
    pools = FusedPools(kernels, [keys], [values])
    return FusedAttention(pools, slots, lengths, new_BHTK[0].shape[2]).attend(0, *new_BHTK)


@each_kernels
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_new_is_stored_and_what_attention_finds_is_found(kernels: Kernels, data: st.DataObject) -> None:
    T, of_a_key, G = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    K = data.draw(st.sampled_from([64, 128, 256]))
    if kernels.most_queries:
        T = min(T, kernels.most_queries // of_a_key)
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    lengths = [data.draw(st.integers(0, L - T)) for _ in slots]
    keys, values = pools(kernels, G, K, seed=T)
    queries, new_keys, new_values = new(kernels, len(slots), of_a_key * G, G, T, K)
    expected = keys.clone(), values.clone()
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        expected[0][slot, :, length : length + T] = new_keys[row]
        expected[1][slot, :, length : length + T] = new_values[row]
    found = attended(kernels, slots, lengths, keys, values, queries, new_keys, new_values)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    exact = reference(queries, keys, values, slots, lengths)
    allowed = 2e-6 + 1e-5 * exact.abs()  # sums of floats in another order
    if kernels.dtype == torch.bfloat16:  # rounding each weight, and twice what rounding the result takes
        allowed = 2e-4 + 2.0**-8 * reference(queries, keys, values.abs(), slots, lengths) + 2.0**-7 * exact.abs()
    assert ((found.float() - exact).abs() <= allowed).all()


@each_kernels
def test_what_does_not_fit_a_slot_piles_up_in_its_last_column(kernels: Kernels) -> None:
    keys, values = pools(kernels, 1, 64, seed=0)
    before = keys.clone()
    queries, new_keys, new_values = new(kernels, 1, 1, 1, 4, 64)
    found = attended(kernels, [2], [L - 2], keys, values, queries, new_keys, new_values)
    assert torch.equal(keys[2, 0, L - 2], new_keys[0, 0, 0])
    keys[2, 0, L - 2 :] = before[2, 0, L - 2 :]
    assert torch.equal(keys, before), "nothing else was written"
    assert found[:, :, 0].isfinite().all()


@each_kernels
def test_a_query_finds_the_same_bits_whoever_else_asks(kernels: Kernels) -> None:
    keys, values = pools(kernels, 2, 64, seed=0)
    T = 7 if kernels.most_queries else 40
    queries, new_keys, new_values = new(kernels, 3, 4, 2, T, 64)
    lengths = [200, 511, 30]
    together = attended(kernels, [4, 0, 2], lengths, keys, values, queries, new_keys, new_values)
    for row, slot in enumerate([4, 0, 2]):
        for t in range(T):
            alone = [x[row : row + 1, :, t : t + 1] for x in (queries, new_keys, new_values)]
            found = attended(kernels, [slot], [lengths[row] + t], keys, values, *alone)
            assert torch.equal(found[0, :, 0], together[row, :, t])


@each_kernels
def test_a_block_of_which_a_query_sees_nothing_changes_none_of_its_bits(kernels: Kernels) -> None:
    """The kernel's blocks are of 128 positions. Of 400,000 numbers a factor of 1 - 2^-24 would turn some."""
    keys, values = pools(kernels, 16, 256, seed=0)
    slots = list(range(SLOTS))
    for _ in range(20):
        given = new(kernels, SLOTS, 16, 16, 2, 256)
        together = attended(kernels, slots, [127] * SLOTS, keys, values, *given)
        alone = attended(kernels, slots, [127] * SLOTS, keys, values, *(x[:, :, :1] for x in given))
        assert torch.equal(alone, together[:, :, :1])


@each_kernels
@pytest.mark.parametrize("of", ["keys", "values", "queries"])
def test_numbers_that_are_none_are_found(kernels: Kernels, of: str) -> None:
    keys, values = pools(kernels, 1, 64, seed=0)
    queries, new_keys, new_values = new(kernels, 2, 1, 1, 3, 64)
    {"keys": keys[1, 0], "values": values[1, 0], "queries": queries[1, 0]}[of][2, 5] = float("nan")
    found = attended(kernels, [0, 1], [100, 100], keys, values, queries, new_keys, new_values)
    assert found[0].isfinite().all()
    assert found[1, 0, 2].isnan().any()


@each_kernels
def test_what_lies_behind_a_sequence_does_not_matter(kernels: Kernels) -> None:
    keys, values = pools(kernels, 1, 64, seed=0)
    given = new(kernels, 1, 1, 1, 2, 64)
    before = attended(kernels, [3], [70], keys, values, *given)
    keys[3, ..., 72:, :] = values[3, ..., 72:, :] = float("nan")
    after = attended(kernels, [3], [70], keys, values, *given)
    assert torch.equal(before, after)
