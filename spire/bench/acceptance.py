"""τ through the services: mean tokens per round of speculation, with its 95 % interval.

τ = accepted + 1, averaged over rounds with room for k draft tokens. The last rounds of a request draft less because
less is left to generate; this is known before the round, so excluding these rounds adds no bias. Rounds without a
draft reply are included. The interval treats contexts as independent, and rounds of one context as dependent.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from spire.bench.client import Completed, Request
from spire.errors import DataError

# File in a draft's directory.
RECORD = "acceptance.json"


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Acceptance over `rounds` rounds. `prefix_acceptance[i]`: share of rounds whose first i + 1 tokens were accepted.

    `tokens_per_second` is end to end, prefill included, at the concurrency of the measurement.
    """

    contexts: int
    context: int
    k: int
    temperature: float
    generated: int
    rounds: int
    short_rounds: int
    tau: float
    tau_ci95: float
    prefix_acceptance: list[float]
    rule: str = "rejection"
    tokens_per_second: float | None = None


def read_record(file: Path) -> list[MeasuredAcceptance]:
    """Read a file with the output of `spire eval acceptance --json`. Raises DataError for any other content."""
    try:
        cells = json.loads(file.read_text())["acceptance"]
        known = {field.name for field in fields(MeasuredAcceptance)}
        found = [MeasuredAcceptance(**{name: value for name, value in cell.items() if name in known}) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not what 'spire eval acceptance --json' prints: {error!r}") from error
    if not found:
        raise DataError(f"{file} holds no measurement")
    return found


def acceptance(completions: list[Completed], context: int, request: Request) -> MeasuredAcceptance:
    """Compute τ and acceptance from the completions of `request` for prompts of `context` tokens."""
    k = request.k or 0
    told = [c.metrics["speculative_decoding"] for c in completions]
    histograms = [(each["full_depth_histogram"] + [0] * (k + 1))[: k + 1] for each in told]
    total = [sum(histogram[a] for histogram in histograms) for a in range(k + 1)]
    rounds, generated = sum(total), sum(c.tokens for c in completions)
    seconds = max(c.answered for c in completions) - min(c.sent for c in completions)
    tau, half_width = ratio_with_interval(
        [sum((a + 1) * count for a, count in enumerate(h)) for h in histograms], [sum(h) for h in histograms]
    )
    return MeasuredAcceptance(
        contexts=len(completions),
        context=context,
        k=k,
        temperature=request.temperature,
        generated=generated,
        rounds=rounds,
        short_rounds=sum(each["num_spec_steps"] for each in told) - rounds,
        tau=tau,
        tau_ci95=half_width,
        prefix_acceptance=[sum(total[a:]) / rounds for a in range(1, k + 1)],
        rule=request.rule,
        tokens_per_second=generated / seconds,
    )


def ratio_with_interval(numerators: list[float], denominators: list[int]) -> tuple[float, float]:
    """Return Σ numerators / Σ denominators and the half-width of its 95 % interval (delta method over the pairs)."""
    n, total = len(numerators), sum(denominators)
    if not total:
        return math.nan, math.nan
    ratio = sum(numerators) / total
    residuals = sum((a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return ratio, 1.96 * math.sqrt(residuals / max(n - 1, 1) * n) / total
