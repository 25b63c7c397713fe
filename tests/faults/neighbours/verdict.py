"""What may be, and a table of what was: attack by attack, the victim beside it and beside who behaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from tests.faults.neighbours.watch import Seen

# The gap of the victim: so many times what it is beside who behaves, and the longest step; never over so many seconds.
TIMES, LONGEST_GAP = 3.0, 1.0
LONGEST_HEALTH = 0.5
# Of memory at its peak, but for the cache, by the last attack of a kind.
MOST_GROWTH = 0.01
# Fewer gaps have no p99.
FEWEST_GAPS = 100


@dataclass(frozen=True)
class Result:
    """Of one attack, in seconds and bytes; `broken`: each bound that did not hold, in words."""

    attack: str
    about: str
    gap_p99_beside_well_behaved: float
    gap_p99: float
    gap_bound: float
    gap_longest: float
    first_token_longest_beside_well_behaved: float
    first_token_longest: float
    health_longest: float
    longest_step: float
    resident_bytes_before: dict[str, int]
    resident_bytes: dict[str, int]
    resident_bytes_peak: int
    resident_growth: float
    peaks_besides_cache: list[int]
    answers: dict[str, int]
    broken: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else float("inf")


def growth_of(times: Sequence[Seen]) -> float:
    """By how much the last attack raises the peak of memory over all before it.

    Memory is compared by its peaks: between them, how much of its freed memory a process keeps is chance.
    """
    before = max(each.peak_besides_cache for each in times[:-1])
    return times[-1].peak_besides_cache / before - 1 if before else float("inf")


def judge(
    attack: str,
    about: str,
    usual: Seen,
    times: Sequence[Seen],
    resident: Sequence[dict[str, int]] = ({}, {}),
    lost: Sequence[str] = (),
    answers: dict[str, int] | None = None,
) -> Result:
    """`usual`: beside as many well-behaved clients. `times`: beside each attack. `resident`: after each."""
    seen, growth = sum(times[1:], times[0]), growth_of(times)
    bound = min(TIMES * p99(usual.gaps) + seen.longest_step, LONGEST_GAP)
    gap, health = p99(seen.gaps), max(seen.health, default=float("inf"))
    broken = [f"{failure}" for failure in dict.fromkeys(seen.failures)][:5]
    broken += [f"lost: {name}" for name in lost]
    if len(seen.gaps) < FEWEST_GAPS:
        broken.append(f"the victim got {len(seen.gaps)} pieces of text")
    if gap > bound:
        broken.append(f"gap of {gap:.2f} s over {bound:.2f} s")
    if health > LONGEST_HEALTH:
        broken.append(f"/health after {health:.2f} s")
    if growth > MOST_GROWTH:
        broken.append(f"memory grew by {growth:.1%}")
    return Result(
        attack=attack,
        about=about,
        gap_p99_beside_well_behaved=p99(usual.gaps),
        gap_p99=gap,
        gap_bound=bound,
        gap_longest=max(seen.gaps, default=float("inf")),
        first_token_longest_beside_well_behaved=max(usual.first_tokens, default=float("inf")),
        first_token_longest=max(seen.first_tokens, default=float("inf")),
        health_longest=health,
        longest_step=seen.longest_step,
        resident_bytes=resident[-1],
        resident_bytes_before=resident[0],
        resident_bytes_peak=seen.peak_bytes,
        resident_growth=growth,
        peaks_besides_cache=[each.peak_besides_cache for each in times],
        answers=answers or {},
        broken=broken,
    )


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="a victim beside its neighbours: milliseconds, MiB")
    shown.add_column("attack", no_wrap=True)
    for column in ("gap p99 beside well-behaved", "gap p99", "bound", "longest", "first token", "/health"):
        shown.add_column(column, justify="right")
    for column in ("longest step", "MiB at most", "last adds"):
        shown.add_column(column, justify="right")
    shown.add_column("broken")
    for result in results:
        seconds = [result.gap_p99_beside_well_behaved, result.gap_p99, result.gap_bound, result.gap_longest]
        seconds += [result.first_token_longest, result.health_longest, result.longest_step]
        memory = [f"{result.resident_bytes_peak / 2**20:,.0f}", f"{result.resident_growth:+.1%}"]
        broken = "\n".join(result.broken) or "nothing"
        shown.add_row(result.attack, *(f"{1000 * value:,.0f}" for value in seconds), *memory, broken)
    return shown
