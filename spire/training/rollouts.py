"""The loss of a draft by block rollouts, and its acceptance on held-out text (paper sections 3.3 and 3.4).

Logits are computed and compared for a chunk of positions at a time, and once more in the backward pass, so that no
tensor of [tokens, vocabulary] × k exists.

Shapes: B sequences, L positions, T positions of one pass, R rows of any kind, D width, W vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spire.model.draft import BlockRollouts, Draft, OwnPast, RolloutBlocks
from spire.model.target import Target
from spire.training.conversations import TrainingBatch
from spire.training.teacher import MOST_LOGITS, Taught

Loss = Literal["mixed", "mixed-log", "data"]


class Guesses(NamedTuple):
    """The draft's hidden states at the positions of one pass, and what their distributions are compared with.

    `positions_T`: the positions fed. `taught_BTD`, `log_sum_BT`: the target's hidden states there, and the logarithms
    of the normalisers; None for a loss that needs no p.
    """

    positions_T: Tensor
    hidden_BTD: Tensor
    taught_BTD: Tensor | None
    log_sum_BT: Tensor | None


def rollout_loss(
    draft: Draft,
    target: Target,
    taught: Taught | None,
    batch: TrainingBatch,
    blocks: RolloutBlocks,
    loss: Loss,
    omega: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss and the acceptance α, both means over the drafted positions that are learned.

    α is None if `loss` is "data".
    """
    tokens_BL, learned_BL = batch.tokens_BL, batch.learned_BL
    losses, alphas, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for guesses in run_passes(draft, taught, tokens_BL, blocks):
        at_T = guesses.positions_T
        next_BT = tokens_BL[:, at_T + 1]
        weight_BT = torch.ones_like(next_BT, dtype=torch.float32) if learned_BL is None else learned_BL[:, at_T].float()
        if loss == "data":
            losses_BT, known_BT = data_losses(draft, guesses, next_BT)
            weight_BT = weight_BT * known_BT
        else:
            losses_BT, alpha_BT = mixed_losses(draft, target, guesses, loss == "mixed-log", omega)
            alphas.append((weight_BT * alpha_BT.detach()).sum())
        losses.append((weight_BT * losses_BT).sum())
        weights.append(weight_BT.sum())
    total = torch.stack(weights).sum().clamp(min=1)
    return torch.stack(losses).sum() / total, torch.stack(alphas).sum() / total if alphas else None


def run_passes(draft: Draft, taught: Taught | None, tokens_BL: Tensor, blocks: RolloutBlocks) -> Iterator[Guesses]:
    """Run the draft's passes over the sequences and yield what each guesses; `taught` is None if no p is needed."""
    taps_BLND = None if taught is None else taught.taps_BLND
    remembers = bool(draft.draft.tapped_layers) and taps_BLND is not None
    memory = BlockRollouts(draft, taps_BLND.float(), blocks) if remembers else OwnPast(draft, tokens_BL)  # type: ignore[union-attr]
    for _ in range(memory.passes):
        positions_T = memory.advance()
        hidden_BTD = draft(tokens_BL[:, positions_T], memory)
        if taught is None:
            yield Guesses(positions_T, hidden_BTD, None, None)
        else:
            yield Guesses(positions_T, hidden_BTD, taught.hidden_BLD[:, positions_T], taught.log_sum_BL[:, positions_T])


def mixed_losses(
    draft: Draft, target: Target, guesses: Guesses, of_log_alpha: bool, omega: Tensor
) -> tuple[Tensor, Tensor]:
    """Return MixedLoss ω · CE(p, q) − (1 − ω) · α and α at each position, [B, T]; with log α in place of α if asked.

    For a draft with a vocabulary of its own, CE counts only the tokens that it can propose.
    """
    head_WD = _rows_of(target, draft)

    def compare(hidden_RD: Tensor, taught_RD: Tensor, log_sum_R: Tensor) -> Tensor:
        log_q = F.linear(hidden_RD, draft.lm_head.weight).float().log_softmax(dim=-1)
        with torch.no_grad():
            p = (F.linear(taught_RD.to(head_WD.dtype), head_WD).float() - log_sum_R[:, None]).exp()
        alpha_R = torch.minimum(p, log_q.exp()).sum(dim=-1)
        gain_R = alpha_R.log() if of_log_alpha else alpha_R
        return torch.stack((omega * -(p * log_q).sum(dim=-1) - (1 - omega) * gain_R, alpha_R))

    assert guesses.taught_BTD is not None
    assert guesses.log_sum_BT is not None
    given = (guesses.hidden_BTD, guesses.taught_BTD, guesses.log_sum_BT)
    losses_R, alpha_R = _by_chunks(compare, given, len(head_WD))
    shape = guesses.log_sum_BT.shape
    return losses_R.view(shape), alpha_R.view(shape)


