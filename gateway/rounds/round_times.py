"""Estimates Δt(depth, load), the seconds of a round at every depth and under every load, from measured rounds.

The depth of a round is the mean number of draft tokens of its blocks: where drafts stop early, it is no whole number.
Between two whole depths the log seconds are taken to be linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Cap on the growth of the noise variance that a single round may suggest, as a multiple of that variance.
_MOST_NOISE = 3.0


def _expected_shape(k: int) -> float:
    return math.log(1 + 0.2 * (k > 0) + 0.12 * k)


def _shape_covariance(j: int, k: int) -> float:
    """Return the prior covariance of the log times of rounds at depths j and k around their expected shape."""
    u, v = math.log1p(j), math.log1p(k)
    step, growth, bends = 0.2**2 * (j > 0) * (k > 0), 0.3**2 * u * v, 0.1**2 * min(u, v)
    return step + growth + bends + 0.01**2 * (j == k)


# Last indices of a state, after the depths: the level, and the powers of sequences and context by which it grows.
_LEVEL, _SEQUENCES, _CONTEXT = -3, -2, -1


@dataclass(frozen=True, slots=True)
class Load:
    """The number of sequences of a round, and `context`, the mean number of their committed positions.

    `prefilling`: other sequences are starting, so prompts may be prefilled during the round. `automatic`: at least one
    sequence leaves k to the gateway.
    """

    sequences: int
    context: float
    prefilling: bool = False
    automatic: bool = True

    @property
    def cell(self) -> tuple[int, int, bool]:
        """The bucket that this load belongs to: loads in the same bucket share their estimates of round times."""
        # Sequences within a factor of √2 either way; contexts, which count less and grow with every text, within 4.
        return round(math.log2(self.sequences)), int(math.log2(max(1.0, self.context)) / 2), self.prefilling

    def apart(self, other: Load) -> tuple[float, float]:
        """Return the log ratios of this load's number of sequences, and of its context, to the other load's."""
        return math.log(self.sequences / other.sequences), math.log((1 + self.context) / (1 + other.context))


class RoundTimes:
    """The log seconds of a round at every depth as one Gaussian: a Kalman filter over depths.

    The level, a term common to all depths, may change from round to round; the ratios between depths hardly do. So one
    measured round updates the estimates of all depths, and rounds close in time reveal most about the depths' ratios.
    The level grows with powers of the number of sequences and of the context. The powers are learnt too, so that rounds
    at different depths can be compared although some sequences end between them.
    """

    _LEVEL_VARIANCE, _LEVEL_DRIFT, _SHAPE_DRIFT = 100.0, 0.02, 3e-5
    # Variance added to the log times of drafted rounds when drafting may have become slower or faster.
    _STEP_CHANGE = 2.0
    # Prior means and standard deviation of the powers, and the error of the power law over a factor of e.
    _POWERS, _POWER_DEVIATION, _CURVE = (0.6, 0.4), 0.3, 0.1
    # Share of outliers, rounds that take longer for unrelated reasons, and the variance of their log seconds.
    _OUTLIERS, _OUTLIER = 0.05, 1.0

    def __init__(self, deepest: int):
        self.depths = range(deepest + 1)
        # Log seconds of each depth relative to the level; the level at the load of the first round here; the powers.
        self.mean = [*map(_expected_shape, self.depths), 0.0, *self._POWERS]
        # Zeros for the level and the powers: `_unsettle` gives them their variances.
        depths = [[*(_shape_covariance(j, k) for k in self.depths), 0.0, 0.0, 0.0] for j in self.depths]
        self._prior = [*depths, *([0.0] * len(self.mean) for _ in range(3))]
        self.covariance = [list(row) for row in self._prior]
        self._unsettle([self._POWER_DEVIATION**2] * 2)
        # Variance of the log seconds of one round.
        self.noise = 0.1**2
        self.first: Load | None = None
        self.last: Load | None = None
        # Variance added to the level in case the last outlier was a change of the level.
        self._jump = 0.0
        self.rounds, self._check_at = 0, 8
        # The part of `rounds` that was measured here rather than copied from a neighbour.
        self.own = 0
        # Whether to probe drafting at any cost, because drafting has become faster under another load.
        self.look_again = False

    def worth(self, distance: float) -> int:
        """Return how many measured rounds these estimates replace in a cell (bucket of loads) `distance` cells away."""
        return int(self.rounds / (2 + 2 * distance))

    def of_neighbour(self, other: RoundTimes, distance: float) -> None:
        """Copy the estimates of another cell (bucket of loads), `distance` cells away, with larger variances."""
        self.mean, self.noise = list(other.mean), other.noise
        self.rounds = other.worth(distance)
        self._check_at = max(self._check_at, 2 * self.rounds)
        for row, known, prior in zip(self.covariance, other.covariance, self._prior, strict=True):
            row[:] = [c + 0.15 * distance * p for c, p in zip(known, prior, strict=True)]
        self._unsettle([other.covariance[at][at] + self._CURVE**2 for at in (_SEQUENCES, _CONTEXT)])

    def _unsettle(self, powers: list[float]) -> None:
        """Reset the variances of the level, to unknown, and of the powers, to `powers`, and zero their covariances."""
        for at, variance in zip((_LEVEL, _SEQUENCES, _CONTEXT), (self._LEVEL_VARIANCE, *powers), strict=True):
            for row in self.covariance:
                row[at] = 0.0
            self.covariance[at] = [0.0] * len(self.mean)
            self.covariance[at][at] = variance

    def at(self, load: Load) -> list[float]:
        """Return the expected log seconds of a round at every depth under this load."""
        grown = self._grown(load)
        return [_total(self.mean, k, grown) for k in self.depths]

    def observe(self, load: Load, depth: float, seconds: float) -> None:
        """Update the estimates with one measured round."""
        self.rounds += 1
        self.own += 1
        self.first = self.first or load
        self.covariance[_LEVEL][_LEVEL] += self._level_drift(load)
        drift, grown = self._SHAPE_DRIFT, self._grown(load)
        column = [
            _total(row, depth, grown) + drift * at_depth(prior, depth)
            for row, prior in zip(self.covariance, self._prior, strict=True)
        ]
        residual = math.log(max(seconds, 1e-9)) - _total(self.mean, depth, grown)
        known = _total(column, depth, grown)
        usual, unusual = known + self.noise, known + self._OUTLIER
        odds = _density(residual, unusual) * self._OUTLIERS, _density(residual, usual) * (1 - self._OUTLIERS)
        # An outlier is never several times faster than expected.
        outlier = odds[0] / (sum(odds) or 1.0) if residual > -self._OUTLIER else 0.0
        # The moments of a mixture of two Gaussians: outlier and usual round, weighted by their odds.
        gain = (1 - outlier) / usual + outlier / unusual
        apart = outlier * (1 - outlier) * ((1 / usual - 1 / unusual) * residual) ** 2
        self.mean = [mean + first * gain * residual for mean, first in zip(self.mean, column, strict=True)]
        for row, prior, first in zip(self.covariance, self._prior, column, strict=True):
            less = (gain - apart) * first
            row[:] = [c + drift * p - less * other for c, p, other in zip(row, prior, column, strict=True)]
        self._jump = 0.1 * outlier * residual**2
        surprise = (1 - outlier) * (self.noise / usual) ** 2 * (residual**2 - usual)
        noise = self.noise + 0.02 * min(surprise, _MOST_NOISE * self.noise)
        self.noise = min(0.5**2, max(0.01**2, noise))

    def doubt(self) -> None:
        """Raise the variance of all drafted depths: the speed of drafting may have changed. Call before `observe`."""
        for row in self.covariance[1 : len(self.depths)]:
            row[1 : len(self.depths)] = [c + self._STEP_CHANGE for c in row[1 : len(self.depths)]]

    @property
    def check_due(self) -> bool:
        """True if a routine probe of drafted or of plain rounds is due: a single earlier probe may have misled."""
        return self.rounds >= self._check_at

    def checked(self, within: float) -> None:
        """Record a routine probe. The next is due when the rounds have doubled, or `within` rounds later if sooner."""
        self._check_at = self.rounds + math.ceil(min(self.rounds, within))

    def _grown(self, load: Load) -> tuple[float, float]:
        """Return the log ratios of a load's number of sequences, and of its context, to those of the first load."""
        return load.apart(self.first) if self.first else (0.0, 0.0)

    def _level_drift(self, load: Load) -> float:
        """Return the variance of the level's change between the previous load and this one, and remember this load."""
        sequences, context = load.apart(self.last) if self.last else (0.0, 0.0)
        self.last = load
        return self._LEVEL_DRIFT**2 + self._jump + self._CURVE**2 * (sequences**2 + context**2)

    def log_ratio(self, depth: float, other: float) -> float:
        """Return the estimated log(time at depth / time at other)."""
        return at_depth(self.mean, depth) - at_depth(self.mean, other)

    def deviation(self, depth: float, other: float) -> float:
        """Return the standard deviation of `log_ratio`."""
        variance = self._variance(depth, depth) + self._variance(other, other) - 2 * self._variance(depth, other)
        return math.sqrt(max(0.0, variance))

    def _variance(self, depth: float, other: float) -> float:
        below = int(depth)
        rows = self.covariance[below : below + 2]
        return at_depth([at_depth(row, other) for row in rows], depth - below)

    def shows(self, depth: float, other: float, looks: Sequence[int]) -> list[float]:
        """Return how far so many rounds at `depth` would move `log_ratio`, as variances."""
        level = self.covariance[_LEVEL]
        own, of_level = self._variance(depth, depth), at_depth(level, depth)
        known = own + 2 * of_level + level[_LEVEL]  # variance at this depth under the first load here
        moved = own + of_level - self._variance(depth, other) - at_depth(level, other)
        return [moved**2 / (known + self.noise / count) for count in looks]


def at_depth(values: Sequence[float], depth: float) -> float:
    """Return the value at a depth, given those at 0, 1, …"""
    below = int(depth)
    share = depth - below
    return values[below] + share * (values[below + 1] - values[below]) if share else values[below]


def _total(state: list[float], depth: float, grown: tuple[float, float]) -> float:
    """Return the log seconds at a depth by a state (or a row of its covariance), at a load that differs by `grown`."""
    return at_depth(state, depth) + state[_LEVEL] + grown[0] * state[_SEQUENCES] + grown[1] * state[_CONTEXT]


def _density(residual: float, variance: float) -> float:
    return math.exp(-(residual**2) / variance / 2) / math.sqrt(variance)
