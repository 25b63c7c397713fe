"""Model work: one forward, the sampling pipeline, the rule, the commit.

Verification and prefill are the same append, and share one forward where both wait.
Drafting (MagicDec) is the same forward over a sparse copy of the cache, and commits nothing.

Shapes: B sequences, T new positions, N tapped layers, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from spire.drafting import Drafted, draft_tokens
from spire.model.cache import Stretches, TargetCache
from spire.model.self_speculation import SelfSpeculation, SparseAttention
from spire.model.target import Target, TargetOutput
from spire.rpc.sampling import from_protos
from spire.sampling import Purpose, SamplingRows, draw, probabilities
from spire.v1 import tensor_pb2
from spire.verification import verify
from verifier_service.batch import RaggedBatch
from verifier_service.synthetic import Rule


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of B prompts, and whether they are the `last` of theirs."""

    slots: list[int]
    tokens: list[Tensor]
    last: list[bool]

    @property
    def counts(self) -> list[int]:
        return [len(chunk) for chunk in self.tokens]


@dataclass(frozen=True)
class Outcome:
    """Per row: whether its numbers are finite, how many draft tokens stand, and the tokens it gained.

    Where verification and prefill shared a forward, each is given its share of the seconds by positions.
    """

    finite: list[bool]
    accepted: list[int]
    tokens: list[list[int]]
    taps_BTND: Tensor | None
    forward_seconds: float
    sample_seconds: float


class SlotSampling:
    """Sampling parameters by slot, kept as tensors: a round selects its rows instead of building them."""

    def __init__(self, slots: int, device: torch.device):
        self._rows = from_protos([tensor_pb2.Sampling(top_p=1)] * slots, device)

    def assign(self, slot: int, sampling: tensor_pb2.Sampling) -> None:
        new = from_protos([sampling])
        for field in fields(SamplingRows):
            getattr(self._rows, field.name)[slot] = getattr(new, field.name)[0]

    def of(self, slots: Tensor) -> SamplingRows:
        return self._rows.select(slots)


