"""What a GPU does by graphs is what the reference does, whatever stale numbers lie in the fixed tensors of a graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spire.decoding.drafting import RoundInputs
from spire.decoding.verification import SparseDistribution, verify
from spire.model.backends.gpu.backend import GpuBackend, size_for
from spire.model.backends.gpu.graphs import Graphs, Input, Outputs
from spire.model.backends.reference import BlockBatch, Reference
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import prune
from spire.model.target import Target
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_BLOCK, RULE_INVARIANT, Sampling
from tests.recorder import Recorder

V, CAPACITY, SLOTS = 64, 300, 7


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": V}
    target = Target(ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes))
    for parameter in target.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return target.requires_grad_(False)


def served(target: Target) -> tuple[PagedCache, list[int]]:
    """A cache whose slots hold prompts of different lengths."""
    torch.manual_seed(1)
    cache = PagedCache(target.config, SLOTS, CAPACITY)
    slots = [cache.allocate() for _ in range(SLOTS)]
    for slot, length in zip(slots, (5, 64, 63, 130, 1, 200, 20), strict=True):
        target(torch.randint(V, (1, length)), cache.view([slot], length))
        cache.commit([slot], [length])
    return cache, slots


def test_a_forward_by_graphs_is_the_forward_whoever_is_in_the_batch(target: Target) -> None:
    recorder = Recorder()
    backend, plain = GpuBackend(recorder), Reference()
    caches = [served(target) for _ in range(2)]
    choices = random.Random(2)
    for step in range(60):
        chosen, T = choices.sample(range(SLOTS), choices.randint(1, SLOTS)), choices.choice([1, 2, 5])
        tokens_BT = torch.randint(V, (len(chosen), T), generator=torch.Generator().manual_seed(step))
        outputs = []
        for one, (cache, slots) in zip((backend, plain), caches, strict=True):
            rows = [slots[row] for row in chosen]
            outputs.append(one.forward(target, tokens_BT, cache.view(rows, T, decoding=True), (1, 2)))
            cache.commit(rows, [choices.randint(0, 0) + T // 2 + 1] * len(rows))
        for found, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert 0 < recorder.recorded < recorder.replayed < 60
    for (found, _), (expected, _) in zip(*(cache.pools for cache, _ in caches), strict=True):
        held = torch.cat([caches[0][0].rows([slot], torch.arange(n)[None]).flatten() for slot, n in lengths(caches)])
        torch.testing.assert_close(found[held], expected[held], atol=1e-5, rtol=1e-5)


def lengths(caches: list[tuple[PagedCache, list[int]]]) -> list[tuple[int, int]]:
    cache, slots = caches[0]
    return [(slot, cache.lengths[slot]) for slot in slots]


def test_activations_of_a_step_outlive_the_next_step(target: Target) -> None:
    backend = GpuBackend(Recorder())
    cache, slots = served(target)
    first = backend.forward(target, torch.zeros(2, 1, dtype=torch.int64), cache.view(slots[:2], 1, decoding=True), (1,))
    assert first.taps_BTND is not None
    kept = first.taps_BTND.clone()
    backend.forward(target, torch.ones(2, 1, dtype=torch.int64), cache.view(slots[:2], 1, decoding=True), (1,))
    assert torch.equal(first.taps_BTND, kept)


def test_prompts_and_batches_beyond_all_sizes_are_computed_without_graphs(target: Target) -> None:
    recorder = Recorder()
    cache, slots = served(target)
    GpuBackend(recorder).forward(target, torch.zeros(1, 9, dtype=torch.int64), cache.view(slots[:1], 9))
    assert not recorder.recorded
    assert size_for(33) == 40
    assert size_for(10_000) is None


SAMPLINGS = {
    "greedy": [Sampling(temperature=0, top_p=1)],
    "rejection": [Sampling(temperature=1, top_p=1, seed=5)],
    "blocks at a temperature": [Sampling(temperature=0.7, top_p=1, seed=6, rule=RULE_BLOCK)],
    "some greedy": [Sampling(temperature=0, top_p=1), Sampling(temperature=1.3, top_p=1, seed=7)],
    "truncated": [Sampling(temperature=1, top_p=0.9, seed=8), Sampling(temperature=0.8, top_k=7, top_p=1, min_p=0.02)],
    "some truncated": [Sampling(temperature=1, top_p=0.5, top_k=20, seed=3), Sampling(temperature=0, top_p=1)],
    "invariant": [Sampling(temperature=1, top_p=1, seed=9, rule=RULE_INVARIANT)],
    "some invariant and truncated": [
        Sampling(temperature=1, top_p=0.7, seed=11, rule=RULE_INVARIANT),
        Sampling(temperature=1, top_p=1, seed=12),
        Sampling(temperature=0, top_p=1, rule=RULE_INVARIANT),
    ],
    "two rules": [Sampling(temperature=1, top_p=1), Sampling(temperature=1, top_p=1, rule=RULE_BLOCK)],
}


def blocks_of(samplings: list[Sampling], B: int, k: int, q_of: str | None, seed: int) -> BlockBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = from_protos([samplings[row % len(samplings)] for row in range(B)])
    counts_B = torch.randint(0, k + 1, (B,), generator=generator)
    probs_BKV = torch.rand(B, k, V, generator=generator).softmax(dim=-1)
    draft_BK = probs_BKV.flatten(0, 1).multinomial(1, generator=generator).view(B, k)
    q = None
    if q_of == "whole":
        q = SparseDistribution(None, probs_BKV)
    elif q_of == "candidates":
        probs, ids = probs_BKV.topk(8, dim=-1)
        draft_BK, q = ids[..., 0].contiguous(), SparseDistribution(ids, probs / probs.sum(dim=-1, keepdim=True))
    return BlockBatch(draft_BK, counts_B, q, rows, torch.randint(1, 99, (B,), generator=generator))


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("q_of", [None, "whole", "candidates"])
def test_a_verdict_by_graphs_is_the_verdict(target: Target, kind: str, q_of: str | None) -> None:
    recorder = Recorder()
    backend, plain = GpuBackend(recorder), Reference()
    for seed, (B, k) in enumerate([(3, 4), (2, 2), (5, 4), (4, 4), (3, 4), (2, 0)] * 3):
        blocks = blocks_of(SAMPLINGS[kind], B, k, q_of if k else None, seed)
        hidden_BTD = torch.randn(B, k + 1, 32, generator=torch.Generator().manual_seed(seed))
        found, expected = (one.verdict(target, hidden_BTD, blocks, verify) for one in (backend, plain))
        assert torch.equal(found.verdict.accepted_B, expected.verdict.accepted_B)
        assert torch.equal(found.verdict.tokens_BT, expected.verdict.tokens_BT)
        assert torch.equal(found.finite_B, expected.finite_B)
    assert recorder.recorded


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("candidates", [None, 8])
def test_a_draft_s_round_by_graphs_drafts_the_same_tokens(target: Target, kind: str, candidates: int | None) -> None:
    draft = prune(target, DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=8), (1, 2))
    draft.requires_grad_(False)
    recorder = Recorder()
    backends = (GpuBackend(recorder), Reference())
    memories = [backend.memory(draft, SLOTS) for backend in backends]
    for memory in memories:
        for slot in range(SLOTS):
            position_R = torch.tensor([0, *range(1 + slot, 9 + slot)])  # the sink and the window
            taps_RND = torch.randn(len(position_R), 2, 32, generator=torch.Generator().manual_seed(slot))
            memory.absorb(torch.full_like(position_R, slot), position_R, taps_RND)
    absorbing = recorder.recorded
    for slots, k in (([3, 1], 3), ([0], 3), ([6, 5, 4, 2], 3), ([1, 2], 3), ([2, 0, 1], 1), ([6, 4, 3, 1, 0], 3)) * 3:
        bases, newest_B = [9 + slot for slot in slots], torch.tensor([7 * slot for slot in slots])
        rows = from_protos([SAMPLINGS[kind][slot % len(SAMPLINGS[kind])] for slot in slots])
        found, expected = (
            backend.draft(
                memory.round(slots, bases, k),
                RoundInputs(newest_B, torch.tensor(bases), k, rows, candidates),
                lambda shape: None,
            )
            for backend, memory in zip(backends, memories, strict=True)
        )
        assert torch.equal(found.tokens_BK, expected.tokens_BK)
        for mine, other in ((found.ids_BKM, expected.ids_BKM), (found.probs_BKM, expected.probs_BKM)):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                torch.testing.assert_close(mine, other, atol=1e-2, rtol=1e-2)
    assert recorder.recorded > absorbing


def test_activations_are_absorbed_by_graphs_as_without(target: Target) -> None:
    draft = prune(target, DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=8), (1, 2))
    draft.requires_grad_(False)
    recorder, numbers = Recorder(), random.Random(3)
    mine, other = (backend.memory(draft, SLOTS) for backend in (GpuBackend(recorder), Reference()))
    for step in range(40):
        slot_R = torch.tensor(numbers.sample(range(SLOTS), numbers.randint(1, SLOTS)))
        position_R = torch.full_like(slot_R, step)
        taps_RND = torch.randn(len(slot_R), 2, 32, generator=torch.Generator().manual_seed(step))
        for memory in (mine, other):
            memory.absorb(slot_R, position_R, taps_RND)
    assert 0 < recorder.recorded < recorder.replayed
    assert torch.equal(mine.positions_XS[:SLOTS], other.positions_XS)
    for found, expected in ((mine.keys_NXGSK, other.keys_NXGSK), (mine.values_NXGSK, other.values_NXGSK)):
        torch.testing.assert_close(found[:, :SLOTS], expected, atol=1e-5, rtol=1e-5)


class OutOfMemory(Recorder):
    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("recorder", [Recorder(fails=True), OutOfMemory()], ids=["refused", "out of memory"])
def test_without_graphs_kernels_are_launched_one_by_one(target: Target, recorder: Recorder) -> None:
    """For batches of a size of graphs, and of five, which would be padded."""
    backend, plain = GpuBackend(recorder), Reference()
    (cache, slots), (other, _) = served(target), served(target)
    for B in (3, 5, 3, 5, 3, 5):
        tokens_BT = torch.zeros(B, 2, dtype=torch.int64)
        found = backend.forward(target, tokens_BT, cache.view(slots[:B], 2, decoding=True))
        expected = plain.forward(target, tokens_BT, other.view(slots[:B], 2, decoding=True))
        torch.testing.assert_close(found.hidden_BTD, expected.hidden_BTD)
        blocks = blocks_of(SAMPLINGS["rejection"], B, 1, "whole", B)
        judged = [one.verdict(target, expected.hidden_BTD, blocks, verify).verdict for one in (backend, plain)]
        assert torch.equal(judged[0].tokens_BT, judged[1].tokens_BT)


def test_another_cache_has_graphs_of_its_own(target: Target) -> None:
    backend, tokens_BT = GpuBackend(Recorder()), torch.zeros(2, 1, dtype=torch.int64)
    for _ in range(2):
        (cache, slots), (other, _) = served(target), served(target)
        for _ in range(3):
            found = backend.forward(target, tokens_BT, cache.view(slots[:2], 1, decoding=True))
            expected = target(tokens_BT, other.view(slots[:2], 1, decoding=True))
            torch.testing.assert_close(found.hidden_BTD, expected.hidden_BTD)


def test_a_lost_gpu_is_no_reason_to_go_on_without_graphs() -> None:
    def is_lost(work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(torch.AcceleratorError):
        run_twice(Graphs(is_lost))


def run_twice(graphs: Graphs) -> None:
    for _ in range(2):
        graphs.run("key", 1, (Input(torch.zeros(1)),), lambda x: (x,))


def test_the_graph_used_longest_ago_is_dropped_first() -> None:
    recorder = Recorder()
    graphs = Graphs(recorder)

    def run(key: int) -> Tensor:
        return graphs.run(key, 1, (Input(torch.tensor([1.0])),), lambda x: (x + key,))[0].clone()

    for key in (*range(128), *range(128), 0, 128, 128):
        assert run(key) == 1 + key
    recorded = recorder.recorded
    run(0)
    assert recorder.recorded == recorded
    run(1)
    assert recorder.recorded == recorded + 1
