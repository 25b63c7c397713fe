"""MagicDec: the target seen through sink and window of its own cache, against attention written down apart from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from spire.decoding.drafting import RoundInputs, draft_tokens
from spire.model.backends.reference import Reference
from spire.model.cache.contiguous import ContiguousCache
from spire.model.cache.paged import PagedCache
from spire.model.cache.target_cache import TargetCache
from spire.model.config import ModelConfig, RopeConfig
from spire.model.self_speculation import SelfSpeculation, SelfSpeculationRound, SparseAttention
from spire.model.target import Target
from spire.rpc.sampling import from_protos
from spire.v1 import tensor_pb2
from tests.marks import thoroughly

V, K = 40, 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head for all": {"num_key_value_heads": 1},
    "linear rope": {"rope": RopeConfig(rope_type="linear", factor=4.0)},
    "llama3 rope": {"rope": RopeConfig(rope_type="llama3", factor=8.0, original_max_position_embeddings=32)},
    "attention bias": {"attention_bias": True, "num_key_value_heads": 2},
    "Mistral": {"model_type": "mistral", "sliding_window": 100},
    "Qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "Qwen3": {"model_type": "qwen3", "num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def new_target(**changes: Any) -> Target:
    torch.manual_seed(0)
    shape = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    target = Target(ModelConfig.model_validate(shape | changes))
    for name, parameter in target.named_parameters():
        if parameter.ndim == 2 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    return target


@dataclass
class Filled:
    """A cache whose slots hold the first positions of some texts, `lengths` of them."""

    target: Target
    cache: TargetCache
    slots: list[int]
    texts: list[Tensor]

    def drafting(self, sparse: SparseAttention) -> SelfSpeculation:
        return SelfSpeculation(self.target, self.cache, sparse, Reference())

    def guessed(self, sparse: SparseAttention, k: int = K) -> Tensor:
        """Logits [B, k, V] after each of the k positions that follow, when the text's own tokens are fed."""
        return self.guessed_in(self.drafting(sparse).round(self.slots), k)

    def guessed_in(self, round_: SelfSpeculationRound, k: int = K) -> Tensor:
        bases = [self.cache.lengths[slot] for slot in self.slots]
        fed_BK = torch.stack([text[base : base + k] for text, base in zip(self.texts, bases, strict=True)])
        return torch.stack([round_.next_logits(fed_BK[:, step]) for step in range(k)], dim=1)

    def verified(self, k: int = K) -> Tensor:
        """The same by the target itself, which sees everything."""
        fed = [text[self.cache.lengths[slot] :][:k] for slot, text in zip(self.slots, self.texts, strict=True)]
        return self.target.unembed(self.target(torch.stack(fed), self.cache.view(self.slots, k)).hidden_BTD)


