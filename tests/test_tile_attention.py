"""Attention by tiles gives what attention is, to bfloat16, and the same for a query whoever else asks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spire.model.config import ModelConfig
from spire.model.tile_attention import MOST_QUERIES, TileAttention, has_tiles

SHAPE = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
CONFIG = ModelConfig(**SHAPE, num_attention_heads=1, num_key_value_heads=1, head_dim=64, max_position_embeddings=64)
L, SLOTS = 640, 5

pytestmark = pytest.mark.skipif(not has_tiles(CONFIG), reason="no compiler at installation, or no tiles")


def pools(G: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, SLOTS, 1, G, 1, L, K, generator=generator).bfloat16().unbind()
    return keys.clone(), values.clone()


def reference(queries_BHTK: Tensor, keys: Tensor, values: Tensor, slots: list[int], lengths: list[int]) -> Tensor:
    """In fp32, of the same bfloat16 numbers, when what is new has been stored."""
    rows, T = [], queries_BHTK.shape[2]
    for query_HTK, slot, length in zip(queries_BHTK.float(), slots, lengths, strict=True):
        total = min(length + T, L)
        seen_TS = torch.arange(total) <= length + torch.arange(T)[:, None]
        held = (pool[slot, 0, :, 0, :total].float() for pool in (keys, values))
        rows.append(scaled_dot_product_attention(query_HTK, *held, seen_TS, enable_gqa=True))
    return torch.stack(rows)


def new(B: int, H: int, G: int, T: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a layer gives them: neighbours in one tensor."""
    heads_BHTK = torch.randn(B, T, H + 2 * G, K).bfloat16().transpose(1, 2)
    return heads_BHTK[:, :H], heads_BHTK[:, H:-G], heads_BHTK[:, -G:]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiles_store_what_is_new_and_find_what_attention_finds(data: st.DataObject) -> None:
    T, of_a_key, G = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    K = data.draw(st.sampled_from([64, 128, 256]))
    if T * of_a_key > MOST_QUERIES:
        return
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    lengths = [data.draw(st.integers(0, L - T)) for _ in slots]
    keys, values = pools(G, K, seed=T)
    queries, new_keys, new_values = new(len(slots), of_a_key * G, G, T, K)
    expected = keys.clone(), values.clone()
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        expected[0][slot, 0, :, 0, length : length + T] = new_keys[row]
        expected[1][slot, 0, :, 0, length : length + T] = new_values[row]
    found = TileAttention(slots, lengths, T).attend(queries, new_keys, new_values, keys, values)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    # Twice what rounding the result to bfloat16 takes.
    torch.testing.assert_close(found.float(), reference(queries, keys, values, slots, lengths), atol=2e-4, rtol=2.0**-7)


def test_what_does_not_fit_a_slot_piles_up_in_its_last_column() -> None:
    keys, values = pools(1, 64, seed=0)
    before = keys.clone()
    queries, new_keys, new_values = new(1, 1, 1, 4, 64)
    found = TileAttention([2], [L - 2], 4).attend(queries, new_keys, new_values, keys, values)
    assert torch.equal(keys[2, 0, 0, 0, L - 2], new_keys[0, 0, 0])
    keys[2, 0, 0, 0, L - 2 :] = before[2, 0, 0, 0, L - 2 :]
    assert torch.equal(keys, before), "nothing else was written"
    assert found[:, :, 0].isfinite().all()


def test_a_query_finds_the_same_bits_whoever_else_asks() -> None:
    keys, values = pools(2, 64, seed=0)
    queries, new_keys, new_values = new(3, 4, 2, 7, 64)
    lengths = [200, 511, 30]
    together = TileAttention([4, 0, 2], lengths, 7).attend(queries, new_keys, new_values, keys, values)
    for row, slot in enumerate([4, 0, 2]):
        for t in range(7):
            alone = [x[row : row + 1, :, t : t + 1] for x in (queries, new_keys, new_values)]
            found = TileAttention([slot], [lengths[row] + t], 1).attend(*alone, keys, values)
            assert torch.equal(found[0, :, 0], together[row, :, t])


def test_a_block_of_which_a_query_sees_nothing_changes_none_of_its_bits() -> None:
    """The kernel's blocks are of 128 positions. Of 400,000 numbers a factor of 1 - 2^-24 would turn some."""
    keys, values = pools(16, 256, seed=0)
    slots = list(range(SLOTS))
    for _ in range(20):
        given = new(SLOTS, 16, 16, 2, 256)
        together = TileAttention(slots, [127] * SLOTS, 2).attend(*given, keys, values)
        alone = TileAttention(slots, [127] * SLOTS, 1).attend(*(x[:, :, :1] for x in given), keys, values)
        assert torch.equal(alone, together[:, :, :1])


@pytest.mark.parametrize("of", ["keys", "values", "queries"])
def test_numbers_that_are_none_are_found(of: str) -> None:
    keys, values = pools(1, 64, seed=0)
    queries, new_keys, new_values = new(2, 1, 1, 3, 64)
    {"keys": keys[1, 0, 0, 0], "values": values[1, 0, 0, 0], "queries": queries[1, 0]}[of][2, 5] = float("nan")
    found = TileAttention([0, 1], [100, 100], 3).attend(queries, new_keys, new_values, keys, values)
    assert found[0].isfinite().all()
    assert found[1, 0, 2].isnan().any()


def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    keys, values = pools(1, 64, seed=0)
    given = new(1, 1, 1, 2, 64)
    before = TileAttention([3], [70], 2).attend(*given, keys, values)
    keys[3, ..., 72:, :] = values[3, ..., 72:, :] = float("nan")
    after = TileAttention([3], [70], 2).attend(*given, keys, values)
    assert torch.equal(before, after)
