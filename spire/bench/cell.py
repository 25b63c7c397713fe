"""A cell of the benchmark: one load on one system at one depth, measured several times, with what it is compared to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spire.bench.throughput import Figures, medians

SPIRE = "spire"
AUTO: Literal["auto"] = "auto"
Depth = int | Literal["auto"]


@dataclass(frozen=True)
class Cell:
    """`system` is "spire", a peer's name or a URL. `k` 0 is plain decoding; None where nobody was told a depth.

    `batch` and `context` are None of a trace's requests, whose file is `trace`. `plain` holds the runs of our own k = 0
    that alternated with these or, for another system, were measured in the same run; `modelled` is what the performance
    model says. `synthetic`: text and acceptance are made up.
    """

    system: str
    draft: str | None
    k: Depth | None
    batch: int | None
    context: int | None
    runs: list[Figures]
    plain: list[Figures] | None = None
    modelled: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    note: str | None = None
    synthetic: bool = False

    @property
    def figures(self) -> Figures:
        return medians(self.runs)

    @property
    def decode_runs(self) -> list[float]:
        """Decode tokens per second of each run; empty where they could not be seen."""
        rates = [run.decode_tokens_per_second for run in self.runs]
        return [rate for rate in rates if rate is not None] if None not in rates else []

    @property
    def multiplier_measured(self) -> float | None:
        """Decode tokens per second over those of k = 0 in the same run."""
        rate = self.figures.decode_tokens_per_second
        plain = medians(self.plain).decode_tokens_per_second if self.plain else None
        return rate / plain if rate and plain else None

    @property
    def multiplier_end_to_end(self) -> float | None:
        """The same with prefill."""
        if not self.plain:
            return None
        return self.figures.end_to_end_tokens_per_second / medians(self.plain).end_to_end_tokens_per_second

    @property
    def delta_t(self) -> float | None:
        """Δt: a round's time over that of a plain step of the same run, both as the clients see them."""
        plain = medians(self.plain).round_ms_seen if self.plain else None
        seen = self.figures.round_ms_seen
        return seen / plain if seen and plain else None

    @property
    def multiplier_modelled(self) -> float | None:
        modelled: float | None = self.modelled.get("multiplier_modelled")
        return modelled

    def to_json(self) -> dict[str, Any]:
        """Every figure by its name, in milliseconds, bytes and tokens per second."""
        figures = self.figures
        named = {
            name: getattr(self, name) for name in ("system", "draft", "k", "batch", "context", "trace", "synthetic")
        }
        return {
            **named,
            **asdict(figures),
            "runs": len(self.runs),
            "decode_tokens_per_second_runs": self.decode_runs,
            "end_to_end_tokens_per_second_runs": [run.end_to_end_tokens_per_second for run in self.runs],
            "delta_t_measured": self.delta_t,
            "delta_t_modelled": None,
            "multiplier_measured": self.multiplier_measured,
            "multiplier_end_to_end": self.multiplier_end_to_end,
            "multiplier_modelled": self.multiplier_modelled,
            **{name: value for name, value in self.modelled.items() if name != "multiplier_modelled"},
            "round_total_ms": figures.round_total_ms,
            "split_covers": figures.split_covers,
            "split_adds_up": figures.split_adds_up,
            "overhead": figures.overhead,
            "note": self.note,
        }