def filled(target: Target, lengths: list[int], dtype: torch.dtype = torch.float32, paged: bool = False) -> Filled:
    cache = (PagedCache if paged else ContiguousCache)(target.config, slots=len(lengths) + 1, capacity=400, dtype=dtype)
    cache.allocate()
    slots = [cache.allocate() for _ in lengths][::-1]
    texts = [torch.randint(V, (length + 20,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    for slot, text, length in zip(slots, texts, lengths, strict=True):
        target(text[None, :length], cache.view([slot], length))
        cache.commit([slot], [length])
    return Filled(target, cache, slots, texts)


def copied(base: int, sparse: SparseAttention) -> list[int]:
    """The positions of sink and window before a round from `base` on."""
    first = max(0, base - sparse.window)
    return [*range(min(sparse.sink, first)), *range(first, base)]


def streaming_reference(filled: Filled, row: int, sparse: SparseAttention, k: int = K) -> Tensor:
    """Logits [k, V] of one row: keys are kept unrotated, and rotated to their place in the cache for each query."""
    target, base, text = filled.target, filled.cache.lengths[filled.slots[row]], filled.texts[row]
    past = unrotated_keys_values(target, text[:base])
    logits = []
    for position in range(base, base + k):
        hidden_D = target.embed_tokens(text[position])
        kept = [*copied(base, sparse), *range(base, position + 1)]
        for layer, (keys, values) in zip(target.layers, past, strict=True):
            query_HK, key_GK, value_GK = projections(layer, hidden_D[None])
            keys.append(key_GK[0])
            values.append(value_GK[0])
            here = torch.arange(len(kept))
            keys_SGK = turned(target, torch.stack([keys[s] for s in kept]), here)
            query_HK = turned(target, query_HK, here[-1:])[0]
            attended = attention(query_HK, keys_SGK, torch.stack([values[s] for s in kept]))
            hidden_D = hidden_D + layer.self_attn.o_proj(attended)
            hidden_D = hidden_D + layer.mlp(layer.post_attention_layernorm(hidden_D))
        logits.append(target.unembed(target.norm(hidden_D)))
    return torch.stack(logits)


def unrotated_keys_values(target: Target, text_L: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Per layer the keys and values [G, K] of each position of a text that is read whole, by dense attention."""
    hidden_LD, found = target.embed_tokens(text_L), []
    where_L = torch.arange(len(text_L))
    for layer in target.layers:
        queries, keys, values = projections(layer, hidden_LD)
        found.append((list(keys), list(values)))
        queries, keys = turned(target, queries, where_L), turned(target, keys, where_L)
        attended = torch.stack([attention(queries[t], keys[: t + 1], values[: t + 1]) for t in where_L.tolist()])
        hidden_LD = hidden_LD + layer.self_attn.o_proj(attended)
        hidden_LD = hidden_LD + layer.mlp(layer.post_attention_layernorm(hidden_LD))
    return found


def projections(layer: Any, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    attention, normed = layer.self_attn, layer.input_layernorm(hidden_TD)
    projected = (p(normed).unflatten(-1, (-1, 8)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    queries, keys, values = projected
    return attention.q_norm(queries), attention.k_norm(keys), values


def turned(target: Target, x_THK: Tensor, positions_T: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers."""
    angles = positions_T[:, None] * target.rope.inverse_frequencies
    real, imaginary = x_THK.chunk(2, dim=-1)
    product = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((product.real, product.imag), dim=-1)


def attention(query_HK: Tensor, keys_SGK: Tensor, values_SGK: Tensor) -> Tensor:
    repeat = len(query_HK) // keys_SGK.shape[1]
    keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys_SGK, values_SGK))
    weights = (torch.einsum("hk,shk->hs", query_HK, keys) * query_HK.shape[-1] ** -0.5).softmax(dim=-1)
    return torch.einsum("hs,shk->hk", weights, values).flatten()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sparse",
    [SparseAttention(1, 8), SparseAttention(3, 5), SparseAttention(0, 6)],
    ids=lambda s: f"{s.sink}+{s.window}",
)
def test_logits_are_those_of_attention_at_positions_within_the_cache(kind: str, sparse: SparseAttention) -> None:
    """Texts shorter than the window, of about its length, and much longer than it, in one batch."""
    some = filled(new_target(**KINDS[kind]), [1, 2, 6, 8, 9, 30, 47])
    guessed = some.guessed(sparse)
    expected = torch.stack([streaming_reference(some, row, sparse) for row in range(len(some.slots))])
    assert expected.std() > 0.5, "the comparison must be about logits that differ"
    torch.testing.assert_close(guessed, expected, atol=1e-4, rtol=1e-4)


def test_where_keys_stand_shows_in_the_logits() -> None:
    """A control: at the positions of the text, the same keys give other logits, or the test above proved little."""
    some, sparse = filled(new_target(), [47]), SparseAttention(1, 8)
    in_text = some.drafting(sparse)
    in_text._moved_back = lambda keys_NBGSK, skipped_B1: keys_NBGSK
    other = in_text.round(some.slots).next_logits(some.texts[0][47:48])
    assert (other - some.guessed(sparse, k=1)[:, 0]).abs().max() > 1e-2


@pytest.mark.parametrize("paged", [True, False], ids=["pages as on a GPU", "contiguous slots"])
@pytest.mark.parametrize("seed", [0, 1, *map(thoroughly, range(2, 10))])
def test_after_any_rounds_the_copy_is_of_sink_and_last_window(seed: int, paged: bool) -> None:
    """Whichever sequences take part in a round, whatever is drafted in it, and however much of it is accepted."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sparse = SparseAttention(chance.randint(0, 3), chance.randint(4, 12))
    some = filled(new_target(num_key_value_heads=2), [1, 6, 20, 40], paged=paged)
    drafting = some.drafting(sparse)
    for _ in range(4):
        rows = chance.sample(range(4), chance.randint(1, 4))
        slots, k = [some.slots[row] for row in rows], chance.randint(1, K)
        round_ = drafting.round(slots)
        for _ in range(k):
            round_.next_logits(torch.randint(V, (len(rows),), generator=generator))
        for at, row in enumerate(rows):
            base = some.cache.lengths[some.slots[row]]
            assert drafting.sparse_cache.lengths[at] == len(copied(base, sparse)) + k
            check_copy(drafting.sparse_cache, at, some.target, some.texts[row][:base], sparse)
        accept(some, rows, [chance.randint(1, k + 1) for _ in rows])


def check_copy(sparse_cache: TargetCache, at: int, target: Target, text_L: Tensor, sparse: SparseAttention) -> None:
    """Compare the first entries of a slot of the sparse cache with keys and values computed apart from it."""
    kept = copied(len(text_L), sparse)
    entries_S = torch.arange(len(kept))
    keys_N1GSK, values_N1GSK = sparse_cache.gather([at], entries_S[None])
    for layer, (keys, values) in enumerate(unrotated_keys_values(target, text_L)):
        expected_SGK = turned(target, torch.stack([keys[s] for s in kept]), entries_S)
        torch.testing.assert_close(keys_N1GSK[layer, 0].transpose(0, 1), expected_SGK, atol=1e-4, rtol=1e-4)
        expected_SGK = torch.stack([values[s] for s in kept])
        torch.testing.assert_close(values_N1GSK[layer, 0].transpose(0, 1), expected_SGK, atol=1e-4, rtol=1e-4)


def accept(some: Filled, rows: list[int], counts: list[int]) -> None:
    """Append the next tokens of these rows' texts to the target's own cache."""
    for row, count in zip(rows, counts, strict=True):
        slot, text = some.slots[row], some.texts[row]
        base = some.cache.lengths[slot]
        some.target(text[None, base : base + count], some.cache.view([slot], count))
        some.cache.commit([slot], [count])


@pytest.mark.parametrize("paged", [True, False], ids=["pages as on a GPU", "contiguous slots"])
def test_with_everything_inside_the_window_it_is_the_target(paged: bool) -> None:
    some = filled(new_target(num_key_value_heads=2), [3, 60, 270], paged=paged)
    torch.testing.assert_close(some.guessed(SparseAttention(1, 300)), some.verified(), atol=1e-4, rtol=1e-4)


def test_a_window_is_read_across_pages_as_within_one() -> None:
    lengths, sparse = [255, 256, 258, 300], SparseAttention(1, 8)
    target = new_target()
    slots, pages = (filled(target, lengths, paged=paged).guessed(sparse) for paged in (False, True))
    torch.testing.assert_close(slots, pages, atol=1e-4, rtol=1e-4)


def test_in_bfloat16_guesses_are_those_of_fp32_up_to_rounding() -> None:
    rounded = new_target(num_key_value_heads=2).bfloat16()
    precise = new_target(num_key_value_heads=2)
    precise.load_state_dict(rounded.state_dict())
    sparse, lengths = SparseAttention(1, 8), [5, 40, 300]
    error = filled(rounded, lengths, torch.bfloat16).guessed(sparse) - filled(precise, lengths).guessed(sparse)
    own_error = filled(rounded, lengths, torch.bfloat16).verified() - filled(precise, lengths).verified()
    assert error.abs().mean() < 2 * own_error.abs().mean()


def test_drafting_leaves_the_cache_as_it_was() -> None:
    some = filled(new_target(), [3, 60])
    before = [pool_RK.clone() for pool_RK in chain(*some.cache.pools)]
    lengths = list(some.cache.lengths)
    some.guessed(SparseAttention(1, 8))
    assert some.cache.lengths == lengths
    assert all(map(torch.equal, chain(*some.cache.pools), before))


def test_what_a_poisoned_neighbour_left_behind_is_not_seen() -> None:
    some, sparse = filled(new_target(), [2, 30]), SparseAttention(1, 8)
    expected = some.guessed(sparse)
    held = [some.cache.rows([slot], torch.arange(some.cache.lengths[slot])[None]).flatten() for slot in some.slots]
    for pool_RK in chain(*some.cache.pools):
        kept_RK = pool_RK.clone()
        pool_RK.fill_(float("nan"))
        for rows in held:
            pool_RK[rows] = kept_RK[rows]
    assert torch.equal(some.guessed(sparse), expected)


@pytest.mark.parametrize("paged", [True, False], ids=["pages as on a GPU", "contiguous slots"])
def test_what_an_earlier_round_left_in_the_copy_is_not_seen(paged: bool) -> None:
    some, sparse = filled(new_target(), [2, 30], paged=paged), SparseAttention(1, 8)
    expected, drafting = some.guessed(sparse), some.drafting(sparse)
    for pool_RK in chain(*drafting.sparse_cache.pools):
        pool_RK.fill_(float("nan"))
    assert torch.equal(some.guessed_in(drafting.round(some.slots)), expected)


def test_the_copy_has_one_size_at_every_context() -> None:
    short, long = (filled(new_target(), [length]) for length in (3, 380))
    sizes = []
    for some in (short, long):
        drafting = some.drafting(SparseAttention(1, 8))
        some.guessed_in(drafting.round(some.slots))
        sizes.append((drafting.sparse_cache.bytes, drafting.sparse_cache.held_bytes))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] < short.cache.bytes


def test_greedy_guesses_through_a_full_window_match_the_target() -> None:
    some = filled(new_target(), [1, 12, 40])
    rows = from_protos([tensor_pb2.Sampling(temperature=0, top_p=1)] * 3)
    bases = [some.cache.lengths[slot] for slot in some.slots]
    newest_B = torch.stack([text[base] for text, base in zip(some.texts, bases, strict=True)])
    round_ = some.drafting(SparseAttention(1, 64)).round(some.slots)
    drafted_BK = draft_tokens(round_, RoundInputs(newest_B, torch.tensor(bases), K, rows, None)).tokens_BK
    for text, base, drafted in zip(some.texts, bases, drafted_BK, strict=True):
        text[base + 1 : base + 1 + K] = drafted
    assert torch.equal(some.verified().argmax(dim=-1), drafted_BK)
