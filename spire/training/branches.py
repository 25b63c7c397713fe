"""Branches of whole sequences: blocks that a draft guesses after each of many places of a text, and p along them.

Serving verifies one block at a time. Here all blocks of a sequence are drafted in k passes and judged by one forward,
in which a branch attends to the sequence up to its start, and to itself.

Shapes: B sequences, L positions, T branches of a sequence, J depths of a branch, D width, W vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spire.decoding.drafting import told_of
from spire.model.draft import BlockRollouts, Draft, RolloutBlocks, visible
from spire.model.layers import additive, attend
from spire.model.target import Target
from spire.training.teacher import MOST_LOGITS

# True for each query and key, at these text positions, where the query attends to the key: [1, Q, S].
Sees = Callable[[Tensor, Tensor], Tensor]

# Below this temperature a softmax would overflow; temperature 0 takes the most probable token instead.
_COLDEST = 1e-3


class Branches:
    """Attention of B whole sequences first, then of branches of them that start at the positions `starts_T`."""

    def __init__(self, tokens_BL: Tensor, starts_T: Tensor, sees: Sees):
        self._batch, self._starts_T, self._sees = len(tokens_BL), starts_T, sees
        self._stored: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._whole_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        self._fed: list[Tensor] = []
        self.fused: tuple[Any, ...] = ()
        self.positions_BT = self._whole_L.expand(self._batch, -1)
        self._visible = sees(self._whole_L[None], self._whole_L[None])

    def advance(self, depths: range) -> None:
        """Let the next forward feed the positions at these depths of every branch, in order of depth."""
        branch_T = torch.arange(len(self._starts_T), device=self._starts_T.device)
        now_Q, of_Q = torch.cat([self._starts_T + depth for depth in depths]), branch_T.repeat(len(depths))
        self._fed.append(now_Q)
        fed_S = torch.cat(self._fed)
        whole = self._sees(now_Q[None], self._whole_L[None]) & (self._whole_L <= self._starts_T[of_Q][None, :, None])
        own = self._sees(now_Q[None], fed_S[None]) & (branch_T.repeat(len(fed_S) // len(branch_T)) == of_Q[:, None])
        self._visible = torch.cat((whole, own), dim=-1)
        self.positions_BT = now_Q.expand(self._batch, -1)

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        stored = self._stored.setdefault(layer, [])
        stored.append((keys_BGTK, values_BGTK))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*stored, strict=True))
        return attend(queries_BHTK, keys, values, additive(self._visible, queries_BHTK.dtype))


def causal(queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
    """Return the mask of a target: every position sees itself and those before it."""
    return keys_BS[:, None, :] <= queries_BT[:, :, None]


class JudgedBlocks(NamedTuple):
    """Drafted tokens [J, B, T] with what the draft's stop head learns from.

    `told_JBTF`: what the head is told. `ratio_JBT`: p/q of each token.
    """

    tokens_JBT: Tensor
    hidden_JBTD: Tensor
    told_JBTF: Tensor
    ratio_JBT: Tensor

    @property
    def accepted_JBT(self) -> Tensor:
        """The probability, min(1, p/q), that the target accepts a token if it accepts those before it in the branch."""
        return self.ratio_JBT.clamp(max=1.0)


@torch.no_grad()
def judged_blocks(
    draft: Draft,
    target: Target,
    tokens_BL: Tensor,
    blocks: RolloutBlocks,
    temperature_B: Tensor,
    random: torch.Generator,
) -> JudgedBlocks:
    """Draft a block after each start, as serving does, and judge every token of it by the target."""
    branches = Branches(tokens_BL, blocks.starts_T, causal)
    whole_BLD, taps_BLND = target(tokens_BL, branches, draft.draft.tapped_layers)
    feed, fed_BT = _passes(draft, taps_BLND, tokens_BL, blocks), tokens_BL[:, blocks.starts_T]
    tokens, hidden, told, drawn_with = (list[Tensor]() for _ in range(4))
    for _ in range(blocks.k):
        hidden.append(feed(fed_BT))
        logits_BTW = F.linear(hidden[-1], draft.lm_head.weight).float()
        place_BT, q_BT = _drawn(logits_BTW, temperature_B, random)
        told.append(told_of(logits_BTW, place_BT, temperature_B[:, None].expand_as(place_BT)))
        fed_BT = place_BT if draft.vocabulary is None else draft.vocabulary[place_BT]
        tokens.append(fed_BT)
        drawn_with.append(q_BT)
    tokens_JBT = torch.stack(tokens)
    before = [whole_BLD[:, blocks.starts_T]]
    if blocks.k > 1:
        branches.advance(range(1, blocks.k))
        hidden_BQD, _ = target(torch.cat(tokens[:-1], dim=1), branches)
        before += hidden_BQD.chunk(blocks.k - 1, dim=1)
    ratios = [_ratio(target, *of_depth, temperature_B) for of_depth in zip(before, tokens, drawn_with, strict=True)]
    return JudgedBlocks(tokens_JBT, torch.stack(hidden), torch.stack(told), torch.stack(ratios))


def _passes(
    draft: Draft, taps_BLND: Tensor | None, tokens_BL: Tensor, blocks: RolloutBlocks
) -> Callable[[Tensor], Tensor]:
    """Return a function that feeds the next token [B, T] of every branch to the draft: its hidden states [B, T, D]."""
    if taps_BLND is not None:
        memory = BlockRollouts(draft, taps_BLND.float(), blocks)

        def feed(fed_BT: Tensor) -> Tensor:
            memory.advance()
            return draft(fed_BT, memory)

        return feed
    branches, depths = Branches(tokens_BL, blocks.starts_T, partial(visible, draft=draft.draft)), count()
    whole_BLD = draft(tokens_BL, branches)

    def feed_own(fed_BT: Tensor) -> Tensor:
        if (depth := next(depths)) == 0:
            return whole_BLD[:, blocks.starts_T]
        branches.advance(range(depth, depth + 1))
        return draft(fed_BT, branches)

    return feed_own


def _drawn(logits_BTW: Tensor, temperature_B: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a token at each position: its place and its probability, [B, T]. At temperature 0 take the most probable."""
    greedy_B1 = temperature_B[:, None] == 0
    probs_BTW = (logits_BTW / temperature_B.clamp(min=_COLDEST)[:, None, None]).softmax(dim=-1)
    drawn_BT = torch.multinomial(probs_BTW.flatten(0, 1), 1, generator=random).view(probs_BTW.shape[:-1])
    place_BT = torch.where(greedy_B1, logits_BTW.argmax(dim=-1), drawn_BT)
    return place_BT, probs_BTW.gather(-1, place_BT[..., None])[..., 0].masked_fill(greedy_B1, 1.0)


def _ratio(target: Target, hidden_BTD: Tensor, tokens_BT: Tensor, q_BT: Tensor, temperature_B: Tensor) -> Tensor:
    """Return p/q of tokens after these hidden states of the target [B, T]."""
    B, T = tokens_BT.shape
    rows = (hidden_BTD.flatten(0, 1), tokens_BT.flatten(), temperature_B.repeat_interleave(T))
    most = max(1, MOST_LOGITS // target.config.vocab_size)
    found = list[Tensor]()
    for hidden_RD, token_R, temperature_R in zip(*(part.split(most) for part in rows), strict=True):
        logits_RV = target.unembed(hidden_RD)
        p_RV = (logits_RV / temperature_R.clamp(min=_COLDEST)[:, None]).softmax(dim=-1)
        p_R = p_RV.gather(-1, token_R[:, None])[:, 0]
        found.append(torch.where(temperature_R == 0, (logits_RV.argmax(dim=-1) == token_R).float(), p_R))
    return torch.cat(found).view(B, T) / q_BT
