"""A fused draft guesses what its layers do, for each sequence as if it were alone, and draws from what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from spire.decoding.drafting import RoundInputs, Stopping
from spire.decoding.randomness import Purpose
from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.cpu.fused_draft import FusedRound
from spire.model.backends.cpu.fused_sampling import KernelSampling, draw
from spire.model.backends.reference import Reference
from spire.model.config import DraftConfig
from spire.model.draft import Draft, prune
from spire.model.draft_memory import DraftMemory, RoundMemory
from spire.model.target import Target
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_BLOCK, RULE_INVARIANT, Sampling
from tests.spire.decoding.test_verification import sampled_rows
from tests.spire.model.test_fused_layer import config_of, each_kernels, far_apart, randomised, rounding

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")

ALPHA = 1e-6


def served_draft(kernels: Kernels, **changes: object) -> Draft:
    """The last two layers of a target, as they are served."""
    return CpuBackend().pack(unpacked_draft(kernels, **changes))


def unpacked_draft(kernels: Kernels, **changes: object) -> Draft:
    values = {"target_fingerprint": "", "tapped_layers": (1, 2), "window": 6, "sink": 1, **changes}
    target, config = randomised(Target(config_of(4, 2)), kernels.dtype), DraftConfig.model_validate(values)
    assert isinstance(target, Target)
    all_V = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(3))
    vocabulary_W = all_V[: config.vocabulary].sort().values if config.vocabulary else None
    return prune(target, config, (1, 2), vocabulary_W).to(kernels.dtype).requires_grad_(False)


def memory_of(draft: Draft, contexts: Sequence[int]) -> DraftMemory:
    """A slot for each, after so many positions of its own."""
    memory = CpuBackend().memory(draft, len(contexts))
    for slot, context in enumerate(contexts):
        taps_RND = torch.randn(context, 2, 128, generator=torch.Generator().manual_seed(context))
        position_R = torch.arange(context)
        kept = (position_R < draft.draft.sink) | (position_R >= context - draft.draft.window)
        slot_R = torch.full_like(position_R, slot)
        memory.absorb(slot_R[kept], position_R[kept], taps_RND[kept].to(memory.keys_NXGSK.dtype))
    return memory


def guessed(round_: RoundMemory | FusedRound, B: int) -> Tensor:
    """Logits [B, k, V] of a round that is fed the same tokens whoever guesses."""
    fed = torch.tensor([7, 11, 13, 17])
    return torch.stack([round_.next_logits(fed[step].expand(B)).clone() for step in range(4)], dim=1)


@each_kernels
@pytest.mark.parametrize(
    "changes",
    [{}, {"feedback": False}, {"attends_self": False}, {"window": 64}, {"sink": 3}, {"vocabulary": 32}],
)
@torch.inference_mode()
def test_a_draft_s_pass_by_one_kernel_guesses_what_its_layers_do(kernels: Kernels, changes: dict[str, object]) -> None:
    draft, contexts = served_draft(kernels, **changes), [2, 30, 9]
    memory = memory_of(draft, contexts)
    fused = memory.round([0, 1, 2], contexts, 4)
    assert isinstance(fused, FusedRound)
    found = guessed(fused, 3)
    expected = guessed(RoundMemory(memory, torch.arange(3), torch.tensor(contexts), 4), 3)
    proposed_V = found[0, 0].isfinite()
    assert int(proposed_V.sum()) == changes.get("vocabulary", found.shape[-1])
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert far_apart(found[..., proposed_V], expected[..., proposed_V]) < rounding(kernels)


@each_kernels
@torch.inference_mode()
def test_what_a_draft_guesses_for_a_sequence_does_not_depend_on_the_others(kernels: Kernels) -> None:
    draft, contexts = served_draft(kernels), list(range(5, 45))
    memory = memory_of(draft, contexts)
    together = guessed(memory.round(list(range(40)), contexts, 4), 40)
    for slot in (0, 15, 16, 39):
        assert torch.equal(guessed(memory.round([slot], [contexts[slot]], 4), 1)[0], together[slot])


@each_kernels
@torch.inference_mode()
def test_a_draft_s_numbers_that_are_none_stay_with_their_sequence(kernels: Kernels) -> None:
    memory = memory_of(served_draft(kernels), [9, 9])
    memory.values_NXGSK[0, 1, :, 2, 5] = float("nan")
    logits_BKV = guessed(memory.round([0, 1], [9, 9], 4), 2)
    assert logits_BKV[0].isfinite().all()
    assert not logits_BKV[1].isfinite().any()


@each_kernels
@torch.inference_mode()
def test_what_is_absorbed_by_one_kernel_is_what_its_layers_make_of_it(kernels: Kernels) -> None:
    contexts = [2, 30, 9]
    fused, by_torch = (memory_of(draft, contexts) for draft in (served_draft(kernels), unpacked_draft(kernels)))
    assert torch.equal(fused.positions_XS, by_torch.positions_XS)
    held_XS = by_torch.positions_XS >= 0
    for found, expected in (
        (fused.keys_NXGSK, by_torch.keys_NXGSK),
        (fused.values_NXGSK, by_torch.values_NXGSK),
    ):
        of_places = (memory.transpose(2, 3)[:, held_XS] for memory in (found, expected))
        assert far_apart(*of_places) < rounding(kernels)


@each_kernels
@torch.inference_mode()
def test_behind_the_rotations_that_are_kept_a_draft_guesses_by_its_layers(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(served_draft(kernels), [30, 9])
    expected = guessed(memory.round([0, 1], [30, 9], 4), 2)
    monkeypatch.setattr("spire.model.backends.cpu.fused_draft.MOST_ROTATIONS", 33)
    round_ = memory.round([0, 1], [30, 9], 4)
    assert isinstance(round_, RoundMemory)
    assert far_apart(guessed(round_, 2), expected) < rounding(kernels)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def drawn(kernels: Kernels, logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    tokens_B, probs_BV = torch.zeros(len(logits_BV), dtype=torch.int64), torch.zeros(logits_BV.shape).bfloat16()
    rows = replace(sampled_rows(len(logits_BV)), temperature_B=temperature_B)
    sampling = KernelSampling.of(rows, torch.zeros_like(tokens_B), logits_BV.shape[1])
    draw(kernels, logits_BV.clone(), sampling, 0, uniforms_B, tokens_B, probs_BV)
    return tokens_B, probs_BV


@each_kernels
@settings(max_examples=60, deadline=None)
@given(B=st.integers(1, 40), V=st.sampled_from([32, 96, 4096]), temperature=st.sampled_from([0.3, 1.0, 7.0]))
def test_what_is_drawn_from_is_the_softmax_rounded_once(kernels: Kernels, B: int, V: int, temperature: float) -> None:
    logits_BV = 4 * torch.randn(B, V)
    tokens_B, probs_BV = drawn(kernels, logits_BV, torch.full((B,), temperature), torch.rand(B, dtype=torch.float64))
    exact_BV = (logits_BV.double() / temperature).softmax(dim=-1)
    # Half a unit of bfloat16's last place, and what fp32 has lost before.
    torch.testing.assert_close(probs_BV.double(), exact_BV, rtol=2.0**-8 + 1e-5, atol=1e-30)
    assert (probs_BV[torch.arange(B), tokens_B] > 0).all()


@each_kernels
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), uniform=st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]))
def test_a_token_is_where_the_sum_of_what_is_sent_passes_its_share(kernels: Kernels, seed: int, uniform: float) -> None:
    logits_BV = 8 * torch.randn(7, 96, generator=torch.Generator().manual_seed(seed))
    tokens_B, probs_BV = drawn(kernels, logits_BV, torch.ones(7), torch.full((7,), uniform, dtype=torch.float64))
    sums_BV = probs_BV.double().cumsum(dim=-1)
    row_B, tolerance = torch.arange(7), 1e-12
    share_B = uniform * sums_BV[:, -1]
    assert (sums_BV[row_B, tokens_B] >= share_B - tolerance).all()
    assert (sums_BV[row_B, tokens_B] - probs_BV[row_B, tokens_B].double() <= share_B + tolerance).all()


@each_kernels
@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_tokens_follow_what_is_sent_and_a_draw_that_is_off_is_found(kernels: Kernels, shift: float) -> None:
    n, logits_V = 100_000, 2 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    uniforms_N = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * (1 - shift)
    tokens_N, probs_NV = drawn(kernels, logits_V.expand(n, 32), torch.ones(n), uniforms_N)
    expected_V = probs_NV[0].double() / probs_NV[0].double().sum() * n
    p_value = stats.chisquare(tokens_N.bincount(minlength=32).numpy(), expected_V.numpy()).pvalue
    assert (p_value > ALPHA) == (shift == 0)


@each_kernels
def test_greedy_rows_take_the_likeliest_token_and_leave_their_distribution(kernels: Kernels) -> None:
    logits_BV, temperature_B = torch.randn(6, 64), torch.tensor([0.0, 1.0] * 3)
    tokens_B, probs_BV = drawn(kernels, logits_BV, temperature_B, torch.full((6,), 0.5, dtype=torch.float64))
    assert torch.equal(tokens_B[::2], logits_BV[::2].argmax(dim=-1))
    assert not probs_BV[::2].any()
    assert torch.allclose(probs_BV[1::2].float().sum(dim=-1), torch.ones(3), atol=4e-3)


@each_kernels
def test_nan_logits_give_a_token_of_the_vocabulary_and_stay_in_their_row(kernels: Kernels) -> None:
    logits_BV = torch.randn(3, 64)
    logits_BV[1, 5] = float("nan")
    tokens_B, probs_BV = drawn(kernels, logits_BV, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))
    assert (tokens_B >= 0).all()
    assert (tokens_B < 64).all()
    assert probs_BV[[0, 2]].isfinite().all()
    assert not probs_BV[1].isfinite().all()


@each_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_a_round_of_a_draft_with_its_own_vocabulary_draws_its_tokens(kernels: Kernels, temperature: float) -> None:
    """As the reference draws them from the logits of all tokens, -inf for those that it cannot propose."""
    draft = served_draft(kernels, vocabulary=32)
    assert draft.vocabulary is not None
    memory, newest_B = memory_of(draft, [30, 9]), torch.tensor([7, 11])
    samplings = [Sampling(temperature=temperature, top_p=1, seed=seed, rule=RULE_BLOCK) for seed in (1, 2)]
    inputs = RoundInputs(newest_B, torch.tensor([30, 9]), 4, from_protos(samplings, torch.device("cpu")), None)
    inputs = inputs._replace(vocabulary_W=draft.vocabulary)
    fused, by_torch = (
        backend.draft(memory.round([0, 1], [30, 9], 4), inputs, lambda _: None)
        for backend in (CpuBackend(), Reference())
    )
    assert torch.equal(fused.tokens_BK, by_torch.tokens_BK)
    assert torch.isin(fused.tokens_BK, draft.vocabulary).all()
    for drafted in (fused, by_torch):
        assert drafted.ids_BKM is None
        assert drafted.vocabulary_M is draft.vocabulary
    if temperature:
        assert fused.probs_BKM is not None
        assert by_torch.probs_BKM is not None
        torch.testing.assert_close(fused.probs_BKM, by_torch.probs_BKM, rtol=2**-7, atol=1e-6)


@each_kernels
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("vocabulary", [None, 32])
@torch.inference_mode()
def test_each_sequence_stops_where_its_head_says_as_by_torch(
    kernels: Kernels, depth: int, vocabulary: int | None
) -> None:
    """Whoever goes on draws what it would have drawn if nobody had stopped."""
    torch.manual_seed(depth)
    draft = unpacked_draft(kernels, vocabulary=vocabulary, stop_head={"depth": depth, "width": 24})
    assert draft.stop_head is not None
    with torch.no_grad():
        for parameter in draft.stop_head.parameters():
            parameter.normal_(std=0.1)
    draft, contexts = CpuBackend().pack(draft), list(range(8, 20))
    memory, bases_B = memory_of(draft, contexts), torch.tensor(contexts)
    samplings = [Sampling(temperature=at % 2, top_p=1, seed=at, rule=RULE_BLOCK) for at in range(12)]
    least_B = torch.linspace(0.0, 1.0, 12)
    assert draft.stop_head is not None
    rows = from_protos(samplings, torch.device("cpu"))
    inputs = RoundInputs(bases_B % 32, bases_B, 6, rows, None, draft.vocabulary, Stopping(draft.stop_head, least_B))
    slots = range(12)
    fused, by_torch = (
        backend.draft(memory.round(slots, contexts, 6), inputs, lambda _: None)
        for backend in (CpuBackend(), Reference())
    )
    all_k = CpuBackend().draft(memory.round(slots, contexts, 6), inputs._replace(stop=None), lambda _: None)
    assert fused.counts_B is not None
    assert by_torch.counts_B is not None
    assert fused.counts_B.tolist() == by_torch.counts_B.tolist()
    assert fused.counts_B[0] == 6, "it goes on as long as there is any hope"
    assert fused.counts_B[11] == 1, "nothing is certain"
    assert len(set(fused.counts_B.tolist())) > 2
    for row, count in enumerate(fused.counts_B.tolist()):
        assert torch.equal(fused.tokens_BK[row, :count], all_k.tokens_BK[row, :count])
        assert torch.equal(fused.tokens_BK[row, :count], by_torch.tokens_BK[row, :count])


@each_kernels
@torch.inference_mode()
def test_a_whole_round_draws_what_its_passes_do(kernels: Kernels) -> None:
    memory = memory_of(served_draft(kernels), [30, 9])
    rows, base_B, newest_B = sampled_rows(2), torch.tensor([30, 9]), torch.tensor([7, 11])
    uniforms_BK = rows.uniforms(base_B, 4, Purpose.DRAFT)
    whole = memory.round([0, 1], [30, 9], 4)
    assert isinstance(whole, FusedRound)
    tokens_BK, probs_BKV, _ = whole.drawn(newest_B, rows, base_B)
    step_by_step, fed_B = memory.round([0, 1], [30, 9], 4), newest_B
    for step in range(4):
        fed_B, probs_BV = drawn(
            kernels, step_by_step.next_logits(fed_B), torch.ones(2), uniforms_BK[:, step].contiguous()
        )
        assert torch.equal(fed_B, tokens_BK[:, step])
        assert torch.equal(probs_BV, probs_BKV[:, step])


@each_kernels
@pytest.mark.parametrize("vocabulary", [None, 64])
@torch.inference_mode()
def test_a_round_truncates_and_picks_as_torch_does(kernels: Kernels, vocabulary: int | None) -> None:
    """Under the invariant rule by the noise of the target's ids, whatever part of its vocabulary the draft has."""
    draft, contexts = served_draft(kernels, vocabulary=vocabulary), list(range(8, 20))
    memory, bases_B = memory_of(draft, contexts), torch.tensor(contexts)
    rules = (RULE_INVARIANT, RULE_INVARIANT, RULE_BLOCK)
    samplings = [
        Sampling(temperature=0.5 * (at % 4), top_p=1 - at % 2 / 5, seed=at, rule=rules[at % 3]) for at in range(12)
    ]
    rows = from_protos(samplings, torch.device("cpu"))
    inputs = RoundInputs(bases_B % 32, bases_B, 6, rows, None, draft.vocabulary)
    fused, by_torch = (
        backend.draft(memory.round(range(12), contexts, 6), inputs, lambda _: None)
        for backend in (CpuBackend(), Reference())
    )
    assert torch.equal(fused.tokens_BK, by_torch.tokens_BK)
    assert fused.probs_BKM is not None
    assert by_torch.probs_BKM is not None
    assert torch.equal(fused.probs_BKM[rows.judged_by_q_B], by_torch.probs_BKM[rows.judged_by_q_B])