class ModelSteps:
    """The target and its cache. Called by one thread only, in inference mode.

    It drafts for itself through `sparse`, keeping the `top_m` most probable tokens of a distribution.
    """

    def __init__(self, target: Target, cache: TargetCache, sampling: SlotSampling, sparse: SparseAttention, top_m: int):
        self.target, self.cache, self.sampling = target, cache, sampling
        self.device = cache.keys[0].device
        self.tapped_layers: tuple[int, ...] = ()
        # What decides which draft tokens stand.
        self.rule: Rule = verify
        self._sparse, self._top_m = sparse, top_m if top_m < target.config.vocab_size else None

    def draft(self, slots: Rows[int], newest: Rows[int], k: int, rows: SamplingRows) -> Drafted:
        """k guesses after the newest token of each slot, which the target makes without writing to its cache."""
        base_B = torch.tensor([self.cache.lengths[slot] for slot in slots], device=self.device)
        round_ = SelfSpeculation(self.target, self.cache, slots, k, self._sparse)
        newest_B = torch.tensor(newest, device=self.device)
        return draft_tokens(round_.next_logits, newest_B, base_B, k, rows, self._top_m)

    def run(self, batch: RaggedBatch | None, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        """One forward for blocks to verify and prompts to prefill, and what becomes of each."""
        began = time.perf_counter()
        appended = []
        if batch:
            appended.append((batch.slots, batch.tokens_BT))
        if chunk:
            appended.append((chunk.slots, torch.nn.utils.rnn.pad_sequence(chunk.tokens, batch_first=True)))
        outputs = self._append(appended)
        positions = [tokens_BT.numel() for _, tokens_BT in appended]
        forward = (time.perf_counter() - began) / sum(positions)
        verified = self._conclude(batch, outputs.pop(0), forward * positions.pop(0)) if batch else None
        prefilled = self._prefilled(chunk, outputs.pop(), forward * positions.pop()) if chunk else None
        return verified, prefilled

    def _append(self, stretches: list[tuple[list[int], Tensor]]) -> list[TargetOutput]:
        """One forward over slots and tokens [B, T] of each stretch."""
        stretches = [(slots, tokens_BT.to(self.device)) for slots, tokens_BT in stretches]
        views = [self.cache.view(slots, tokens_BT.shape[1]) for slots, tokens_BT in stretches]
        if len(views) == 1:
            return [self.target(stretches[0][1], views[0], self.tapped_layers)]
        together = Stretches(views)
        tokens_1R = torch.cat([tokens_BT.flatten() for _, tokens_BT in stretches])[None]
        hidden, taps = self.target(tokens_1R, together, self.tapped_layers)
        split_taps = [None] * len(views) if taps is None else together.split(taps)
        return [TargetOutput(*output) for output in zip(together.split(hidden), split_taps, strict=True)]

    def _conclude(self, batch: RaggedBatch, output: TargetOutput, forward_seconds: float) -> Outcome:
        """Apply the rule to each row; commit the newest token and the accepted ones."""
        began = time.perf_counter()
        logits_BTV = self.target.unembed(output.hidden_BTD)
        position_T = torch.arange(logits_BTV.shape[1], device=self.device)
        finite_BT = logits_BTV.sum(dim=-1).isfinite() | (position_T > batch.counts_B[:, None])
        finite = finite_BT.all(dim=1).tolist()
        forward_seconds += time.perf_counter() - began
        began = time.perf_counter()
        rows = self.sampling.of(torch.tensor(batch.slots, device=self.device))
        p_BTV = probabilities(logits_BTV, rows)
        verdict = self.rule(p_BTV, batch.draft_BK, batch.counts_B, batch.q, rows, batch.base_B)
        accepted = verdict.accepted_B.tolist()
        tokens = [row[: a + 1] for row, a in zip(verdict.tokens_BT.tolist(), accepted, strict=True)]
        self._commit(batch.slots, [a + 1 for a in accepted], finite)
        return Outcome(finite, accepted, tokens, output.taps_BTND, forward_seconds, time.perf_counter() - began)

    def _prefilled(self, chunk: PromptChunk, output: TargetOutput, forward_seconds: float) -> Outcome:
        """Commit each chunk; draw the first token where it is the last of its prompt."""
        began = time.perf_counter()
        counts = chunk.counts
        at_B = torch.tensor(counts, device=self.device) - 1
        hidden_BD = output.hidden_BTD[torch.arange(len(counts), device=self.device), at_B]
        finite = hidden_BD.sum(dim=-1).isfinite().tolist()
        self._commit(chunk.slots, counts, finite)
        tokens = self._first_tokens(chunk.slots, hidden_BD, chunk.last)
        accepted = [0] * len(counts)
        return Outcome(finite, accepted, tokens, output.taps_BTND, forward_seconds, time.perf_counter() - began)

    def _commit(self, slots: Rows[int], counts: Rows[int], finite: Rows[bool]) -> None:
        self.cache.commit(slots, [count if sound else 0 for count, sound in zip(counts, finite, strict=True)])

    def _first_tokens(self, slots: Rows[int], hidden_BD: Tensor, last: Rows[bool]) -> list[list[int]]:
        rows = [row for row, final in enumerate(last) if final]
        tokens: list[list[int]] = [[] for _ in last]
        if rows:
            chosen = [slots[row] for row in rows]
            sampling = self.sampling.of(torch.tensor(chosen, device=self.device))
            probs_BV = probabilities(self.target.unembed(hidden_BD[rows])[:, None], sampling)[:, 0]
            position_B = torch.tensor([self.cache.lengths[slot] for slot in chosen], device=self.device)
            drawn = draw(probs_BV, sampling.uniform(position_B, Purpose.SAMPLE)).tolist()
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = [token]
        return tokens
