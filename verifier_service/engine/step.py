"""The model work of a step: one forward, the sampling pipeline, the verification rule, the commit.

Verification and prefill both append positions to the cache, and share one forward if both have work.
Drafting (MagicDec) is a round of the same forward over a sparse copy of the cache, and commits nothing.

Shapes: B sequences, T new positions, N tapped layers, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Rows
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spire.decoding.drafting import Drafted, RoundInputs
from spire.decoding.sampling import SamplingRows, sample
from spire.decoding.verification import SparseDistribution, verify
from spire.errors import InvalidRequest
from spire.model.backends.reference import BlockBatch, Reference, finite_rows
from spire.model.cache.stretches import Stretches
from spire.model.cache.target_cache import TargetCache
from spire.model.self_speculation import SelfSpeculation, SparseAttention
from spire.model.target import Target, TargetOutput
from spire.rpc.sampling import ONE_OF_EACH
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import RaggedBatch
from verifier_service.sampling.logprobs import Scores
from verifier_service.sampling.pipeline import Pipeline
from verifier_service.sampling.synthetic import Verify

_WARMING_DEPTH = 2
# The number of positions in the dummy step that measures the step time at the start.
FIRST_POSITIONS = 2
# The number of positions whose logits are in memory at once while a prompt is scored.
_SCORED_AT_ONCE = 64


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of B prompts; `last` is True for the final chunk of a prompt.

    `following`: the prompt token after each of these tokens, if prompt logprobs are requested. `parts`: the numbers of
    consecutive rows, of similar length, that are padded and computed together.
    """

    slots: list[int]
    tokens: list[Tensor]
    last: list[bool]
    following: list[list[int]]
    parts: list[int]

    def rectangles(self) -> list[tuple[list[int], Tensor]]:
        """Return the slots and the padded tokens [B, T] of each part."""
        bounds = pairwise(accumulate(self.parts, initial=0))
        return [(self.slots[at:end], pad_sequence(self.tokens[at:end], batch_first=True)) for at, end in bounds]

    @property
    def counts(self) -> list[int]:
        return [len(chunk) for chunk in self.tokens]


@dataclass(frozen=True)
class Outcome:
    """The result of a forward, per row: True if its numbers are `finite`, the number of accepted draft tokens, the new
    tokens, the error if the row is `refused`, the logprobs of the new tokens, and the `scores` of prompt tokens.

    If verification and prefill shared a forward, its seconds are divided in proportion to their positions.
    """

    finite: list[bool]
    accepted: list[int]
    tokens: list[list[int]]
    refused: list[InvalidRequest | None]
    logprobs: list[pb.Logprobs | None]
    taps_BTND: Tensor | None
    forward_seconds: float
    sample_seconds: float
    scores: Rows[Scores | None] = ()

    def sound(self, row: int) -> bool:
        """True if the sequence of this row can continue: its numbers are finite and it is not refused."""
        return self.finite[row] and not self.refused[row]

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.sample_seconds


