"""How deep to speculate: a controller that picks k for every round of a batch, down to 0, from what rounds have shown.

A round at depth k yields τ(k) tokens a sequence and takes Δt(k, load) seconds; the best k has the most tokens a second.
τ comes for free: a round at k shows what every smaller depth would have yielded. Δt of the depths that were not run
is inferred from those that were, with an uncertainty; where that could change the choice, a round is spent to find out,
within a budget of time. The first round after one of the other kind, drafted or plain, tells no time, because it also
has what the other leaves to be done, activations to send or to absorb: a look at the other kind takes two rounds.

A pure data structure: no I/O, clock, torch or async, and no randomness. The engine asks `choose` before a round and
tells `observe` what came of it.

What it does not know: requests. Rounds that mix depths teach no times; it decides for them as if their depths were one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The deepest that is chosen, as deep as our drafts propose: for few sequences it pays.
DEEPEST = 16
# The deepest in the first rounds of a load: what deep ones take there may be many times what it is for fewer sequences.
_AT_FIRST = 8
# Share of the time that may be spent on rounds at a depth that is not the best one known, and how much may be saved up.
PROBE_SHARE = 0.01
_MOST_CREDIT_ROUNDS = 4.0
# Where drafting loses, a look at it that takes so many times as long as was thought puts off the next one until a plain
# round has been saved up, because a single one may be an outlier; a second one in a row, until it is paid for itself.
_SURPRISE = 3.0
# By how many times itself the variance of a round may seem to grow by a single one.
_MOST_NOISE = 3.0
# Rounds after which a cell learns from its own alone.
_FEW = 8
# For how many rounds a finding is expected to be of use.
_HORIZON = 2000.0
# Of how many standard deviations a look is not thought to surprise.
_OUT_OF_REACH = 4.0
# One look often shows too little to be worth its price where several would be.
_LOOKS = (1, 8)


@dataclass(frozen=True, slots=True)
class Load:
    """What a round's time depends on besides k. `context` is the mean of committed positions.

    `prefilling`: prompts are being read between or within the same steps.
    """

    sequences: int
    context: float
    prefilling: bool = False

    @property
    def cell(self) -> tuple[int, int, bool]:
        """Loads of one cell share what is learnt: of numbers of sequences within a factor of √2 in either direction, of
        contexts, which count less and grow with every text, within a factor of 4."""
        return round(math.log2(self.sequences)), int(math.log2(max(1.0, self.context)) / 2), self.prefilling

    def apart(self, other: Load) -> tuple[float, float]:
        """By what factors two loads' sequences and contexts are apart, as logarithms."""
        return math.log(self.sequences / other.sequences), math.log((1 + self.context) / (1 + other.context))


# -- τ ---------------------------------------------------------------------------------------------------------------


class Acceptance:
    """The chance that the draft's token at each position is accepted when those before it were. It forgets slowly.

    Judged by blocks, a token's chance also depends on the tokens behind it. That is not told apart: seen from rounds of
    depth 8, τ of depth 4 is 1.5 % less than seen from its own.
    """

    # Blocks remembered, and rounds at least: workloads drift, large batches show much at once.
    _BLOCKS, _ROUNDS = 500.0, 20.0
    # A position that was seldom tried is taken to fare like the one before it.
    _FIRST, _WEIGHT = 0.75, 4.0

    def __init__(self, deepest: int):
        self.tried, self.accepted = [0.0] * deepest, [0.0] * deepest
        self.idle = 0

    def observe(self, blocks: Sequence[tuple[int, int]]) -> None:
        """(draft tokens, accepted ones) of a round's sequences."""
        if not blocks:
            self.idle += 1
            return
        keep = (1 - min(1 / self._ROUNDS, len(blocks) / self._BLOCKS)) ** (1 + min(self.idle, self._ROUNDS))
        self.idle = 0
        self.tried = [count * keep for count in self.tried]
        self.accepted = [count * keep for count in self.accepted]
        for drafted, accepted in blocks:
            for position in range(min(drafted, accepted + 1, len(self.tried))):
                self.tried[position] += 1
                self.accepted[position] += position < accepted

    def taus(self) -> list[float]:
        """τ at depth 0, 1, …: mean tokens of a round."""
        rate, prefix, taus = self._FIRST, 1.0, [1.0]
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            rate = (accepted + self._WEIGHT * rate) / (tried + self._WEIGHT)
            prefix *= rate
            taus.append(taus[-1] + prefix)
        return taus

    @property
    def doubt(self) -> float:
        """Relative variance of log τ: from few blocks, and from none lately."""
        return 0.2 / (self.tried[0] + 1) + 2e-4 * min(self.idle, 1000)


