"""The SPIRe draft: what is trained is what is served, in constant memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import BlockRollouts, RolloutBlocks, SpireDraft, match_input_scale, prune, visible
from spire.model.draft_memory import DraftMemory
from spire.model.target import Target, WholeSequence
from spire.training.draft import rollout_loss

WINDOW, K = 6, 4


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    target = Target(config).requires_grad_(False)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return target


@pytest.fixture(scope="module")
def draft(target: Target) -> SpireDraft:
    return prune(target, "fingerprint", layers=2, window=WINDOW, sink=1).requires_grad_(False)


@pytest.fixture(scope="module")
def tokens_BL() -> Tensor:
    return torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))


def taps_of(target: Target, draft: SpireDraft, tokens_BL: Tensor) -> Tensor:
    taps = target(tokens_BL, WholeSequence(tokens_BL), draft.draft.tapped_layers).taps_BTND
    assert taps is not None
    return taps


def trained_rollouts(draft: SpireDraft, taps: Tensor, tokens_BL: Tensor, blocks: RolloutBlocks) -> Tensor:
    """Hidden states [B, blocks, k, D] of the passes as training runs them."""
    rollouts = BlockRollouts(draft, taps, blocks)
    hidden = []
    for _ in range(blocks.k):
        positions = rollouts.advance()
        hidden.append(draft(tokens_BL[:, positions], rollouts))
    return torch.stack(hidden, dim=2)


def served_round(draft: SpireDraft, memory: DraftMemory, slots: Tensor, tokens_BK: Tensor, base: int) -> Tensor:
    """Hidden states [B, k, D] of one round as serving runs it."""
    k = tokens_BK.shape[1]
    round_memory = memory.round(slots, torch.full((len(slots),), base), k)
    hidden = []
    for step in range(k):
        round_memory.advance()
        hidden.append(draft(tokens_BK[:, step : step + 1], round_memory)[:, 0])
    return torch.stack(hidden, dim=1)


def absorb(memory: DraftMemory, slots: Tensor, taps: Tensor, start: int, stop: int) -> None:
    for position in range(start, stop):
        memory.absorb(slots, torch.full((len(slots),), position), taps[:, position])


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_serving_computes_what_training_trained(
    target: Target, draft: SpireDraft, tokens_BL: Tensor, offset: int
) -> None:
    taps = taps_of(target, draft, tokens_BL)
    blocks = RolloutBlocks.of(tokens_BL.shape[1], K, offset)
    trained = trained_rollouts(draft, taps, tokens_BL, blocks)
    memory, slots, known = DraftMemory(draft, slots=8), torch.tensor([5, 2]), 0
    for block, start in enumerate(blocks.starts_T.tolist()):
        absorb(memory, slots, taps, known, start)
        served = served_round(draft, memory, slots, tokens_BL[:, start : start + K], start)
        torch.testing.assert_close(served, trained[:, block], atol=1e-4, rtol=1e-4)
        known = start


def test_a_draft_that_saw_only_sink_and_window_guesses_as_one_that_saw_everything(
    target: Target, draft: SpireDraft, tokens_BL: Tensor
) -> None:
    taps, slots, base = taps_of(target, draft, tokens_BL), torch.tensor([0, 1]), 30
    everything, tail = DraftMemory(draft, 2), DraftMemory(draft, 2)
    absorb(everything, slots, taps, 0, base)
    absorb(tail, slots, taps, 0, 1)
    absorb(tail, slots, taps, base - WINDOW, base)
    fed = tokens_BL[:, base : base + K]
    assert torch.equal(served_round(draft, everything, slots, fed, base), served_round(draft, tail, slots, fed, base))


def test_rejected_tokens_never_evict_committed_memory(target: Target, draft: SpireDraft, tokens_BL: Tensor) -> None:
    taps, slots, base = taps_of(target, draft, tokens_BL), torch.tensor([0, 1]), 20
    memory = DraftMemory(draft, 2)
    absorb(memory, slots, taps, 0, base)
    before = memory.keys_NXGSK.clone()
    served_round(draft, memory, slots, torch.zeros(2, 8, dtype=torch.int64), base)
    assert torch.equal(memory.keys_NXGSK, before)


def test_bytes_per_sequence_do_not_depend_on_context(target: Target, draft: SpireDraft, tokens_BL: Tensor) -> None:
    taps, slots = taps_of(target, draft, tokens_BL), torch.tensor([0, 1])
    memory = DraftMemory(draft, 2)
    held = []
    for context in (2, 40):
        absorb(memory, slots, taps, 0, context)
        held.append((memory.bytes_per_sequence(), memory.keys_NXGSK.shape))
    assert held[0] == held[1]


def test_slots_do_not_see_each_other(target: Target, draft: SpireDraft, tokens_BL: Tensor) -> None:
    taps, base = taps_of(target, draft, tokens_BL), 12
    alone, together = DraftMemory(draft, 2), DraftMemory(draft, 2)
    absorb(alone, torch.tensor([0]), taps[:1], 0, base)
    absorb(together, torch.tensor([0, 1]), taps, 0, base)
    fed = tokens_BL[:1, base : base + K]
    served = [served_round(draft, memory, torch.tensor([0]), fed, base) for memory in (alone, together)]
    torch.testing.assert_close(served[0], served[1], atol=1e-5, rtol=1e-5)


def test_mask_is_sink_window_and_self() -> None:
    config = DraftConfig(target_fingerprint="x", tapped_layers=(0,), window=3, sink=1)
    keys = torch.tensor([[0, 1, 5, 6, 7, 8, 9, 10, -1]])
    assert visible(torch.tensor([[9]]), keys, config)[0, 0].tolist() == [
        True, False, False, True, True, True, True, False, False,
    ]  # fmt: skip
    without_self = config.model_copy(update={"attends_self": False})
    assert not visible(torch.tensor([[9]]), keys, without_self)[0, 0, 6]


def test_memory_starts_near_each_layers_own_input(draft: SpireDraft) -> None:
    weights = draft.memory_weights.softmax(dim=-1)
    assert weights.diagonal().tolist() == pytest.approx([0.9, 0.9], abs=1e-6)


def test_pruning_copies_the_last_layers(target: Target, draft: SpireDraft) -> None:
    assert draft.draft.tapped_layers == (2, 3)
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, target.layers[2].mlp.up_proj.weight)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)


def test_the_embedding_is_scaled_to_what_entered_the_copied_layer(target: Target, tokens_BL: Tensor) -> None:
    draft = prune(target, "fingerprint", layers=2, window=WINDOW).requires_grad_(False)
    match_input_scale(draft, target, tokens_BL)
    entered = taps_of(target, draft, tokens_BL)[:, 1:, 0].square().mean().sqrt()
    scaled = draft.embed_tokens(tokens_BL).square().mean().sqrt()
    assert scaled.item() == pytest.approx(entered.item(), rel=1e-4)


def test_training_raises_acceptance(target: Target, tokens_BL: Tensor) -> None:
    draft = prune(target, "fingerprint", layers=2, window=WINDOW).requires_grad_(True)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    blocks = RolloutBlocks.of(tokens_BL.shape[1], K, 2)
    alphas = []
    for _ in range(40):
        loss, alpha = rollout_loss(draft, target, tokens_BL, blocks, omega=0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alphas.append(alpha.item())
    assert alphas[-1] > alphas[0] + 0.1
