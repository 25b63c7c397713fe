"""`spire train stop-head`: training of the head that predicts whether a draft token is accepted (SpecDec++, section 3).

The draft is frozen, and all heads of a sweep learn from the same tokens (`samples`).

Shapes: N drafted tokens, D width of the draft.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spire.checkpoints.weights import save_stop_head
from spire.model.config import StopHeadConfig
from spire.model.stop_head import StopHead
from spire.progress import count_shown
from spire.text.text_files import find_files
from spire.training.draft import DraftRecipe, held_out_source, load_pair, source_of
from spire.training.stopping.figures import HeadFigures, Predicted, figures_of
from spire.training.stopping.samples import Samples, collect

# Tokens of text whose branches are drafted and judged at once.
_TOKENS = 1024
_BATCH, _EPOCHS, _LEAST_STEPS, _RATE = 1024, 8, 1000, 2e-3
# Share of the hidden state's numbers that are left out at random: of all, heads soon know the samples by heart.
_DROPOUT = 0.5
_CALIBRATION_STEPS = 50
# How often a training looks at samples that it does not learn from.
_LOOKS = 32
# Parts of the held-out samples that are resampled whole for an interval.
_STRETCHES = 100


@dataclass(frozen=True)
class StopHeadRecipe:
    """All values, besides draft, target and text, that determine a stop head.

    `samples`: drafted tokens to learn from. `k`: depth of the drafted blocks. `rejected_weight`: w_rej of section 3.3,
    with w_acc = 1: what a rejected token counts. The head's probabilities are corrected for it, so that they are
    probabilities at any weight.
    """

    samples: int = 300_000
    k: int = 5
    depth: int = 2
    width: int = 64
    rejected_weight: float = 1.0
    seed: int = 3


def train_stop_head(
    target_directory: Path,
    draft_directory: Path,
    data: list[Path],
    valid: list[Path],
    out: Path,
    recipes: Sequence[StopHeadRecipe],
    device: str = "cpu",
) -> list[tuple[StopHeadRecipe, HeadFigures]]:
    """Train a head by each recipe on the same samples, and write the draft to `out` with the best by held-out log loss.

    A fifth of the samples, of `valid` if there is any, is not learned: half of it stops and calibrates, the other half
    is held out. Both halves may hold the same conversations if `valid` is short. Returns the figures of all heads.
    Raises the errors of `load_pair`, and DataError for unusable text.
    """
    find_files([*data, *valid])
    first = recipes[0]
    target, draft = load_pair(target_directory, draft_directory, device)
    identity = draft.draft.target_fingerprint
    of_text = DraftRecipe(seed=first.seed, tokens_per_step=_TOKENS)
    chosen = source_of(data, target_directory, target, identity, of_text)
    train = collect(draft, target, chosen, first.samples, first.k, first.seed, "drafting")
    if valid:
        others = held_out_source(valid, target_directory, target.config, of_text)
        kept_apart = collect(draft, target, others, max(1, first.samples // 5), first.k, first.seed, "held out")
    else:
        train, kept_apart = _divided(train, 0.8)
    watched, held_out = _divided(kept_apart, 0.5)
    fits = []
    with count_shown("training", len(recipes) * _steps(train), "steps") as progress:
        for recipe in recipes:
            fits.append(fit(train, watched, held_out, recipe, progress.advance))
    best = min(range(len(fits)), key=lambda at: fits[at].figures.log_loss)
    config = StopHeadConfig(depth=recipes[best].depth, width=recipes[best].width)
    draft.stop_head, draft.draft = fits[best].head, draft.draft.model_copy(update={"stop_head": config})
    if out != draft_directory:
        shutil.copytree(draft_directory, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    save_stop_head(out, draft)
    return [(recipe, one.figures) for recipe, one in zip(recipes, fits, strict=True)]


def _divided(samples: Samples, share: float) -> tuple[Samples, Samples]:
    end = len(samples.accepted_N)
    return samples.part(0, int(share * end)), samples.part(int(share * end), end)


class Fit(NamedTuple):
    """A trained head and what it reaches on held-out samples."""

    head: StopHead
    figures: HeadFigures


def _steps(train: Samples) -> int:
    """Return the number of steps in which a head learns these samples."""
    return max(_LEAST_STEPS, _EPOCHS * len(train.accepted_N) // _BATCH)


def fit(
    train: Samples,
    watched: Samples,
    held_out: Samples,
    recipe: StopHeadRecipe,
    stepped: Callable[[], object] = lambda: None,
) -> Fit:
    """Train a head on samples; call `stepped` after each step. It learns from standardised inputs; the head that is
    returned takes them raw.

    `watched` tells when the head begins to learn its samples by heart: kept are the weights that judge `watched` best.
    By `watched` the head is calibrated, too: a draft guesses text that it has learned better than other text.
    """
    torch.manual_seed(recipe.seed)
    inputs_NE = torch.cat((train.hidden_ND.float(), train.told_NF), dim=1)
    mean_E, scale_E = inputs_NE.mean(dim=0), inputs_NE.std(dim=0).clamp(min=1e-6)
    head = StopHead(train.hidden_ND.shape[1], StopHeadConfig(depth=recipe.depth, width=recipe.width))
    steps = _steps(train)
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    random = torch.Generator().manual_seed(recipe.seed)
    best, least, weight = _raw(head, mean_E, scale_E), math.inf, recipe.rejected_weight
    every_token_N = torch.ones(_BATCH)  # those behind a rejected one teach as much
    for step in range(1, steps + 1):
        chosen = torch.randint(len(inputs_NE), (_BATCH,), generator=random)
        given_hidden, given_told = ((inputs_NE[chosen] - mean_E) / scale_E).tensor_split([train.hidden_ND.shape[1]], 1)
        logit_N = head(F.dropout(given_hidden, _DROPOUT), given_told)
        loss = weighted_loss(logit_N, train.accepted_N[chosen], every_token_N, weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        stepped()
        if step % max(1, steps // _LOOKS) == 0:
            now = _raw(head, mean_E, scale_E)
            with torch.no_grad():
                logit_N = now(watched.hidden_ND.float(), watched.told_NF)
                loss_now = float(weighted_loss(logit_N, watched.accepted_N, watched.reached_N, weight))
            if loss_now < least:
                best, least = now, loss_now
    _calibrate(best, watched)
    return Fit(best, figures_of(_predicted(best, held_out)))


def _calibrate(head: StopHead, watched: Samples) -> None:
    """Scale and shift a head's logits to those of probabilities: w_rej has shifted them, dropout has shrunk them."""
    with torch.no_grad():
        logit_N = head(watched.hidden_ND.float(), watched.told_NF)
    scale, shift = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS((scale, shift), max_iter=_CALIBRATION_STEPS)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = weighted_loss(scale * logit_N + shift, watched.accepted_N, watched.reached_N, 1.0)
        found.backward()
        return found

    optimizer.step(loss)
    with torch.no_grad():
        head.leave.weight.mul_(scale)
        head.leave.bias.mul_(scale).add_(shift)


