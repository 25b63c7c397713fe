"""The SPIRe draft: what is trained is what is served, in constant memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import BlockRollouts, Draft, OwnPast, RolloutBlocks, input_scale, prune, visible
from spire.model.draft_memory import DraftMemory
from spire.model.target import Target, WholeSequence
from spire.model.token_memory import TokenMemory
from spire.training.conversations import TrainingBatch
from spire.training.rollouts import Loss, rollout_loss
from spire.training.teacher import teach

WINDOW, K = 6, 4


def new_target(model_type: str = "llama") -> Target:
    torch.manual_seed(0)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    target = Target(config).requires_grad_(False)
    for name, parameter in target.named_parameters():
        if parameter.ndim == 2 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    return target


@pytest.fixture(scope="module")
def target() -> Target:
    return new_target()


def pruned(target: Target, **config: object) -> Draft:
    """The target's last two layers, with a window of 6."""
    values = {"target_fingerprint": "fingerprint", "tapped_layers": (2, 3), "window": WINDOW, "sink": 1} | config
    return prune(target, DraftConfig.model_validate(values), (2, 3))


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return pruned(target).requires_grad_(False)


@pytest.fixture(scope="module")
def tokens_BL() -> Tensor:
    return torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))


def taps_of(target: Target, draft: Draft, tokens_BL: Tensor) -> Tensor:
    taps = target(tokens_BL, WholeSequence(tokens_BL), draft.draft.tapped_layers).taps_BTND
    assert taps is not None
    return taps


def trained_rollouts(draft: Draft, taps: Tensor, tokens_BL: Tensor, blocks: RolloutBlocks) -> Tensor:
    """Logits [B, blocks, k, V] of the passes as training runs them."""
    rollouts = BlockRollouts(draft, taps, blocks)
    hidden = []
    for _ in range(blocks.k):
        positions = rollouts.advance()
        hidden.append(draft(tokens_BL[:, positions], rollouts))
    return draft.unembed(torch.stack(hidden, dim=2))


def served_round(draft: Draft, memory: DraftMemory, slots: Tensor, tokens_BK: Tensor, base: int) -> Tensor:
    """Logits [B, k, V] of one round as serving runs it."""
    k = tokens_BK.shape[1]
    round_memory = memory.round(slots.tolist(), [base] * len(slots), k)
    return torch.stack([round_memory.next_logits(tokens_BK[:, step]) for step in range(k)], dim=1)


def absorb(memory: DraftMemory, slots: Tensor, taps: Tensor, start: int, stop: int) -> None:
    for position in range(start, stop):
        positions = torch.full((len(slots),), position)
        memory.absorb(slots, positions, taps[:, position])


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("ablation", [{}, {"feedback": False}, {"attends_self": False}, {"window": 64}, {"sink": 3}])
def test_serving_computes_what_training_trained(
    target: Target, tokens_BL: Tensor, offset: int, ablation: dict[str, object]
) -> None:
    serves_what_was_trained(target, tokens_BL, offset, **ablation)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_drafts_of_other_families_compute_what_training_trained(model_type: str, tokens_BL: Tensor) -> None:
    target = new_target(model_type)
    serves_what_was_trained(target, tokens_BL, offset=2)
    mine, theirs = pruned(target).layers.state_dict(), target.layers[2:].state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def serves_what_was_trained(target: Target, tokens_BL: Tensor, offset: int, **ablation: object) -> None:
    draft = pruned(target, **ablation).requires_grad_(False)
    taps = taps_of(target, draft, tokens_BL)
    blocks = RolloutBlocks.of(tokens_BL.shape[1], K, offset)
    trained = trained_rollouts(draft, taps, tokens_BL, blocks)
    memory, slots, known = DraftMemory(draft, slots=8), torch.tensor([5, 2]), 0
    for block, start in enumerate(blocks.starts_T.tolist()):
        absorb(memory, slots, taps, known, start)
        served = served_round(draft, memory, slots, tokens_BL[:, start : start + K], start)
        torch.testing.assert_close(served, trained[:, block], atol=1e-4, rtol=1e-4)
        known = start


