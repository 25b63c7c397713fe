"""The depth controller: picks k, the draft tokens (0 for none) of the next round, from the results of earlier rounds.

A round at depth k yields τ(k) tokens per sequence and takes Δt seconds; the best k has the most tokens per second. The
yield τ costs nothing to learn: a round at depth k also shows that of every smaller depth. Where drafts stop early, k is
what is asked for, and the time belongs to the mean number of tokens that are drafted. The time Δt of untried depths is
inferred, with an uncertainty, from measured ones; if the uncertainty could change the choice, the controller probes
another depth for a round, within a time budget. While plain rounds are best, drafting is probed now and then, because a
slow draft may have recovered. The first round after a change between drafted and plain is not timed, because it does
work of the previous round (activations to send or to absorb). So a drafted probe among plain rounds takes two rounds,
and so does a plain probe among drafted rounds.

A pure data structure: no I/O, clock, torch, async or randomness. `Drafting` calls `choose` before a round and
`observe` or `missed` after it. Does not know: requests. Rounds that mix depths are not timed; k is chosen for them as
if they took as long as rounds wholly at depth k.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.rounds.acceptance import Acceptance, BlockResult
from gateway.rounds.round_times import Load, RoundTimes, at_depth
from gateway.sequence import DEEPEST
from spire.decoding.stopping import standing_for

# Greatest k in the first rounds of a load: deep rounds may take many times as long as with fewer sequences.
_AT_FIRST = 8
# Share of the time of rounds with automatic sequences that probes (depths other than the best known) may cost, and the
# number of rounds whose time may accumulate as budget; more if a single probe costs more.
PROBE_SHARE = 0.01
_CREDIT_ROUNDS = 4.0
# Share of the same time for routine probes of drafting while plain rounds are best. A probe of many sequences tells
# more, and slows the plain rounds after it. So probes are also _APART rounds apart for each sequence, at most
# _MOST_APART rounds and at most an eighth of the rounds so far.
_CHECK_SHARE, _APART, _MOST_APART = 0.005, 12, 200
# Most plain rounds of a batch before the choice is made anew: they say little about drafting, and choosing takes time.
_REVIEW_ROUNDS = 8
# A round that takes this many times its expected time is a surprise. While plain rounds are best, a surprising probe
# postpones the next one until the time of a plain round has been saved up, because the first may be an outlier; a
# second surprise in a row postpones it until twice that probe's own time has been saved up.
_SURPRISE = 3.0
# A probe that takes this many times less than expected shows that the draft has recovered, for all loads.
_RECOVERED = 2.0
# Greatest distance between cells at which a round in one cell counts as a probe planned in the other.
_NEAR = 2
# After this many surprising drafted rounds in a row, plain rounds are probed at any cost.
_SLOW_IN_A_ROW = 4
# Rounds after which a cell learns only from its own rounds.
_FEW = 8
# Number of rounds for which the result of a probe is expected to be useful.
_HORIZON = 2000.0
# A depth more than this many standard deviations behind the best one is not worth a probe.
_OUT_OF_REACH = 4.0
# Plain rounds are preferred unless drafting gives so much more, in log tokens per second: near the break-even, by the
# estimates either may be the better one, and drafting by mistake costs a draft's work and a replay for nothing.
_IN_FAVOUR_OF_PLAIN = 0.03
# Greatest standard deviation of a log multiplier that is shown to people.
_WELL_KNOWN = 0.1
# The bounds of the probability below which drafting stops.
_LEAST_STANDING = 0.02, 0.9
# Numbers of probes to consider: one often shows too little to be worth its cost, even if several would be.
_LOOKS = (1, 8)


class Probe(NamedTuple):
    """A planned probe round: drafted at depth k although plain rounds are best, with the expected times of both."""

    load: Load
    k: int
    seconds: float
    usual_seconds: float


class Gain(NamedTuple):
    """The best depth k that was measured under a load, and its tokens per second relative to plain decoding."""

    sequences: int
    context: int
    k: int
    multiplier: float


class DepthController:
    """Picks k, the number of draft tokens, for the sequences of a round whose requests leave it to the gateway."""

    def __init__(self, deepest: int = DEEPEST):
        self.deepest = deepest
        self.acceptance = Acceptance(deepest)
        self.times: dict[tuple[int, int, bool], RoundTimes] = {}
        # Seconds that probes may still cost; None before the first measurement.
        self._credit: float | None = None
        self._probing: Probe | None = None
        # Depths already decided for the next rounds: the second round of a probe, or the very first rounds.
        self._next: list[int] = []
        # Depth and seconds of the first round, until there is a second one at the same depth.
        self._first: tuple[int, float] | None = None
        # Whether the last round was drafted; None if unknown.
        self._drafted: bool | None = None
        # Whether the last probe of drafting was a surprise, and the seconds until the next one.
        self._surprised, self._pause = False, 0.0
        # Number of drafted rounds in a row that were surprises, the log seconds expected at each depth before the first
        # of them, and whether to probe plain rounds.
        self._slow, self._usual, self._doubted = 0, list[float](), False
        # The cell where plain rounds were best at the last choice (None if drafting was), and the seconds that a probe
        # of drafting costs there, which may always be saved up.
        self._plain_cell: tuple[int, int, bool] | None = None
        self._look_seconds = 0.0
        # Plain rounds until the choice is made anew in that cell.
        self._unreviewed = 0

    def choose(self, load: Load, rooms: Iterable[int]) -> int:
        """Return the depth k of the next round. `rooms`: the most draft tokens of each sequence with automatic k."""
        counts = Counter(min(room, self.deepest) for room in rooms)
        deepest = max(counts, default=0)
        if not deepest:
            return 0
        if self._next:
            return min(self._next.pop(0), deepest)
        if load.cell == self._plain_cell and self._stays_plain():
            return 0
        times, taus = self._times(load), self.acceptance.taus()
        if times.own < _FEW:
            deepest = min(deepest, _AT_FIRST)
        plain, mean = load.sequences - counts.total(), times.at(load)
        usual = [at_depth(mean, depth) for depth in self.acceptance.mean_drafted()[: deepest + 1]]
        worth = [math.log(_tokens(taus, counts, k, plain)) - usual[k] for k in range(deepest + 1)]
        worth[0] += _IN_FAVOUR_OF_PLAIN
        best = max(range(deepest + 1), key=worth.__getitem__)
        self._plain_cell, self._unreviewed = (None if best else load.cell), min(_REVIEW_ROUNDS, load.sequences)
        return self._probe(load, times, usual, taus, worth, best)

    def _stays_plain(self) -> bool:
        """Return True if the next round is plain without a new choice: the last is recent, or probes cost too much."""
        self._unreviewed -= 1
        return bool(self._pause) or (self._credit or 0.0) < self._look_seconds or self._unreviewed > 0

    def observe(self, load: Load, k: int | None, seconds: float, blocks: Sequence[BlockResult]) -> None:
        """Learn from the time and acceptance of a round at depth k; k is None if the time belongs to no single depth.

        `seconds` excludes other sequences' prefill.
        """
        self.acceptance.observe(blocks)
        if self._turned(k):
            k = None
        depth = sum(block.drafted for block in blocks) / len(blocks) if k and blocks else k
        self._settle(load, k, depth, seconds, bool(blocks))
        if k is None or depth is None or k > self.deepest:
            return
        if self._credit is None:
            # No estimate could reveal an outlier yet: the faster of two rounds counts. Two plain rounds follow.
            first, self._first = self._first, (k, seconds)
            if first is None or first[0] != k:
                self._next = [k]
                return
            seconds, self._next = min(first[1], seconds), [0, 0]
        times = self._times(load)
        self._see_whether_slow(times, load, depth, seconds)
        times.observe(load, depth, seconds)
        if k:
            self._plain_cell = None
        # Rounds without automatic sequences pay for no probes.
        saved = PROBE_SHARE * seconds * load.automatic
        credit = 2 * seconds if self._credit is None else self._credit + saved
        self._credit = min(credit, max(_CREDIT_ROUNDS * seconds, self._look_seconds))
        self._pause = max(0.0, self._pause - seconds * load.automatic)

    def _see_whether_slow(self, times: RoundTimes, load: Load, depth: float, seconds: float) -> None:
        """Request a probe of plain rounds after several far too slow drafted ones: the draft alone may be the cause."""
        if not depth or times.own < _FEW:
            return
        usual = self._usual if self._slow else times.at(load)
        if seconds < _SURPRISE * math.exp(at_depth(usual, depth)):
            self._slow = 0
            return
        self._slow, self._usual = self._slow + 1, usual
        if self._slow == _SLOW_IN_A_ROW:
            times.doubt()
            self._doubted = True

    def missed(self, load: Load, k: int, seconds: float) -> None:
        """Learn from a round whose k draft tokens did not arrive in time: a round at depth k takes at least `seconds`.

        The round counts even right after a plain one: a late draft is not asked for a while, so no second one follows.
        """
        self.acceptance.observe([])
        self._settle(load, None, None, seconds, guessed=False)
        self._drafted, self._next = True, []
        times = self._times(load)
        if k <= self.deepest and math.log(seconds) > times.at(load)[k]:
            times.observe(load, k, seconds)

    def _turned(self, k: int | None) -> bool:
        """Record whether a round was drafted (k > 0) or plain. Return True if that differs from the previous round."""
        before, self._drafted = self._drafted, None if k is None else k > 0
        return None not in (before, self._drafted) and before != self._drafted

    def _settle(self, load: Load, k: int | None, depth: float | None, seconds: float, guessed: bool) -> None:
        """Conclude a pending probe of drafting: pause probes if lost or slow, raise the estimates' variance if fast."""
        probe, lost = self._probing, k is None and not guessed
        if probe is None or not (lost or k == probe.k):
            return
        self._probing = None
        if depth is not None and 0 < _distance(load.cell, probe.load.cell) <= _NEAR:
            # The load has changed since the probe was planned: a round in a nearby cell answers it.
            self._times(probe.load).observe(probe.load, depth, seconds)
        if lost or seconds > _SURPRISE * probe.seconds:
            self._pause = (2 * seconds if self._surprised else probe.usual_seconds) / PROBE_SHARE
            self._surprised = True
        else:
            self._surprised = False
            if _RECOVERED * seconds < probe.seconds:
                self._times(load).doubt()
                for times in self.times.values():
                    times.look_again = True

    def least_standing(self, load: Load, k: int, by_block: bool = False) -> float:
        """Return the probability that a block must stand with for one more draft token to be worth its time, in a round
        at depth k; 0 for any. `by_block`: by the block rule.

        A token costs time in which the sequence gives tokens at the present rate: what a round grows by with each token
        around the present depth. `standing_for` tells what it brings. In a batch drafts go on to depth k: stopping
        gains next to nothing there, as a pass of the draft costs as much for the sequences that go on (docs/speed.md).
        """
        if load.sequences > 1:
            return 0.0
        times, depth = self._times(load).at(load), self.acceptance.mean_drafted()[k]
        around = min(max(2.0, depth), self.deepest - 1)
        each = (math.exp(at_depth(times, around + 1)) - math.exp(at_depth(times, around - 1))) / 2
        least = each * self.acceptance.taus()[k] / math.exp(at_depth(times, depth))
        standing = standing_for(least, self.acceptance.rate, by_block)
        return min(max(standing, _LEAST_STANDING[0]), _LEAST_STANDING[1])

    def multiplier(self, load: Load, k: int) -> float:
        """Return the estimated ratio of tokens per second at depth k to tokens per second of plain decoding."""
        depth = self.acceptance.mean_drafted()[k]
        return self.acceptance.taus()[k] * math.exp(self._times(load).log_ratio(0, depth))

    def gains(self) -> list[Gain]:
        """Return the gain of drafting under each load whose rounds have shown it within _WELL_KNOWN."""
        measured = [times for cell, times in self.times.items() if not cell[2] and times.own >= _FEW]
        return sorted(gain for times in measured if (gain := _gain(times, self.acceptance)) is not None)

    def _times(self, load: Load) -> RoundTimes:
        """Return the estimates of round times for this load's cell (bucket of loads), created if the cell is new."""
        known = self.times.get(load.cell)
        if known is None or known.rounds < _FEW:
            known = self.times[load.cell] = self._begun(load.cell, known)
        return known

    def _begun(self, cell: tuple[int, int, bool], known: RoundTimes | None) -> RoundTimes:
        """Return a cell's estimates: copied from the nearest, or if young (`known`) from a better-known neighbour."""
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
        self, load: Load, times: RoundTimes, usual: list[float], taus: list[float], worth: list[float], best: int
    ) -> int:
        """Return the depth of the next round: `best`, or another one if a probe of that is worth more than its cost.

        `usual`, `worth`: by depth, the expected log seconds of a round and its log tokens per second.
        """
        if self._credit is None or (best == 0 and self._pause):
            return best
        level = math.exp(usual[best])
        costs = [
            math.exp(log_seconds) * (1 - math.exp(w - worth[best])) * (1 if _same_kind(k, best) else 2)
            for k, (log_seconds, w) in enumerate(zip(usual, worth, strict=True))
        ]
        affordable = [k for k, cost in enumerate(costs) if k != best and cost <= self._credit]
        depths = self.acceptance.mean_drafted()
        gains = {
            k: level * self._gain(load, times, taus, depths, k, best, worth[best] - worth[k]) - costs[k]
            for k in affordable
        }
        chosen = max(affordable, key=gains.__getitem__, default=best)
        if chosen != best and gains[chosen] <= 0:
            chosen = best
        other = 0 if best else max(range(1, len(worth)), key=worth.__getitem__)
        if best and self._doubted:
            chosen, self._doubted = 0, False
        elif best == 0 and times.look_again:
            chosen, times.look_again = other, False
        elif chosen == best and times.check_due and other in affordable:
            # A slow draft may have recovered.
            apart = min(_APART * load.sequences, _MOST_APART, times.rounds / 8)
            times.checked(math.inf if best else max(apart, costs[other] / level / _CHECK_SHARE))
            chosen = other
        self._look_seconds = 0.0 if best else costs[other]
        if chosen != best:
            self._credit = max(0.0, self._credit - costs[chosen])
            self._next = [] if _same_kind(chosen, best) else [chosen]
            self._probing = None if best else Probe(load, chosen, math.exp(usual[chosen]), level)
        return chosen

    def _gain(
        self, load: Load, times: RoundTimes, taus: list[float], depths: list[float], k: int, best: int, behind: float
    ) -> float:
        """Return the expected gain of probing k, in rounds at depth `best`. `behind`: deficit of k in log tokens/s."""
        doubt = self.acceptance.doubt(load.sequences) * math.log(taus[k] / taus[best]) ** 2
        most = 0.0
        for looks, shown in zip(_LOOKS, times.shows(depths[k], depths[best], _LOOKS), strict=True):
            if k > best:  # a round shallower than the best depth shows no more of τ
                shown += doubt**2 / (doubt + 0.2 / (looks * load.sequences))
            if behind < _OUT_OF_REACH * (deviation := math.sqrt(shown)):
                most = max(most, _HORIZON * _mean_lead(behind, deviation) / looks)
        return most


