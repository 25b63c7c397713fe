"""The gateway's counters and histograms, updated on one thread without locks. `api/exposition` exports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

from gateway.sequence import DEEPEST, Sequence
from spire.service.histogram import Histogram

_MILLISECONDS = (2, 4, 6, 8, 10, 15, 20, 25, 30, 40, 60, 80, 100, 200, 400, 600, 800, 1000, 2000, 4000, 8000)
INTER_TOKEN_BUCKETS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# The parts of a round's seconds. `draft_wait`: waiting for activations, or for the verifier if the target drafts for
# itself; `verify_queue`: waiting for the verifier's other work, mostly prefill; `wire`: the time between request and
# answer that neither service accounts for.
ROUND_PARTS = ("propose", "verify_forward", "verify_sample", "draft_wait", "verify_queue", "wire", "gateway")
FINISH_REASONS = ("stop", "length", "abort", "error")
FALLBACKS = ("draft_absent", "draft_timeout", "draft_lost", "draft_behind", "draft_error")
# Kinds of rounds for which a draft was available: drafted ones, and ones decoded plainly for comparison.
DECODINGS = ("speculative", "plain")


def parts_of_round(
    seconds: float, models: tuple[float, float, float], waited: float, queued: float, asked: float
) -> tuple[float, ...]:
    """Return the seconds that each part of a round took, in the order of ROUND_PARTS.

    `models`: seconds to propose, verify and sample, by the services' clocks; `waited`: the draft's wait (draft_wait);
    `queued`: the batch's wait at the verifier (verify_queue); `asked`: from request to answer. What models and waits
    leave of `asked` is `wire`; what `asked` leaves of `seconds` is `gateway`. A round sent before the previous answer
    overlaps the previous round: waits beyond `seconds` are omitted, but the time of the models is counted in full.
    """
    left = max(0.0, seconds - sum(models))
    waited = min(waited, left)
    queued = min(queued, left - waited)
    told = sum(models) + waited + queued
    asked = max(min(asked, seconds), told)
    return (*models, waited, queued, asked - told, max(0.0, seconds - asked))


@dataclass
class Metrics:
    """The gateway's counters and histograms. Every `now` is in seconds of the monotonic clock."""

    rounds: int = 0
    round_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROUND_PARTS, 0.0))
    round_duration: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    compared_rounds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DECODINGS, 0.0))
    compared_tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DECODINGS, 0.0))
    compared_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DECODINGS, 0.0))
    # rounds_at[k]: the number of rounds whose largest block had k draft tokens.
    rounds_at: list[int] = field(default_factory=lambda: [0] * (DEEPEST + 1))
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    # The number of blocks with draft tokens, and of draft tokens drafted and accepted.
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    # Accepted draft tokens that became output: those after the end of a text do not count.
    drafted_output: int = 0
    # Of blocks by position: those that had a draft token there, and those in which it was accepted. A block that
    # stopped before a position says nothing about it.
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    fallbacks: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FALLBACKS, 0.0))
    replays: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0.0))
    responses: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    request_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))

    def round(self, seconds: tuple[float, ...], sequences: int, k: int) -> None:
        """Count a round. `seconds`: one for each of ROUND_PARTS; `k`: the draft tokens of the largest block."""
        self.rounds += 1
        self.rounds_at.extend([0] * (k + 1 - len(self.rounds_at)))
        self.rounds_at[k] += 1
        for part, spent in zip(ROUND_PARTS, seconds, strict=True):
            self.round_seconds[part] += spent
        self.round_duration.observe(sum(seconds))
        self.batch_size.observe(sequences)

    def compared(self, decoding: str, tokens: int, seconds: float) -> None:
        """Count a round, with its output tokens and seconds, as `decoding`: speculative, or plain for comparison."""
        self.compared_rounds[decoding] += 1
        self.compared_tokens[decoding] += tokens
        self.compared_seconds[decoding] += seconds

    def drafted_block(self, drafted: int, accepted: int, kept: int) -> None:
        """Count a verified block of `drafted` draft tokens. `kept`: tokens that became output, the target's too."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_output += min(accepted, kept)
        for counts, tokens in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for position in range(tokens):
                counts[position] += 1

    def token_times(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Record the latency of `tokens` new tokens of a sequence: time to first token, or time per token."""
        self.generated_tokens += tokens
        if sequence.first_token_at:
            self.inter_token.observe((now - sequence.last_token_at) / tokens, tokens)
        else:
            sequence.first_token_at = now
            self.first_token.observe(now - sequence.arrived_at)
            self.prompt_tokens += len(sequence.prompt)
        sequence.last_token_at = now

    def sequence_finished(self, sequence: Sequence, now: float) -> None:
        self.finished[sequence.finish_reason or "error"] += 1
        self.request_time.observe(now - sequence.arrived_at)
        if (later := len(sequence.output) - 1) > 0:
            self.per_output_token.observe((sequence.last_token_at - sequence.first_token_at) / later)

    def expect_responses(self, paths: Iterable[str], statuses: Iterable[int]) -> None:
        """Create a counter at 0 per path and status: Prometheus' `rate` misses a response that creates its counter."""
        self.responses = Counter({(path, str(status)): 0 for path, status in product(paths, statuses)})

    def response(self, path: str, status: int) -> None:
        self.responses[path, str(status)] += 1