def test_a_draft_that_saw_only_sink_and_window_guesses_as_if_it_saw_all(
    target: Target, draft: Draft, tokens_BL: Tensor
) -> None:
    taps, slots, base = taps_of(target, draft, tokens_BL), torch.tensor([0, 1]), 30
    everything, tail = DraftMemory(draft, 2), DraftMemory(draft, 2)
    absorb(everything, slots, taps, 0, base)
    absorb(tail, slots, taps, 0, 1)
    absorb(tail, slots, taps, base - WINDOW, base)
    fed = tokens_BL[:, base : base + K]
    assert torch.equal(served_round(draft, everything, slots, fed, base), served_round(draft, tail, slots, fed, base))


def test_rejected_tokens_never_evict_committed_memory(target: Target, draft: Draft, tokens_BL: Tensor) -> None:
    taps, slots, base = taps_of(target, draft, tokens_BL), torch.tensor([0, 1]), 20
    memory = DraftMemory(draft, 2)
    absorb(memory, slots, taps, 0, base)
    before = memory.keys_NXGSK.clone()
    served_round(draft, memory, slots, torch.zeros(2, 8, dtype=torch.int64), base)
    assert torch.equal(memory.keys_NXGSK, before)


def test_bytes_per_sequence_do_not_depend_on_context(target: Target, draft: Draft, tokens_BL: Tensor) -> None:
    taps, slots = taps_of(target, draft, tokens_BL), torch.tensor([0, 1])
    memory = DraftMemory(draft, 2)
    held = []
    for context in (2, 40):
        absorb(memory, slots, taps, 0, context)
        held.append((memory.bytes_per_sequence(), memory.keys_NXGSK.shape))
    assert held[0] == held[1]


def test_slots_do_not_see_each_other(target: Target, draft: Draft, tokens_BL: Tensor) -> None:
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


def test_memory_starts_near_each_layers_own_input(draft: Draft) -> None:
    weights = draft.memory_weights.softmax(dim=-1)
    assert weights.diagonal().tolist() == pytest.approx([0.9, 0.9], abs=1e-6)


def test_pruning_copies_the_last_layers(target: Target, draft: Draft) -> None:
    assert draft.draft.tapped_layers == (2, 3)
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, target.layers[2].mlp.up_proj.weight)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)


def test_the_embedding_is_scaled_to_what_entered_the_copied_layer(target: Target, tokens_BL: Tensor) -> None:
    draft = pruned(target).requires_grad_(False)
    draft.embed_tokens.weight.mul_(input_scale(target, 2, tokens_BL))
    entered = taps_of(target, draft, tokens_BL)[:, 1:, 0].square().mean().sqrt()
    scaled = draft.embed_tokens(tokens_BL).square().mean().sqrt()
    assert scaled.item() == pytest.approx(entered.item(), rel=1e-4)


def loss_of(
    draft: Draft, target: Target, tokens_BL: Tensor, blocks: RolloutBlocks, loss: Loss
) -> tuple[Tensor, Tensor | None]:
    taught = teach(target, tokens_BL, draft.draft.tapped_layers)
    return rollout_loss(draft, target, taught, TrainingBatch(tokens_BL), blocks, loss, torch.tensor(0.5))


def test_training_raises_acceptance(target: Target, tokens_BL: Tensor) -> None:
    draft = pruned(target).requires_grad_(True)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    blocks = RolloutBlocks.of(tokens_BL.shape[1], K, 2)
    alphas = []
    for _ in range(40):
        loss, alpha = loss_of(draft, target, tokens_BL, blocks, "mixed")
        assert alpha is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alphas.append(alpha.item())
    assert alphas[-1] > alphas[0] + 0.1