# -- Δt --------------------------------------------------------------------------------------------------------------

_Matrix = list[list[float]]


def _expected_shape(k: int) -> float:
    return math.log(1 + 0.2 * (k > 0) + 0.12 * k)


def _shape_covariance(j: int, k: int) -> float:
    """How the logarithms of two depths' times may differ from what is expected, before anything was measured."""
    u, v = math.log1p(j), math.log1p(k)
    step, growth, bends = 0.2**2 * (j > 0) * (k > 0), 0.3**2 * u * v, 0.1**2 * min(u, v)
    return step + growth + bends + 0.01**2 * (j == k)


# Behind the depths of a state: the level, and the powers of a load's sequences and context that it grows with.
_LEVEL, _SEQUENCES, _CONTEXT = -3, -2, -1


class RoundTimes:
    """Logarithms of a round's seconds at every depth, as one Gaussian: a Kalman filter over depths.

    What drives all depths alike (the level) may change from round to round; their ratios hardly do. So one measured
    round moves every depth's estimate, and rounds are compared the more the closer they are to one another. The level
    grows with powers of the sequences and of the context, which are learnt too: so texts can be compared that were
    decoded at different depths one after the other, although some ended before others in between.
    """

    _LEVEL_VARIANCE, _LEVEL_DRIFT, _SHAPE_DRIFT = 100.0, 0.02, 3e-5
    # What is expected of the powers, with their deviation, and how far one may be off, for a factor of e.
    _POWERS, _POWER_DEVIATION, _CURVE = (0.6, 0.4), 0.3, 0.1
    # Share of rounds that take longer for reasons of their own, and the variance of their logarithms.
    _OUTLIERS, _OUTLIER = 0.05, 1.0

    def __init__(self, deepest: int):
        self.depths = range(deepest + 1)
        # Each depth beside the level, the level at the load of the first round here, the powers.
        self.mean = [*map(_expected_shape, self.depths), 0.0, *self._POWERS]
        self._prior = _bordered([[_shape_covariance(j, k) for k in self.depths] for j in self.depths])
        self.covariance = [list(row) for row in self._prior]
        self._unsettle([self._POWER_DEVIATION**2] * 2)
        # Variance of the logarithm of one round's time.
        self.noise = 0.1**2
        self.first: Load | None = None
        self.last: Load | None = None
        # What the level may have moved by, if the last outlier was none.
        self._jump = 0.0
        self.rounds, self._check_at = 0, 8
        # Of these, how many were measured here.
        self.own = 0

    def worth(self, distance: float) -> int:
        """As how many rounds of its own a cell so far away may take these."""
        return int(self.rounds / (2 + 2 * distance))

    def of_neighbour(self, other: RoundTimes, distance: float) -> None:
        """Begin where a cell stands that is `distance` cells away, with less confidence."""
        self.mean, self.noise = list(other.mean), other.noise
        self.rounds = other.worth(distance)
        self._check_at = max(self._check_at, 2 * self.rounds)
        for row, known, prior in zip(self.covariance, other.covariance, self._prior, strict=True):
            row[:] = [c + 0.15 * distance * p for c, p in zip(known, prior, strict=True)]
        self._unsettle([other.covariance[at][at] + self._CURVE**2 for at in (_SEQUENCES, _CONTEXT)])

    def _unsettle(self, powers: list[float]) -> None:
        """Know nothing of the level, and of the powers with these variances, whatever is known of the depths."""
        for at, variance in zip((_LEVEL, _SEQUENCES, _CONTEXT), (self._LEVEL_VARIANCE, *powers), strict=True):
            for row in self.covariance:
                row[at] = 0.0
            self.covariance[at] = [0.0] * len(self.mean)
            self.covariance[at][at] = variance

    def at(self, load: Load) -> list[float]:
        """Logarithms of seconds at every depth."""
        grown = self._grown(load)
        return [_total(self.mean, k, grown) for k in self.depths]

    def observe(self, load: Load, k: int, seconds: float) -> None:
        """Take over what one round at k took."""
        self.rounds += 1
        self.own += 1
        self.first = self.first or load
        self.covariance[_LEVEL][_LEVEL] += self._level_drift(load)
        drift, grown = self._SHAPE_DRIFT, self._grown(load)
        column = [
            _total(row, k, grown) + drift * prior[k] for row, prior in zip(self.covariance, self._prior, strict=True)
        ]
        residual = math.log(max(seconds, 1e-9)) - _total(self.mean, k, grown)
        known = _total(column, k, grown)
        usual, unusual = known + self.noise, known + self._OUTLIER
        odds = _density(residual, unusual) * self._OUTLIERS, _density(residual, usual) * (1 - self._OUTLIERS)
        # No reason of its own makes a round several times as fast.
        outlier = odds[0] / (sum(odds) or 1.0) if residual > -self._OUTLIER else 0.0
        # Both explanations, weighed: the moments of a mixture of two Gaussians.
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

    @property
    def check_due(self) -> bool:
        """Whether to look again at the other side of the choice, drafting or not: a single look may have misled."""
        return self.rounds >= self._check_at

    def checked(self) -> None:
        self._check_at = 2 * self.rounds

    def _grown(self, load: Load) -> tuple[float, float]:
        """By what factors a load is larger than the first one here, as logarithms."""
        return load.apart(self.first) if self.first else (0.0, 0.0)

    def _level_drift(self, load: Load) -> float:
        """Variance of what drives all depths alike, since the round before."""
        sequences, context = load.apart(self.last) if self.last else (0.0, 0.0)
        self.last = load
        return self._LEVEL_DRIFT**2 + self._jump + self._CURVE**2 * (sequences**2 + context**2)

    def shows(self, k: int, other: int, looks: int) -> float:
        """Variance of what so many rounds at k would change in the logarithm of its time over the other's."""
        at_k, level = self.covariance[k], self.covariance[_LEVEL]
        known = at_k[k] + 2 * level[k] + level[_LEVEL]  # at the first load here
        return (at_k[k] + level[k] - at_k[other] - level[other]) ** 2 / (known + self.noise / looks)


