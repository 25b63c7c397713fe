"""The memory of a draft that is sent tokens: sequences share it, and it is free again when they have gone."""

from __future__ import annotations

import pytest
import torch

from draft_service.drafter import Drafter, Span, Verified
from spire.decoding.drafting import MAX_SPECULATION_DEPTH, DraftItem
from spire.model.backends.reference import Reference
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft
from spire.model.token_memory import TokenMemory
from spire.rpc.sampling import ONE_OF_EACH, from_protos

CONTEXT = 300


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """With pages as on a GPU, eight of them: enough for one sequence of the longest context."""
    monkeypatch.setattr("spire.model.token_memory.cache_for", PagedCache)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    config = ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes)
    vanilla = DraftConfig(kind="vanilla", target_fingerprint="", tapped_layers=(), feedback=False, window=CONTEXT)
    draft = Draft(config, vanilla).requires_grad_(False)
    page_bytes = PagedCache(config, 1, CONTEXT).page_bytes
    return Drafter(draft, 4, config.vocab_size, CONTEXT, Reference(), budget=8 * page_bytes)


def absorb(drafter: Drafter, sequence_id: str, count: int) -> None:
    span = Span(sequence_id, 0, count, reset=True)
    with torch.inference_mode():
        drafter.absorb(Verified([span], torch.zeros(count, 0, 32), [3] * count))


def test_the_memory_of_a_sequence_that_has_ended_is_free(drafter: Drafter) -> None:
    assert isinstance(drafter.memory, TokenMemory)
    absorb(drafter, "a", 100)
    assert drafter.memory.cache.live_bytes > 0
    drafter.end(["a"])
    assert drafter.memory.cache.live_bytes == 0


def test_a_sequence_for_which_memory_is_short_is_decoded_plainly(drafter: Drafter) -> None:
    absorb(drafter, "long", 250)
    absorb(drafter, "too long", 290)
    assert set(drafter.slots) == {"long"}
    assert not drafter.behind(DraftItem("too long", 290, 5)), "nobody waits for it"
    rows = from_protos(ONE_OF_EACH[:1])
    with torch.inference_mode():
        assert drafter.propose([DraftItem("long", 250, 5)], 2, rows).tokens_BK.shape == (1, 2)
    drafter.end(["long"])
    absorb(drafter, "next", 290)
    assert set(drafter.slots) == {"next"}


def test_nobody_waits_for_a_sequence_for_which_no_slot_is_free(drafter: Drafter) -> None:
    for name in "abcde":
        absorb(drafter, name, 10)
    assert set(drafter.slots) == set("abcd")
    assert not drafter.behind(DraftItem("e", 10, 5))
    drafter.end(["a"])
    absorb(drafter, "e", 11)
    assert drafter.behind(DraftItem("e", 12, 5)), "it has a slot now, and what it lacks will come"


def test_a_round_never_lacks_memory_for_a_sequence_that_was_absorbed(drafter: Drafter) -> None:
    """Nobody's draft tokens are lost because another sequence comes to the end of its pages."""
    lengths = {"a": 100, "b": 250, "c": 126}
    for name, length in lengths.items():
        absorb(drafter, name, length)
    assert set(drafter.slots) == {"a", "b"}
    items, rows = [DraftItem(name, lengths[name], 5) for name in drafter.slots], from_protos(ONE_OF_EACH[:2])
    with torch.inference_mode():
        assert drafter.propose(items, MAX_SPECULATION_DEPTH, rows).tokens_BK.shape == (2, MAX_SPECULATION_DEPTH)