def _gain(times: RoundTimes, acceptance: Acceptance) -> Gain | None:
    """Return the best depth of a cell whose multiplier is well known, and that multiplier, or None if none is."""
    taus, depths = acceptance.taus(), acceptance.mean_drafted()
    known = [k for k in range(1, len(taus)) if times.deviation(0, depths[k]) < _WELL_KNOWN]
    if times.first is None or not known:
        return None
    multiplier, k = max((taus[k] * math.exp(times.log_ratio(0, depths[k])), k) for k in known)
    return Gain(times.first.sequences, round(times.first.context), k, multiplier)


def _same_kind(k: int, other: int) -> bool:
    """True if both depths are drafted or both are plain."""
    return (k > 0) == (other > 0)


def _tokens(taus: list[float], counts: Counter[int], k: int, plain: int) -> float:
    """Return a round's expected tokens: `counts[room]` sequences draft min(k, room); `plain` others yield 1 each."""
    return plain + sum(count * taus[min(k, room)] for room, count in counts.items())


def _distance(cell: tuple[int, int, bool], other: tuple[int, int, bool]) -> float:
    return abs(cell[0] - other[0]) + abs(cell[1] - other[1]) + (cell[2] != other[2])


def _mean_lead(behind: float, deviation: float) -> float:
    """Return the mean of max(0, lead) where lead is normal with mean -behind and the given standard deviation."""
    z = behind / deviation
    return deviation * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2)