@torch.no_grad()
def _raw(head: StopHead, mean_E: Tensor, scale_E: Tensor) -> StopHead:
    """Return a copy of a head for inputs that are not standardised."""
    raw = deepcopy(head)
    raw.enter.bias.sub_(raw.enter.weight @ (mean_E / scale_E))
    raw.enter.weight.div_(scale_E)
    return raw


def weighted_loss(logit_N: Tensor, accepted_N: Tensor, reached_N: Tensor, rejected_weight: float) -> Tensor:
    """Return the weighted cross-entropy of section 3.3 with soft labels; tokens count as often as they are reached."""
    losses_N = -(accepted_N * F.logsigmoid(logit_N) + rejected_weight * (1 - accepted_N) * F.logsigmoid(-logit_N))
    return (reached_N * losses_N).sum() / reached_N.sum().clamp(min=1e-6)


@torch.no_grad()
def _predicted(head: StopHead, samples: Samples) -> Predicted:
    """Return what a head predicts. Neighbouring samples are of one text: each of `_STRETCHES` stretches is a group."""
    log_q_N, entropy_N = samples.told_NF[:, :2].unbind(dim=1)
    predicted_N = head(samples.hidden_ND.float(), samples.told_NF).sigmoid()
    group_N = torch.arange(len(log_q_N)) * min(_STRETCHES, len(log_q_N)) // len(log_q_N)
    return Predicted(predicted_N, log_q_N, entropy_N, samples.accepted_N, samples.reached_N, group_N)
