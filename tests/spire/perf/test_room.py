"""What a cache has room for: defaults fit, what is asked for is given or refused with its values."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from draft_service import __main__ as draft_service
from draft_service.config import DraftServiceConfig
from spire.bench.synthetic import config_of, write_pair
from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.errors import CheckpointError
from spire.model.backends.reference import Reference
from spire.model.cache.paged import PagedCache
from spire.model.cache.paging import capacity_of, positions_of
from spire.model.cache.pool import Pool, not_reserved
from spire.model.config import DraftConfig
from spire.model.draft import Draft
from spire.model.target import Target
from spire.model.token_memory import TokenMemory
from spire.perf.memory_need import SHARE_OF_FREE_MEMORY, largest_batch, of_target
from spire.perf.room import Room, Wishes, room_for
from spire.perf.shapes import LLAMA_3_8B, SEQAX_67M
from verifier_service.config import VerifierConfig
from verifier_service.serve import server

GB = 10**9
# Llama-3.1-8B in bfloat16: positions, and bytes of keys and values of each.
LONGEST, POSITION = 131_072, 131_072


def room(free: float, at_once: bool = True, **wishes: Any) -> Room:
    return room_for(Wishes(**{"sequences": 64} | wishes), LONGEST, POSITION, int(free), at_once)


def bytes_of(found: Room) -> int:
    """Of the cache on a GPU, which is allocated at the start."""
    return found.budget or found.sequences * positions_of(found.context) * POSITION


def test_llama_3_1_8b_serves_its_longest_context_on_an_80_gb_card() -> None:
    """It was refused (64 times 131,072 positions are 1.1 TB), then cut to 8,447 positions of 46 sequences."""
    found = room(64 * GB)
    assert (found.sequences, found.context) == (64, LONGEST)
    assert 0.95 * SHARE_OF_FREE_MEMORY * 64 * GB < bytes_of(found) <= SHARE_OF_FREE_MEMORY * 64 * GB


def test_what_is_asked_for_is_given_and_the_other_fits() -> None:
    assert room(64 * GB, context=131_072).sequences == 64
    assert room(20 * GB, sequences=8).context == capacity_of(int(SHARE_OF_FREE_MEMORY * 20 * GB) // POSITION)
    assert room(64 * GB, sequences=32, context=8192) == Room(32, 8192, None)
    assert bytes_of(room(64 * GB, budget=20 * GB)) <= 20 * GB


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"context": 131_072, "budget": 10 * GB}, "10 GB are too little for one sequence of 131072 positions"),
        ({"context": 131_072, "budget": 10 * GB}, "raise --cache-gb, or lower --max-context"),
        ({"context": 131_072, "free": 10 * GB}, "8 GB, 80% of what is free, are there for them): lower --max-context"),
        ({"context": 131_073}, "--max-context 131073: the model takes at most 131072 positions"),
        ({"budget": 70 * GB}, "--cache-gb 70: 64 GB are free"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_values_and_what_to_do(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        room(**{"free": 64 * GB} | wishes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_context_beyond_the_sliding_window_is_refused_by_name() -> None:
    Wishes(64, context=4096).check(LONGEST, 4096)
    Wishes(64).check(LONGEST, 4096)
    with pytest.raises(CheckpointError, match=r"--max-context 4097: .* window of 4096 positions.* to 4096"):
        Wishes(64, context=4097).check(LONGEST, 4096)


def test_with_memory_taken_on_write_all_sequences_count_and_one_must_fit() -> None:
    assert room(20 * GB, at_once=False) == Room(
        64, capacity_of(int(SHARE_OF_FREE_MEMORY * 20 * GB) // POSITION), 16 * GB
    )
    assert room(2000 * GB, at_once=False) == Room(64, LONGEST, None)
    assert room(20 * GB, at_once=False, context=4096) == Room(64, 4096, 16 * GB)
    assert room(20 * GB, at_once=False, budget=100 * GB).budget == 100 * GB
    with pytest.raises(CheckpointError, match="too little for one sequence of 131072 positions"):
        room(20 * GB, at_once=False, context=LONGEST)


@given(
    free=st.integers(0, 200 * GB),
    sequences=st.integers(1, 256),
    context=st.integers(0, LONGEST),
    budget=st.integers(0, 200 * GB),
)
def test_preallocation_stays_within_its_budget_whatever_is_asked_for(
    free: int, sequences: int, context: int, budget: int
) -> None:
    wishes = Wishes(sequences, context=context, budget=budget)
    try:
        found = room_for(wishes, LONGEST, POSITION, free, at_once=True)
    except CheckpointError:
        return
    assert bytes_of(found) <= (budget or SHARE_OF_FREE_MEMORY * free) <= free
    assert found.context == (context or min(found.context, LONGEST))
    assert found.sequences == sequences
    assert positions_of(found.context) * POSITION <= bytes_of(found), "one sequence of full length fits"


@given(
    free=st.integers(0, 200 * GB), context=st.integers(LONGEST + 1, 2**40), budget=st.integers(0), at_once=st.booleans()
)
def test_no_memory_makes_room_for_more_positions_than_the_model_has(
    free: int, context: int, budget: int, at_once: bool
) -> None:
    with pytest.raises(CheckpointError) as refused:
        room_for(Wishes(64, context=context, budget=budget), LONGEST, POSITION, free, at_once)
    assert str(refused.value) == f"--max-context {context}: the model takes at most {LONGEST} positions"


@given(memory=st.integers(17 * GB, 1000 * GB), context=st.integers(1, LONGEST))
def test_the_performance_model_fits_as_many_sequences_as_the_verifier(memory: int, context: int) -> None:
    """It said 54 on an 80 GB card, of which the verifier refused all beyond 46."""
    need = of_target(LLAMA_3_8B, context, 2)
    most = largest_batch([need], memory)
    wishes = Wishes(max(1, most), context=context)
    if not most:
        with pytest.raises(CheckpointError):
            room_for(wishes, LONGEST, POSITION, memory - int(need.weights), at_once=True)
        return
    for sequences in (most, most + 1):
        found = room_for(replace(wishes, sequences=sequences), LONGEST, POSITION, memory - int(need.weights), True)
        all_fit = sequences * positions_of(context) * POSITION <= bytes_of(found)
        assert all_fit == (sequences == most)


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="memory comes at once here")
def test_a_context_far_longer_than_memory_costs_address_space_alone() -> None:
    """64 sequences of 131,072 positions on a machine with less: Linux refused to map what nobody had written yet."""
    pool = Pool((256, 8, LONGEST, 128), torch.bfloat16, "cpu")
    assert pool.tensor[200, 3, 100_000].sum() == 0


def test_address_space_is_asked_for_by_the_flag_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """POWER has 0x40 for it, and another meaning for 0x4000."""
    monkeypatch.delattr(mmap, "MAP_NORESERVE", raising=False)
    assert not_reserved("linux", "x86_64") == not_reserved("linux", "aarch64") == 0x4000
    assert not_reserved("linux", "ppc64le") == not_reserved("darwin", "arm64") == 0
    monkeypatch.setattr(mmap, "MAP_NORESERVE", 0x40, raising=False)
    assert not_reserved("linux", "ppc64le") == 0x40


# A device without memory stands for a GPU: nothing is computed, everything is allocated.
NOWHERE = torch.device("meta")


def test_the_verifier_of_an_8b_shape_allocates_what_fits_an_80_gb_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "choose_device", lambda name: NOWHERE)
    monkeypatch.setattr(server, "free_memory", lambda device: 64 * GB)
    monkeypatch.setattr(server, "load_target", lambda *_: (target_without_memory(), "an 8B shape"))
    monkeypatch.setattr(server.VerifierEngine, "measure", lambda self: None)
    directory, _ = write_pair(tmp_path, LLAMA_3_8B, LONGEST)
    options = {"model": directory, "dtype": "bfloat16", "lossy_synthetic_acceptance": 0.8}
    engine, hosted = server.load(VerifierConfig.model_validate(options))
    cache = engine.steps.cache
    assert (hosted.info.max_sequences, hosted.info.max_context) == (cache.slots, cache.capacity)
    assert isinstance(cache, PagedCache)
    assert (cache.slots, cache.capacity) == (64, LONGEST)
    assert cache.pages_N2PGLK.nbytes == cache.bytes + cache.page_bytes, "one page is for padding"
    assert cache.bytes <= SHARE_OF_FREE_MEMORY * 64 * GB


def target_without_memory() -> Target:
    with torch.device(NOWHERE):
        return Target(config_of(LLAMA_3_8B, LONGEST)).to(torch.bfloat16)


def vanilla_draft() -> Draft:
    config = config_of(replace(SEQAX_67M, vocab_size=512), LONGEST)
    with torch.device(NOWHERE):
        return Draft(config, DraftConfig(kind="vanilla", target_fingerprint="", tapped_layers=(), feedback=False))


def draft_options(**more: object) -> DraftServiceConfig:
    return DraftServiceConfig.model_validate({"draft": Path(), "verifier": "127.0.0.1:1"} | more)


def test_a_vanilla_draft_allocates_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 256 times the longest context unasked (here 1.1 TB), then one sequence of the longest context."""
    monkeypatch.setattr(draft_service, "free_memory", lambda device: 40 * GB)
    memory = draft_service._drafter(vanilla_draft(), Reference(), draft_options(), LONGEST).memory
    assert isinstance(memory, TokenMemory)
    assert memory.cache.bytes <= SHARE_OF_FREE_MEMORY * 40 * GB
    assert (memory.slots, memory.cache.capacity) == (256, LONGEST + MAX_SPECULATION_DEPTH)


def test_a_vanilla_draft_with_little_memory_drafts_for_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_service, "free_memory", lambda device: GB)
    memory = draft_service._drafter(vanilla_draft(), Reference(), draft_options(), LONGEST).memory
    assert isinstance(memory, TokenMemory)
    assert 1000 < memory.cache.capacity < LONGEST
    assert memory.cache.bytes <= SHARE_OF_FREE_MEMORY * GB


def test_more_sequences_than_fit_a_draft_are_refused_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_service, "free_memory", lambda device: GB // 10)
    config = config_of(replace(SEQAX_67M, vocab_size=512), LONGEST)
    with torch.device(NOWHERE):
        spire = Draft(config, DraftConfig(target_fingerprint="", tapped_layers=tuple(range(config.num_hidden_layers))))
    assert 0 < draft_service._drafter(spire, Reference(), draft_options(), LONGEST).memory.slots < 200
    with pytest.raises(
        CheckpointError, match=r"200 sequences need .* GB, 0.08 GB, 80% of .*: lower --max-sequences to \d+"
    ):
        draft_service._drafter(spire, Reference(), draft_options(max_sequences=200), LONGEST)