@pytest.mark.parametrize("loss", ["mixed", "mixed-log", "data"])
@pytest.mark.parametrize("remembers", [{}, {"feedback": False}, {"feedback": False, "tapped_layers": ()}])
def test_every_loss_teaches_every_memory(
    target: Target, tokens_BL: Tensor, loss: Loss, remembers: dict[str, object]
) -> None:
    draft = pruned(target, **remembers).requires_grad_(True)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    blocks = RolloutBlocks.of(tokens_BL.shape[1], K, 2)
    losses = []
    for _ in range(20):
        value, _ = loss_of(draft, target, tokens_BL, blocks, loss)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.1


def test_memory_weights_come_only_with_feedback_which_needs_activations(target: Target) -> None:
    assert not hasattr(pruned(target, feedback=False), "memory_weights")
    with pytest.raises(ValueError, match="feedback memory without the target's activations"):
        pruned(target, tapped_layers=())


@pytest.fixture(params=[4, 64], ids=["window of 4", "dense"])
def token_draft(target: Target, request: pytest.FixtureRequest) -> Draft:
    return pruned(target, tapped_layers=(), feedback=False, window=request.param).requires_grad_(False)


def whole(draft: Draft, tokens_BL: Tensor) -> Tensor:
    """Logits [B, L - 1, V] as training computes them, in one pass."""
    memory = OwnPast(draft, tokens_BL)
    return draft.unembed(draft(tokens_BL[:, memory.advance()], memory))


@torch.inference_mode()
def test_a_token_fed_draft_serves_as_it_trained_whatever_is_accepted(token_draft: Draft, tokens_BL: Tensor) -> None:
    """Rounds in which none, some and all guesses are right, beside a sequence of another length."""
    trained = whole(token_draft, tokens_BL)
    memory, slots = TokenMemory(token_draft, slots=4, capacity=64), [3, 1]
    assert memory._dense == (token_draft.draft.window == 64)
    bases = [7, 12]
    for row, slot in enumerate(slots):
        memory.absorb(slot, 0, tokens_BL[row, : bases[row]].tolist())
    for right in (0, 2, 4, 1, 4):
        served = memory.round(slots, bases, K)
        fed = torch.stack([tokens_BL[row, base : base + K] for row, base in enumerate(bases)])
        fed[:, right + 1 :] = (fed[:, right + 1 :] + 1) % 50
        for step in range(K):
            logits = served.next_logits(fed[:, step])
            for row, base in enumerate(bases):
                if step <= right:
                    torch.testing.assert_close(logits[row], trained[row, base + step], atol=1e-4, rtol=1e-4)
        for row, slot in enumerate(slots):
            verified = tokens_BL[row, bases[row] : bases[row] + right + 1].tolist()
            memory.absorb(slot, bases[row], verified)
            bases[row] += right + 1


@torch.inference_mode()
def test_what_was_guessed_right_is_not_fed_again(token_draft: Draft, tokens_BL: Tensor) -> None:
    memory, tokens = TokenMemory(token_draft, slots=1, capacity=64), tokens_BL[0].tolist()
    memory.absorb(0, 0, tokens[:10])
    round_memory = memory.round([0], [10], K)
    for token in tokens[10:14]:
        round_memory.next_logits(torch.tensor([token]))
    before = memory.cache.lengths[0]
    memory.absorb(0, 10, tokens[10:15])
    assert memory.cache.lengths[0] == before == 14


@torch.inference_mode()
def test_a_forgotten_slot_begins_anew(token_draft: Draft, tokens_BL: Tensor) -> None:
    used, fresh = (TokenMemory(token_draft, slots=1, capacity=64) for _ in range(2))
    used.absorb(0, 0, tokens_BL[0, :20].tolist())
    used.forget(0)
    for memory in (used, fresh):
        memory.absorb(0, 0, tokens_BL[1, :8].tolist())
    token = tokens_BL[1, 8:9]
    assert torch.equal(*(memory.round([0], [8], 1).next_logits(token) for memory in (used, fresh)))
