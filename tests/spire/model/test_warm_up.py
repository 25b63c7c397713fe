"""A GPU loads kernels when they are first launched: services compute once before they are ready. Nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import draft_service.__main__ as drafting
import verifier_service.serve.server as verifying
from draft_service.config import DraftServiceConfig
from draft_service.drafter import Drafter, Span, Verified
from spire.checkpoints.weights import load_draft, load_target
from spire.decoding.drafting import DraftItem
from spire.model.backends.reference import Reference
from spire.model.config import DraftConfig
from spire.model.draft import Draft, prune
from spire.rpc.sampling import ONE_OF_EACH, from_protos
from tests.untrained import untrained_draft
from verifier_service.config import VerifierConfig
from verifier_service.engine.step import ModelSteps

CONTEXT = 64


@pytest.fixture(params=["spire", "vanilla"])
def draft(request: pytest.FixtureRequest, stories_dir: Path, tmp_path: Path) -> Draft:
    if request.param == "spire":
        return load_draft(untrained_draft(stories_dir, tmp_path / "draft"))
    target, _ = load_target(stories_dir)
    vanilla = DraftConfig(kind="vanilla", target_fingerprint="", tapped_layers=(), feedback=False, window=CONTEXT)
    return prune(target, vanilla, (0, 1)).eval().requires_grad_(False)


@torch.inference_mode()
def guesses_of(drafter: Drafter) -> list[list[int]]:
    """What it drafts for as many sequences as it has slots, of each kind of sampling in turn."""
    generator = torch.Generator().manual_seed(1)
    ids = [str(number) for number in range(drafter.memory.slots)]
    tapped = len(drafter.draft.draft.tapped_layers), drafter.draft.config.hidden_size
    for sequence_id in ids:
        rows_RND = torch.randn(9, *tapped, generator=generator)
        drafter.absorb(Verified([Span(sequence_id, 0, 9, reset=True)], rows_RND, [3] * 9))
    rows = from_protos([ONE_OF_EACH[number % len(ONE_OF_EACH)] for number in range(len(ids))])
    return drafter.propose([DraftItem(sequence_id, 9, 5) for sequence_id in ids], 3, rows).tokens_BK.tolist()


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_of_a_draft_that_has_warmed_up_nothing_stays(draft: Draft, slots: int) -> None:
    cold, warm = (Drafter(draft, slots, draft.config.vocab_size, CONTEXT, Reference()) for _ in range(2))
    warm.warm_up()
    assert (warm.slots, warm.absorbed, warm._free, warm._ended) == ({}, {}, cold._free, {})
    assert guesses_of(warm) == guesses_of(cold)


def test_a_draft_on_a_gpu_has_drafted_before_it_is_ready(
    draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    propose = Drafter.propose
    monkeypatch.setattr(Drafter, "propose", lambda self, *asked: rounds.append(1) or propose(self, *asked))
    config = DraftServiceConfig.model_validate({"draft": tmp_path, "verifier": "127.0.0.1:1"})
    drafting._drafter(draft, Reference(), config, CONTEXT)
    assert not rounds, "a CPU has nothing to load"
    monkeypatch.setattr(drafting, "loads_kernels_late", lambda device: True)
    drafting._drafter(draft, Reference(), config, CONTEXT)
    assert rounds


@pytest.mark.parametrize("sequences", [1, 3, 16])
def test_of_a_verifier_that_has_warmed_up_nothing_stays(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    steps: list[tuple[bool, bool]] = []
    run = ModelSteps.run

    def counted(self: ModelSteps, batches: list[object], chunk: object) -> object:
        steps.append((bool(batches), chunk is not None))
        return run(self, batches, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelSteps, "run", counted)
    config = VerifierConfig.model_validate({"model": stories_dir, "max_sequences": sequences, "dtype": "float32"})
    cold, _ = verifying.load(config)
    assert steps == [(False, True)], "a CPU has nothing to load: one step tells how long one takes"
    monkeypatch.setattr(verifying, "loads_kernels_late", lambda device: True)
    warm, _ = verifying.load(config)
    assert {(True, False), (False, True)} <= set(steps)
    cold_cache, cache = cold.steps.cache, warm.steps.cache
    assert (cache.lengths, cache.free_slots, cache.live_bytes) == (cold_cache.lengths, sequences, 0)
    assert warm.steps.pipeline.leaves_alone(range(sequences))
