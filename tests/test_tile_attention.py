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
    return keys, values


def reference(
    queries_BGRK: Tensor, keys: Tensor, values: Tensor, slots: list[int], lengths: list[int], T: int
) -> Tensor:
    """In fp32, of the same bfloat16 numbers."""
    rows = []
    for query_GRK, slot, length in zip(queries_BGRK.float(), slots, lengths, strict=True):
        total = min(length + T, L)
        seen_T = torch.arange(total) <= length + torch.arange(T)[:, None]
        seen_R = seen_T.repeat(query_GRK.shape[1] // T, 1)
        rows.append(
            scaled_dot_product_attention(
                query_GRK, keys[slot, 0, :, 0, :total].float(), values[slot, 0, :, 0, :total].float(), seen_R
            )
        )
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiles_find_what_attention_finds(data: st.DataObject) -> None:
    T, of_a_key, G = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    K = data.draw(st.sampled_from([64, 128, 256]))
    R = T * of_a_key
    if R > MOST_QUERIES:
        return
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    lengths = [data.draw(st.integers(0, L)) for _ in slots]
    keys, values = pools(G, K, seed=T)
    queries = torch.randn(len(slots), G, R, K).bfloat16()
    (found,) = TileAttention(slots, lengths, T).attend(queries, keys, values)
    # Twice what rounding the result to bfloat16 takes.
    torch.testing.assert_close(
        found.float(), reference(queries, keys, values, slots, lengths, T), atol=2e-4, rtol=2.0**-7
    )


def test_a_query_finds_the_same_bits_whoever_else_asks() -> None:
    keys, values = pools(2, 64, seed=0)
    queries = torch.randn(3, 2, 9, 64).bfloat16()
    lengths = [200, 511, 30]
    (together,) = TileAttention([4, 0, 2], lengths, 9).attend(queries, keys, values)
    for row, slot in enumerate([4, 0, 2]):
        for t in range(9):
            alone = queries[row : row + 1, :, t : t + 1]
            (found,) = TileAttention([slot], [lengths[row] + t], 1).attend(alone, keys, values)
            assert torch.equal(found[0, :, 0], together[row, :, t])


@pytest.mark.parametrize("of", ["keys", "values", "queries"])
def test_numbers_that_are_none_are_found(of: str) -> None:
    keys, values = pools(1, 64, seed=0)
    queries = torch.randn(2, 1, 3, 64).bfloat16()
    {"keys": keys[1, 0, 0, 0], "values": values[1, 0, 0, 0], "queries": queries[1, 0]}[of][2, 5] = float("nan")
    (found,) = TileAttention([0, 1], [100, 100], 3).attend(queries, keys, values)
    assert found[0].isfinite().all()
    assert found[1, 0, 2].isnan().any()


def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    keys, values = pools(1, 64, seed=0)
    queries = torch.randn(1, 1, 2, 64).bfloat16()
    (before,) = TileAttention([3], [70], 2).attend(queries, keys, values)
    keys[3, ..., 72:, :] = values[3, ..., 72:, :] = float("nan")
    (after,) = TileAttention([3], [70], 2).attend(queries, keys, values)
    assert torch.equal(before, after)