class ModelSteps:
    """Runs the steps of the target and its cache. Called by one thread only, in inference mode.

    `sparse`: the positions that the target attends to when it drafts. `top_m`: the number of tokens in the target's q,
    0 for all.
    """

    def __init__(
        self,
        target: Target,
        cache: TargetCache,
        pipeline: Pipeline,
        sparse: SparseAttention,
        top_m: int,
        backend: Reference,
    ):
        self.target, self.cache, self.pipeline, self.backend = target, cache, pipeline, backend
        self.device = cache.device
        self.tapped_layers: tuple[int, ...] = ()
        # The verification rule: decides which draft tokens are accepted.
        self.rule: Verify = verify
        self._self_speculation = SelfSpeculation(target, cache, sparse, backend)
        self._top_m = top_m if 0 < top_m < target.config.vocab_size else None

    def warm_up(self) -> None:
        """Prefill, verify and free dummy sequences, so that no request has to wait for the slow first step on a GPU."""
        samplings = ONE_OF_EACH[: self.cache.free_slots]
        slots = [self.cache.allocate() for _ in samplings]
        prompt, k = [0] * _WARMING_DEPTH, _WARMING_DEPTH
        for slot, sampling in zip(slots, samplings, strict=True):
            self.pipeline.assign(slot, pb.Start(tokens=prompt, sampling=sampling), None)
        with torch.inference_mode():
            for chosen in (slots[:1], slots):
                some = len(chosen)
                prompts = [torch.tensor(prompt)] * some
                self.cache.rewind(chosen, [0] * some)
                self.run(None, PromptChunk(chosen, prompts, [True] * some, [[] for _ in chosen], [some]))
                probs_BKV = torch.ones(some, k, self.target.config.vocab_size, device=self.device)
                tokens_BT = torch.zeros(some, k + 1, dtype=torch.int64, device=self.device)
                numbers = torch.tensor([[k] * some, [len(prompt)] * some, [0] * some], device=self.device)
                counts_B, base_B, widths_B = numbers
                blocks = RaggedBatch(chosen, [k] * some, tokens_BT, counts_B, base_B, None, widths_B, [some])
                for q in (None, SparseDistribution(None, probs_BKV.bfloat16())):
                    self.cache.rewind(chosen, [len(prompt)] * some)
                    self.run(replace(blocks, q=q), None)
        for slot in slots:
            self.pipeline.release(slot)
            self.cache.free(slot)

    def take_first(self) -> None:
        """Prefill a short dummy prompt, then free its slot."""
        slot = self.cache.allocate()
        prompt = [0] * FIRST_POSITIONS
        self.pipeline.assign(slot, pb.Start(tokens=prompt, sampling=ONE_OF_EACH[0]), None)
        with torch.inference_mode():
            self.run(None, PromptChunk([slot], [torch.tensor(prompt)], [True], [[]], [1]))
        self.pipeline.release(slot)
        self.cache.free(slot)

    def draft(
        self, slots: Rows[int], newest: Rows[int], k: int, rows: SamplingRows, passing: Callable[[], object]
    ) -> Drafted:
        """Draft k tokens after the newest token of each slot with the target, without writing to its cache.

        Calls `passing` before each of the k passes, which take as long as a plain step each.
        """
        base_B = torch.tensor([self.cache.lengths[slot] for slot in slots], device=self.device)
        newest_B = torch.tensor(newest, device=self.device)
        inputs = RoundInputs(newest_B, base_B, k, rows, self._top_m)
        return self.backend.draft(self._self_speculation.round(slots, passing), inputs, lambda _: None)

    def run(self, batch: RaggedBatch | None, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        """Run one forward over blocks to verify and a chunk of prompts; return the outcome of each, None if absent."""
        began = time.perf_counter()
        blocks, prompts = batch.rectangles() if batch else [], chunk.rectangles() if chunk else []
        outputs = self._append(blocks, prompts)
        forward = time.perf_counter() - began
        of_blocks, of_prompts = outputs[: len(blocks)], outputs[len(blocks) :]
        of_batch, of_chunk = (sum(tokens_BT.numel() for _, tokens_BT in some) for some in (blocks, prompts))
        each = forward / (of_batch + of_chunk)
        verified = self._conclude(batch, _joined(of_blocks), each * of_batch) if batch else None
        return verified, self._prefilled(chunk, _joined(of_prompts), each * of_chunk) if chunk else None

    def _append(
        self, blocks: list[tuple[list[int], Tensor]], prompts: list[tuple[list[int], Tensor]]
    ) -> list[TargetOutput]:
        """Run one forward over the slots and tokens [B, T] of all blocks and prompts; return the output of each."""
        stretches = [(slots, tokens_BT.to(self.device)) for slots, tokens_BT in [*blocks, *prompts]]
        views = [
            self.cache.view(slots, tokens_BT.shape[1], decoding=at < len(blocks))
            for at, (slots, tokens_BT) in enumerate(stretches)
        ]
        if len(views) == 1:
            return [self.backend.forward(self.target, stretches[0][1], views[0], self.tapped_layers)]
        together = Stretches(views)
        tokens_1R = torch.cat([tokens_BT.flatten() for _, tokens_BT in stretches])[None]
        hidden, taps = self.backend.forward(self.target, tokens_1R, together, self.tapped_layers)
        split_taps = [None] * len(views) if taps is None else together.split(taps)
        return [TargetOutput(*output) for output in zip(together.split(hidden), split_taps, strict=True)]

    def _conclude(self, batch: RaggedBatch, output: TargetOutput, forward_seconds: float) -> Outcome:
        """Apply the verification rule by row. Commits each block's keys and values up to the last accepted token."""
        began = time.perf_counter()
        rows, drawn_from = self.pipeline.of(batch.slots), None
        blocks = BlockBatch(batch.draft_BK, batch.counts_B, batch.q, rows, batch.base_B)
        if self.pipeline.leaves_alone(batch.slots):
            verdict, finite_B, unembed_seconds = self.backend.verdict(self.target, output.hidden_BTD, blocks, self.rule)
        else:
            logits_BTV = self.target.unembed(output.hidden_BTD)
            unembed_seconds = time.perf_counter() - began
            finite_B = finite_rows(logits_BTV, batch.counts_B)
            drawn_from = self.pipeline.distributions(
                batch.slots, rows, logits_BTV, batch.draft_BK, batch.counts, batch.base_B
            )
            verdict = self.rule(drawn_from.p_BTV, *blocks)
        # One copy, because each waits for a GPU.
        found_BX = torch.column_stack((finite_B, verdict.accepted_B, verdict.tokens_BT)).tolist()
        finite, accepted = [bool(row[0]) for row in found_BX], [row[1] for row in found_BX]
        tokens = [row[2 : 3 + row[1]] for row in found_BX]
        refused: list[InvalidRequest | None] = [None] * len(tokens)
        logprobs: list[pb.Logprobs | None] = [None] * len(tokens)
        if drawn_from:
            refused = drawn_from.refusals(verdict.accepted_B)
            logprobs = self.pipeline.logprobs(batch.slots, rows, drawn_from, tokens)
        sound = [row and not refusal for row, refusal in zip(finite, refused, strict=True)]
        self._commit(batch.slots, [a + 1 for a in accepted], sound)
        self.pipeline.advance(batch.slots, [t if good else [] for t, good in zip(tokens, sound, strict=True)])
        seconds = time.perf_counter() - began - unembed_seconds
        forward_seconds += unembed_seconds
        return Outcome(finite, accepted, tokens, refused, logprobs, output.taps_BTND, forward_seconds, seconds)

    def _prefilled(self, chunk: PromptChunk, output: TargetOutput, forward_seconds: float) -> Outcome:
        """Commit the chunk of each prompt; draw the first token of each prompt that is now complete."""
        began = time.perf_counter()
        counts = chunk.counts
        at_B = torch.tensor(counts, device=self.device) - 1
        hidden_BD = output.hidden_BTD[torch.arange(len(counts), device=self.device), at_B]
        finite = hidden_BD.sum(dim=-1).isfinite().tolist()
        self._commit(chunk.slots, counts, finite)
        scores = [self._score(*row) for row in zip(chunk.slots, output.hidden_BTD, chunk.following, strict=True)]
        first, taps_BTND = self._first_tokens(chunk, hidden_BD, finite), output.taps_BTND
        seconds = time.perf_counter() - began
        return Outcome(finite, [0] * len(counts), *first, taps_BTND, forward_seconds, seconds, scores)

    def _score(self, slot: int, hidden_TD: Tensor, following: Rows[int]) -> Scores | None:
        """Return the logprobs of the prompt tokens `following` these positions; None if there are no such tokens."""
        parts = []
        for at in range(0, len(following), _SCORED_AT_ONCE):
            tokens = following[at : at + _SCORED_AT_ONCE]
            logits_TV = self.target.unembed(hidden_TD[at : at + len(tokens)])
            parts.append(self.pipeline.score(slot, logits_TV, tokens))
        return Scores.join(parts) if parts else None

    def _commit(self, slots: Rows[int], counts: Rows[int], sound: Rows[bool]) -> None:
        self.cache.commit(slots, [count if good else 0 for count, good in zip(counts, sound, strict=True)])

    def _first_tokens(
        self, chunk: PromptChunk, hidden_BD: Tensor, finite: Rows[bool]
    ) -> tuple[list[list[int]], list[InvalidRequest | None], list[pb.Logprobs | None]]:
        """Draw the first token of each complete prompt. Return for each row its tokens, any error, and logprobs."""
        tokens: list[list[int]] = [[] for _ in chunk.slots]
        refused: list[InvalidRequest | None] = [None] * len(tokens)
        logprobs: list[pb.Logprobs | None] = [None] * len(tokens)
        ending = [row for row, (last, sound) in enumerate(zip(chunk.last, finite, strict=True)) if last and sound]
        if not ending:
            return tokens, refused, logprobs
        slots = [chunk.slots[row] for row in ending]
        rows, none_BK = self.pipeline.of(slots), torch.empty(len(slots), 0, dtype=torch.int64, device=self.device)
        position_B = torch.tensor([self.cache.lengths[slot] for slot in slots], device=self.device)
        logits_B1V = self.target.unembed(hidden_BD[ending])[:, None]
        base_B = position_B - 1
        drawn_from = self.pipeline.distributions(slots, rows, logits_B1V, none_BK, [0] * len(slots), base_B)
        drawn = sample(drawn_from.p_BTV[:, 0], rows, base_B).tolist()
        refusals = drawn_from.refusals(torch.zeros_like(position_B))
        found = self.pipeline.logprobs(slots, rows, drawn_from, [[token] for token in drawn])
        self.pipeline.advance(slots, [[] if no else [token] for token, no in zip(drawn, refusals, strict=True)])
        for row, token, refusal, of_token in zip(ending, drawn, refusals, found, strict=True):
            tokens[row], refused[row], logprobs[row] = [token], refusal, of_token
        return tokens, refused, logprobs


def _joined(parts: list[TargetOutput]) -> TargetOutput:
    """Join the outputs of all parts, with each row padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    hidden = pad_sequence([row for part in parts for row in part.hidden_BTD], batch_first=True)
    taps = [row for part in parts if part.taps_BTND is not None for row in part.taps_BTND]
    return TargetOutput(hidden, pad_sequence(taps, batch_first=True) if taps else None)