def _total(state: list[float], k: int, grown: tuple[float, float]) -> float:
    """What a round at k shows of a state, or of a row of its covariance, under a load that has grown so much."""
    return state[k] + state[_LEVEL] + grown[0] * state[_SEQUENCES] + grown[1] * state[_CONTEXT]


def _bordered(matrix: _Matrix) -> _Matrix:
    """With zeros for the level and the powers."""
    return [[*row, 0.0, 0.0, 0.0] for row in matrix] + [[0.0] * (len(matrix) + 3) for _ in range(3)]


# -- k ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """A look at drafting at depth k where plain rounds are best, and the seconds that each is thought to take."""

    k: int
    seconds: float
    usual_seconds: float


class DepthController:
    """Picks k for the sequences of a round that leave it to the gateway."""

    def __init__(self, deepest: int = DEEPEST):
        self.deepest = deepest
        self.acceptance = Acceptance(deepest)
        self.times: dict[tuple[int, int, bool], RoundTimes] = {}
        # Seconds that probes may still cost; None until the first round was measured.
        self._credit: float | None = None
        self._probing: Probe | None = None
        # Depths of the next rounds, where these are known: the rest of a look at the other kind, or of the beginning.
        self._next: list[int] = []
        # Depth and seconds of the first round, until there is a second one like it.
        self._first: tuple[int, float] | None = None
        # Whether the last round was drafted, where that is known.
        self._drafted: bool | None = None
        # Whether the last one took far longer than was thought, and the seconds until the next.
        self._surprised, self._pause = False, 0.0

    def choose(self, load: Load, rooms: Iterable[int]) -> int:
        """The depth of the next round. `rooms`: how many tokens each automatic sequence could draft at most."""
        counts = Counter(min(room, self.deepest) for room in rooms)
        deepest = max(counts, default=0)
        if not deepest:
            return 0
        if self._next:
            return min(self._next.pop(0), deepest)
        times, taus = self._times(load), self.acceptance.taus()
        if times.own < _FEW:
            deepest = min(deepest, _AT_FIRST)
        plain, mean = load.sequences - counts.total(), times.at(load)
        worth = [math.log(_tokens(taus, counts, k, plain)) - mean[k] for k in range(deepest + 1)]
        best = max(range(deepest + 1), key=worth.__getitem__)
        return self._probe(load, times, mean, taus, worth, best)

    def observe(self, load: Load, k: int | None, seconds: float, blocks: Sequence[tuple[int, int]]) -> None:
        """A round of `seconds` of its own, at depth k, or None where no one depth explains its time.

        `blocks` are the (draft tokens, accepted ones) of its sequences that were to be drafted.
        """
        self.acceptance.observe(blocks)
        if self._turned(k):
            k = None
        self._settle(k, seconds, bool(blocks))
        if k is None or k > self.deepest:
            return
        if self._credit is None:
            # Nothing is known that would show an outlier: of two alike the faster one counts. Plain ones follow.
            first, self._first = self._first, (k, seconds)
            if first is None or first[0] != k:
                self._next = [k]
                return
            seconds, self._next = min(first[1], seconds), [0, 0]
        self._times(load).observe(load, k, seconds)
        credit = 2 * seconds if self._credit is None else self._credit + PROBE_SHARE * seconds
        self._credit = min(credit, _MOST_CREDIT_ROUNDS * seconds)
        self._pause = max(0.0, self._pause - seconds)

    def missed(self, load: Load, k: int, seconds: float) -> None:
        """A round of `seconds` waited in vain for a draft that was to guess k tokens: drafting takes longer than that.

        It counts also right behind a plain one: a draft that is late is left alone, so none at its depth follows.
        """
        self.acceptance.observe([])
        self._settle(None, seconds, guessed=False)
        self._drafted, self._next = True, []
        times = self._times(load)
        if k <= self.deepest and math.log(seconds) > times.at(load)[k]:
            times.observe(load, k, seconds)

    def _turned(self, k: int | None) -> bool:
        """Whether the round before this one was of the other kind."""
        before, self._drafted = self._drafted, None if k is None else k > 0
        return None not in (before, self._drafted) and before != self._drafted

    def _settle(self, k: int | None, seconds: float, guessed: bool) -> None:
        """See whether a look at drafting took what was thought: one that no guess came of did not."""
        probe, lost = self._probing, k is None and not guessed
        if probe is None or not (lost or k == probe.k):
            return
        self._probing = None
        if lost or seconds > _SURPRISE * probe.seconds:
            self._pause = (seconds if self._surprised else probe.usual_seconds) / PROBE_SHARE
            self._surprised = True
        else:
            self._surprised = False

    def multiplier(self, load: Load, k: int) -> float:
        """Tokens a second at k over those of plain decoding, by what is known of this load."""
        times = self._times(load)
        return self.acceptance.taus()[k] * math.exp(times.mean[0] - times.mean[k])

    def _times(self, load: Load) -> RoundTimes:
        """What is known of this load's cell."""
        known = self.times.get(load.cell)
        if known is None or known.rounds < _FEW:
            known = self.times[load.cell] = self._begun(load.cell, known)
        return known

    def _begun(self, cell: tuple[int, int, bool], known: RoundTimes | None) -> RoundTimes:
        """A new cell begins where the nearest one stands; one that was met before anything was known begins again where
        one beside it knows more by now."""
        others = [(_distance(cell, at), times) for at, times in self.times.items() if times.last and at != cell]
        if known:
            others = [(distance, it) for distance, it in others if distance <= 1 and it.worth(distance) > known.rounds]
        if not others:
            return known or RoundTimes(self.deepest)
        distance, teacher = min(others, key=lambda one: (one[0], -one[1].rounds))
        fresh = RoundTimes(self.deepest)
        fresh.of_neighbour(teacher, distance)
        return fresh

    def _probe(
        self, load: Load, times: RoundTimes, mean: list[float], taus: list[float], worth: list[float], best: int
    ) -> int:
        """The best depth, or another one when looking at it promises more than it costs."""
        if self._credit is None or (best == 0 and self._pause):
            return best
        level = math.exp(mean[best])
        costs = [
            math.exp(m) * (1 - math.exp(w - worth[best])) * (1 if _same_kind(k, best) else 2)
            for k, (m, w) in enumerate(zip(mean, worth, strict=False))
        ]
        affordable = [k for k, cost in enumerate(costs) if k != best and cost <= self._credit]
        gains = {
            k: level * self._expected_gain(load, times, taus, k, best, worth[best] - worth[k]) - costs[k]
            for k in affordable
        }
        chosen = max(affordable, key=gains.__getitem__, default=best)
        if chosen != best and gains[chosen] <= 0:
            chosen = best
        if chosen == best and times.check_due:
            other = 0 if best else max(range(1, len(worth)), key=worth.__getitem__)
            if other in affordable:
                times.checked()
                chosen = other
        if chosen != best:
            self._credit -= costs[chosen]
            self._next = [] if _same_kind(chosen, best) else [chosen]
            self._probing = None if best else Probe(chosen, math.exp(mean[chosen]), level)
        return chosen

    def _expected_gain(
        self, load: Load, times: RoundTimes, taus: list[float], k: int, best: int, behind: float
    ) -> float:
        """What looking at k is worth, in rounds at the best depth."""
        doubt = self.acceptance.doubt * math.log(taus[k] / taus[best]) ** 2
        most = 0.0
        for looks in _LOOKS:
            shown = times.shows(k, best, looks)
            if k > best:  # a shallower round shows no more of τ than the best one does
                shown += doubt**2 / (doubt + 0.2 / (looks * load.sequences))
            if behind < _OUT_OF_REACH * (deviation := math.sqrt(shown)):
                most = max(most, _HORIZON * _mean_lead(behind, deviation) / looks)
        return most


def _same_kind(k: int, other: int) -> bool:
    """Whether both are drafted, or both plain."""
    return (k > 0) == (other > 0)


def _density(residual: float, variance: float) -> float:
    return math.exp(-(residual**2) / variance / 2) / math.sqrt(variance)


def _tokens(taus: list[float], counts: Counter[int], k: int, plain: int) -> float:
    """Of a round: `counts[room]` sequences draft min(k, room), `plain` ones nothing that k decides."""
    return plain + sum(count * taus[min(k, room)] for room, count in counts.items())


def _distance(cell: tuple[int, int, bool], other: tuple[int, int, bool]) -> float:
    return abs(cell[0] - other[0]) + abs(cell[1] - other[1]) + (cell[2] != other[2])


def _mean_lead(behind: float, deviation: float) -> float:
    """Of a look at what seems `behind`: how far it is in front afterwards, or 0, on average over what may be seen."""
    z = behind / deviation
    return deviation * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2)
