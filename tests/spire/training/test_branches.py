"""Drafting and judging many blocks of a sequence at once gives what serving one block at a time would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spire.checkpoints.weights import load_draft, load_target
from spire.model.draft import Draft, RolloutBlocks
from spire.model.target import Target, WholeSequence
from spire.training.branches import judged_blocks
from spire.training.draft import DraftRecipe, new_draft


@pytest.fixture(params=["spire", "vanilla"])
def pair(request: pytest.FixtureRequest, stories_dir: Path, stories_draft_dir: Path) -> tuple[Target, Draft]:
    target, identity = load_target(stories_dir)
    if request.param == "spire":
        return target, load_draft(stories_draft_dir)
    recipe = DraftRecipe(kind="vanilla", layers=2, init="random", activations=False, feedback=False, window=64)
    torch.manual_seed(1)
    return target, new_draft(target, identity, recipe).requires_grad_(False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_branch_is_judged_as_if_it_stood_alone(pair: tuple[Target, Draft], temperature: float) -> None:
    target, draft = pair
    tokens_BL = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(5))
    blocks = RolloutBlocks.of(40, 5, 2)
    temperature_B = torch.full((2,), temperature)
    judged = judged_blocks(draft, target, tokens_BL, blocks, temperature_B, torch.Generator().manual_seed(6))
    for row, branch in ((0, 0), (1, 3), (0, len(blocks.starts_T) - 1)):
        start = int(blocks.starts_T[branch])
        drawn = judged.tokens_JBT[:, row, branch]
        alone_1T = torch.cat((tokens_BL[row, : start + 1], drawn))[None]
        logits_TV = target.unembed(target(alone_1T, WholeSequence(alone_1T)).hidden_BTD)[0, start:-1]
        q_T = 1.0
        if temperature:
            logits_TW = draft.lm_head(judged.hidden_JBTD[:, row, branch]).float()
            q_T = (logits_TW / temperature).softmax(dim=-1).gather(-1, drawn[:, None])[:, 0]
            p_T = (logits_TV / temperature).softmax(dim=-1).gather(-1, drawn[:, None])[:, 0]
        else:
            p_T = (logits_TV.argmax(dim=-1) == drawn).float()
        torch.testing.assert_close(judged.ratio_JBT[:, row, branch], p_T / q_T, atol=1e-4, rtol=1e-3)