def data_losses(draft: Draft, guesses: Guesses, next_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the text's next tokens [B, T], and 1 where the draft can propose them, else 0."""
    known_BT = torch.ones_like(next_BT, dtype=torch.bool)
    if draft.vocabulary is not None:
        place_BT = torch.searchsorted(draft.vocabulary, next_BT).clamp(max=len(draft.vocabulary) - 1)
        known_BT, next_BT = draft.vocabulary[place_BT] == next_BT, place_BT

    def compare(hidden_RD: Tensor, next_R: Tensor) -> Tensor:
        logits_RW = F.linear(hidden_RD, draft.lm_head.weight).float()
        return F.cross_entropy(logits_RW, next_R, reduction="none")[None]

    (losses_R,) = _by_chunks(compare, (guesses.hidden_BTD, next_BT), draft.lm_head.out_features)
    return losses_R.view(next_BT.shape), known_BT.float()


def _rows_of(target: Target, draft: Draft) -> Tensor:
    """Return the rows [W, D] of the target's unembedding for the tokens that the draft can propose."""
    head_VD = target.lm_head.weight.detach()
    return head_VD if draft.vocabulary is None else head_VD[draft.vocabulary]


def _by_chunks(compare: Callable[..., Tensor], given: Sequence[Tensor], outputs: int) -> Tensor:
    """Apply `compare` to chunks of the rows of tensors [B, T, ...] and return its results, [results, R]."""
    rows = [x.flatten(0, 1) for x in given]
    most = max(1, MOST_LOGITS // outputs)
    if len(rows[0]) <= most:
        return compare(*rows)
    parts = zip(*(x.split(most) for x in rows), strict=True)
    return torch.cat([checkpoint(compare, *part, use_reentrant=False) for part in parts], dim=1)


class HeldOutAcceptance(NamedTuple):
    """Sums over blocks and positions that are learned: of α, of accepted tokens, and the numbers of both."""

    alpha: float
    accepted: float
    positions: int
    blocks: int


@torch.no_grad()
def acceptance(
    draft: Draft, target: Target, taught: Taught, batch: TrainingBatch, blocks: RolloutBlocks
) -> HeldOutAcceptance:
    """Return α and the accepted tokens of blocks of k, with teacher forcing: E[α_1 + α_1 α_2 + …] for each block."""
    zero = torch.tensor(0.0)
    alphas, learned = list[Tensor](), list[Tensor]()
    for guesses in run_passes(draft, taught, batch.tokens_BL, blocks):
        alphas.append(mixed_losses(draft, target, guesses, False, zero.to(guesses.hidden_BTD.device))[1])
        of_all = torch.ones_like(alphas[-1], dtype=torch.bool)
        learned.append(of_all if batch.learned_BL is None else batch.learned_BL[:, guesses.positions_T])
    alpha_kBT, learned_kBT = torch.stack(alphas), torch.stack(learned)
    if len(alphas) == 1:  # one pass feeds all positions: blocks are consecutive positions
        alpha_kBT, learned_kBT = (x[0].unfold(1, blocks.k, blocks.k).permute(2, 0, 1) for x in (alpha_kBT, learned_kBT))
    whole_BT = learned_kBT.all(dim=0)
    accepted_BT = alpha_kBT.cumprod(dim=0).sum(dim=0)
    return HeldOutAcceptance(
        float((alpha_kBT * learned_kBT).sum()),
        float((accepted_BT * whole_BT).sum()),
        int(learned_kBT.sum()),
        int(whole_BT.sum()),
    )
