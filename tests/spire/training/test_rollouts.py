"""The losses of a draft are those of whole distributions, however they are divided into chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import spire.training.rollouts as rollouts
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft, RolloutBlocks, prune
from spire.model.target import Target, WholeSequence
from spire.training.conversations import TrainingBatch
from spire.training.rollouts import Guesses, Loss, acceptance, data_losses, mixed_losses, rollout_loss
from spire.training.target import initialise
from spire.training.teacher import teach

V, OWN, D, K = 96, 32, 32, 3
OMEGA = torch.tensor(0.3)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": V}
    target = Target(ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes))
    initialise(target, target.layers)
    torch.nn.init.normal_(target.lm_head.weight, std=0.3)
    return target.requires_grad_(False)


def draft_of(target: Target, own: int | None) -> Draft:
    kind = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=8, vocabulary=own)
    vocabulary_W = None if own is None else torch.arange(0, 3 * own, 3)
    draft = prune(target, kind, (1, 2), vocabulary_W)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return draft.requires_grad_(True)


@pytest.fixture(params=[None, OWN], ids=["whole vocabulary", "own vocabulary"])
def draft(target: Target, request: pytest.FixtureRequest) -> Draft:
    return draft_of(target, request.param)


def tokens(B: int = 3, L: int = 20) -> Tensor:
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(5))


def gradients(
    draft: Draft, target: Target, loss: Loss, batch: TrainingBatch
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The loss, α, and the gradient of each parameter."""
    taught = teach(target, batch.tokens_BL, draft.draft.tapped_layers)
    blocks = RolloutBlocks.of(batch.tokens_BL.shape[1], K, 1)
    draft.zero_grad()
    value, alpha = rollout_loss(draft, target, taught, batch, blocks, loss, OMEGA)
    value.backward()
    return value.detach(), alpha, {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", ["mixed", "mixed-log", "data"])
@pytest.mark.parametrize("most_logits", [1, 5 * V])
def test_a_loss_by_chunks_has_the_value_and_the_gradients_of_the_whole(
    target: Target, draft: Draft, loss: Loss, most_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = TrainingBatch(tokens())
    value, alpha, expected = gradients(draft, target, loss, batch)
    monkeypatch.setattr(rollouts, "MOST_LOGITS", most_logits)
    chunked, alpha_chunked, found = gradients(draft, target, loss, batch)
    torch.testing.assert_close(chunked, value)
    torch.testing.assert_close(alpha_chunked, alpha)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_mixed_loss_is_that_of_both_distributions(target: Target, draft: Draft) -> None:
    """Section 3.4: ω · CE(p, q) − (1 − ω) · Σ min(p, q)."""
    tokens_BL, hidden_BTD = tokens(), torch.randn(3, 20, D)
    taught = teach(target, tokens_BL, ())
    guesses = Guesses(torch.arange(20), hidden_BTD, taught.hidden_BLD, taught.log_sum_BL)
    losses_BT, alpha_BT = mixed_losses(draft, target, guesses, False, OMEGA)
    p = target.unembed(target(tokens_BL, WholeSequence(tokens_BL)).hidden_BTD).softmax(dim=-1)
    q = draft.unembed(hidden_BTD).softmax(dim=-1)
    cross_entropy = -(p * q.log().where(q > 0, torch.zeros(()))).sum(dim=-1)
    torch.testing.assert_close(alpha_BT, torch.minimum(p, q).sum(dim=-1))
    torch.testing.assert_close(losses_BT, OMEGA * cross_entropy - (1 - OMEGA) * alpha_BT)


@torch.no_grad()
def test_data_loss_counts_only_tokens_that_the_draft_can_propose(target: Target) -> None:
    draft, hidden_BTD, next_BT = draft_of(target, OWN), torch.randn(2, 9, D), torch.arange(18).view(2, 9)
    losses_BT, known_BT = data_losses(draft, Guesses(torch.arange(9), hidden_BTD, None, None), next_BT)
    assert torch.equal(known_BT.bool(), next_BT % 3 == 0)
    known = known_BT.bool()
    expected = F.cross_entropy(draft.unembed(hidden_BTD)[known], next_BT[known], reduction="none")
    torch.testing.assert_close(losses_BT[known], expected)


@pytest.mark.parametrize("loss", ["mixed", "data"])
def test_what_is_not_learned_counts_neither_in_the_loss_nor_in_alpha(target: Target, loss: Loss) -> None:
    """A batch of a sequence that is learned and one that is not is the first sequence alone."""
    draft, tokens_BL = draft_of(target, None), tokens(2)
    learned_BL = torch.zeros(tokens_BL.shape, dtype=torch.bool)
    learned_BL[0] = True
    found = gradients(draft, target, loss, TrainingBatch(tokens_BL, learned_BL))
    expected = gradients(draft, target, loss, TrainingBatch(tokens_BL[:1]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_draft_that_is_its_target_would_have_all_tokens_accepted(target: Target) -> None:
    """And one block counts as k accepted tokens: the control of what τ is computed from."""
    kind = DraftConfig(target_fingerprint="", tapped_layers=(), feedback=False, window=64)
    draft, batch = prune(target, kind, (0, 1, 2)), TrainingBatch(tokens())
    blocks = RolloutBlocks.of(20, K, 1)
    found = acceptance(draft, target, teach(target, batch.tokens_BL, ()), batch, blocks)
    assert found.alpha == pytest.approx(found.positions, rel=1e-4)
    assert found.accepted == pytest.approx(K * found.blocks, rel=1e-4)
    assert found.blocks > 0
