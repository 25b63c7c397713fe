"""A cell of the benchmark: several runs of one load on one system at one depth, with plain runs to compare with.

All runs of a turn decode the same prompts from the same seeds. Prompts differ far more than depths do, so two depths
are compared turn by turn: their ratio is the geometric mean of the turns' ratios.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spire.bench.throughput import Figures, medians

SPIRE = "spire"
AUTO: Literal["auto"] = "auto"
Depth = int | Literal["auto"]
# Tokens per second of each turn; None where a run has none.
Rates = Sequence[float | None]

# An interval needs as many turns, and resamples them so often.
_TURNS, _RESAMPLED = 5, 2000


@dataclass(frozen=True)
class Cell:
    """Runs of one system at one depth and load. `system` is "spire", another server's name or a URL. `k` 0 is plain
    decoding; `k` None leaves the depth to the server.

    For a trace, `batch` and `context` are None and `trace` is its name. `plain` holds the k = 0 runs that alternated
    with `runs` or, for a system other than Spire, Spire's k = 0 runs of the same benchmark. `modelled` holds the
    performance model's figures. `synthetic` is True if text and acceptance are artificial.
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
        """Decode tokens per second of each run; empty if any run has none."""
        rates = [run.decode_tokens_per_second for run in self.runs]
        return [rate for rate in rates if rate is not None] if None not in rates else []

    def _relative(self, figure: str) -> float | None:
        """Return the ratio of a figure of this cell to the same figure of the plain runs; None if either is missing."""
        ours, plain = (getattr(medians(runs), figure) if runs else None for runs in (self.runs, self.plain))
        return ours / plain if ours and plain else None

    @property
    def multiplier_measured(self) -> float | None:
        """Decode tokens per second relative to those of plain decoding in the same turns."""
        return ratio(*self._decode_rates)

    @property
    def multiplier_ci95(self) -> tuple[float, float] | None:
        """The 95 % interval of `multiplier_measured`, by resampling turns."""
        return ratio_ci95(*self._decode_rates)

    @property
    def _decode_rates(self) -> tuple[Rates, Rates]:
        ours, plain = ([run.decode_tokens_per_second for run in runs or ()] for runs in (self.runs, self.plain))
        return ours, plain

    @property
    def multiplier_end_to_end(self) -> float | None:
        """End-to-end tokens per second, prefill included, relative to those of plain decoding."""
        return self._relative("end_to_end_tokens_per_second")

    @property
    def delta_t(self) -> float | None:
        """Δt: the time of a round relative to that of a plain step, both as seen by the clients."""
        return self._relative("round_ms_seen")

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name, in milliseconds, bytes and tokens per second."""
        figures = self.figures
        what = ("system", "draft", "k", "batch", "context", "trace", "synthetic")
        derived = ("round_total_ms", "split_covers", "split_adds_up", "overhead")
        return {
            **{name: getattr(self, name) for name in what},
            **asdict(figures),
            "runs": len(self.runs),
            "decode_tokens_per_second_runs": self.decode_runs,
            "end_to_end_tokens_per_second_runs": [run.end_to_end_tokens_per_second for run in self.runs],
            "delta_t_measured": self.delta_t,
            "delta_t_modelled": None,
            "multiplier_measured": self.multiplier_measured,
            "multiplier_ci95": self.multiplier_ci95,
            "multiplier_end_to_end": self.multiplier_end_to_end,
            "multiplier_modelled": None,
            **self.modelled,
            **{name: getattr(figures, name) for name in derived},
            "note": self.note,
        }


@dataclass(frozen=True)
class ChosenDepth:
    """A depth that the gateway chose, beside the best fixed depth, 0 included, of the same load.

    `ratio`: decode tokens per second of the chosen one relative to the fixed one's. `ci95`: its 95 % interval.
    """

    draft: str
    batch: int
    context: int
    best_k: int
    ratio: float
    ci95: tuple[float, float] | None


def chosen_depths(cells: Sequence[Cell]) -> list[ChosenDepth]:
    """Compare each cell at automatic depth with the best fixed depth of its load, if any above 0 was measured."""
    found = []
    for auto in cells:
        if auto.k != AUTO or auto.draft is None or auto.batch is None or auto.context is None or not auto.decode_runs:
            continue
        of_load = (auto.draft, auto.batch, auto.context)
        same = [cell for cell in cells if (cell.draft, cell.batch, cell.context) == of_load and cell.decode_runs]
        fixed = {cell.k: cell.decode_runs for cell in same if isinstance(cell.k, int)}
        if not any(fixed):
            continue
        best = max(fixed, key=lambda k: statistics.geometric_mean(fixed[k]))
        if (of_best := ratio(auto.decode_runs, fixed[best])) is not None:
            found.append(ChosenDepth(*of_load, best, of_best, ratio_ci95(auto.decode_runs, fixed[best])))
    return found


def ratio(ours: Rates, plain: Rates) -> float | None:
    """Return the geometric mean of the turns' ratios; None if a turn has no rate, or turns are missing."""
    if not ours or len(ours) != len(plain) or not all([*ours, *plain]):
        return None
    return statistics.geometric_mean([our / its for our, its in zip(ours, plain, strict=True) if our and its])


def ratio_ci95(ours: Rates, plain: Rates) -> tuple[float, float] | None:
    """Return the 95 % interval of `ratio`, by resampling turns; None for fewer than _TURNS turns."""
    turns = [our / its for our, its in zip(ours, plain, strict=False) if our and its]
    if len(turns) < _TURNS or len(ours) != len(plain):
        return None
    rng = random.Random(0)
    found = sorted(statistics.geometric_mean(rng.choices(turns, k=len(turns))) for _ in range(_RESAMPLED))
    return found[_RESAMPLED // 40], found[-_RESAMPLED // 40 - 1]
