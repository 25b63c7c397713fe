"""Tokens per second through REST, and the split of a round.

*Decode* tokens per second is the sum over requests of 1 / their mean inter-token time: what the clients see while they
decode. *End to end* counts prefill too. The split comes from the gateway's own counters, over the same interval.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from spire.bench.client import BenchError, Client, Completed, Request

ROUND_SECONDS = "spire_round_seconds_total"
ROUNDS = "spire_rounds_total"
# The two model steps, forward and sampling. Everything else in a round is overhead, except the wait for another
# sequence's prefill, which is not the round's own and is left out of both sides.
MODEL_PARTS = {"propose", "verify_forward", "verify_sample"}
OTHERS_PREFILL = "verify_queue"


@dataclass(frozen=True)
class Cell:
    """One measured cell. `round_ms` is the mean round by part; `overhead` the share of it outside the models."""

    k: int
    concurrency: int
    context: int
    generated: int
    decode_tokens_per_second: float
    end_to_end_tokens_per_second: float
    time_to_first_token_ms: float
    tau: float
    round_ms: dict[str, float]
    overhead: float
    draft_state_bytes_per_sequence: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def measure(client: Client, request: Request, prompts: list[list[int]], context: int) -> Cell:
    """Run all prompts at the client's concurrency and take the figures of the interval."""
    before = await client.counters()
    began = time.monotonic()
    completions = await client.complete_all(request, prompts)
    seconds = time.monotonic() - began
    after = await client.counters()
    round_ms = _round_ms(before, after)
    return Cell(
        k=request.k,
        concurrency=client.concurrency,
        context=context,
        generated=sum(c.tokens for c in completions),
        decode_tokens_per_second=_decode_rate(completions, client.concurrency),
        end_to_end_tokens_per_second=sum(c.tokens for c in completions) / seconds,
        time_to_first_token_ms=_mean([c.metrics["time_to_first_token_ms"] for c in completions]),
        tau=_tau(completions),
        round_ms=round_ms,
        overhead=_overhead(round_ms),
        draft_state_bytes_per_sequence=int(after.get("spire_draft_state_bytes_per_sequence", 0)),
    )


def _overhead(round_ms: dict[str, float]) -> float:
    own = sum(ms for part, ms in round_ms.items() if part != OTHERS_PREFILL)
    return 1 - sum(ms for part, ms in round_ms.items() if part in MODEL_PARTS) / own


def _decode_rate(completions: list[Completed], concurrency: int) -> float:
    rates = [1000 / c.metrics["mean_itl_ms"] for c in completions]
    return _mean(rates) * min(concurrency, len(completions))


def _tau(completions: list[Completed]) -> float:
    rounds = sum(c.metrics["speculative_decoding"]["num_spec_steps"] for c in completions)
    return (sum(c.tokens for c in completions) - len(completions)) / rounds if rounds else 1.0


def _round_ms(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    rounds = after[ROUNDS] - before.get(ROUNDS, 0)
    if not rounds:
        raise BenchError("no round was run: is another gateway answering?")
    parts = {name: value for name, value in after.items() if name.startswith(ROUND_SECONDS + "{")}
    return {
        name.split("part=")[1].rstrip("}"): (value - before.get(name, 0)) / rounds * 1000
        for name, value in parts.items()
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
