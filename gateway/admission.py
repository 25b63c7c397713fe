"""Who may come in, and when whoever may not should ask again. Plain arithmetic: every `now` is seconds of one clock.

Two things limit: the queue, which drains at a rate that is measured, and what each API key may have a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil, inf

from gateway.errors import BadParameter, OverQuota
from spire.errors import InvalidRequest

TIMEOUT_HEADER = "X-Request-Timeout"
# A client is not told to come back at once, whatever was measured.
_SHORTEST_RETRY = 1
# First tokens that the rate is taken over.
_REMEMBERED = 64


class DrainRate:
    """How fast the queue gets shorter: first tokens that came while others waited for theirs.

    Whether they wait here for a place or at the verifier for their prompt to be read is all the same to them.
    """

    def __init__(self) -> None:
        self._started: deque[float] = deque(maxlen=_REMEMBERED)

    def started(self, now: float) -> None:
        """One has its first token, and others wait for theirs."""
        self._started.append(now)

    def emptied(self) -> None:
        """Nobody waits any more: what drains later is measured from then on, not over the idle time between."""
        self._started.clear()

    def seconds_for(self, waiting: int, now: float) -> float | None:
        """Until so many have their first token; None before anything was measured. Silence counts as slowness."""
        if len(self._started) < 2:
            return None
        first, last, count = self._started[0], self._started[-1], len(self._started)
        return waiting * max((last - first) / (count - 1), (now - first) / count)

    def retry_after(self, waiting: int, now: float, at_least: float = 0.0) -> int:
        """Whole seconds after which asking again for so many is worth the trouble."""
        return _retry(max(self.seconds_for(waiting, now) or 0.0, at_least))


class Budget:
    """So much a minute, refilled continuously: what was not used for a minute can be had at once."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self._left, self._seen = float(per_minute), now

    def seconds_until(self, amount: float, now: float) -> float:
        """0 when it can be had now."""
        self._left = min(self.per_minute, self._left + (now - self._seen) * self.per_minute / 60)
        self._seen = now
        return max(0.0, (amount - self._left) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Or give back, when it is negative."""
        self._left -= amount


class Quotas:
    """What each API key may have. Without keys, or without limits, everybody may have everything."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None):
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._budgets: dict[tuple[str, str], Budget] = {}

    def charge(self, key: str | None, tokens: int, now: float) -> Charge:
        """Take one request with at most so many tokens. Raises OverQuota, or InvalidRequest when it never can be."""
        wanted = {} if key is None else {"requests": 1, "tokens": tokens}
        budgets = {}
        for what, amount in wanted.items():
            if (limit := self._limits[what]) is None:
                continue
            if amount > limit:
                message = f"up to {amount} {what} are asked for at once, and a key may have {limit} a minute"
                raise InvalidRequest(message, "max_tokens" if what == "tokens" else "")
            budget = self._budgets.setdefault((str(key), what), Budget(limit, now))
            if seconds := budget.seconds_until(amount, now):
                raise OverQuota(f"this key may have {limit} {what} a minute: try again later", _retry(seconds))
            budgets[what] = budget
        for what, budget in budgets.items():
            budget.take(wanted[what])
        return Charge(budgets.get("tokens"), tokens)


class Charge:
    """Tokens that a request was promised."""

    def __init__(self, budget: Budget | None, tokens: int):
        self._budget, self._tokens = budget, tokens

    def settle(self, used: int) -> None:
        """It is over: what was promised and not used is given back, once."""
        if self._budget is not None:
            self._budget.take(used - self._tokens)
            self._budget = None


def seconds_allowed(headers: Mapping[str, str], most: float) -> float:
    """What a request's X-Request-Timeout asks for, at most `most`. Raises BadParameter when it is no such number."""
    asked = headers.get(TIMEOUT_HEADER, str(most))
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise BadParameter(
            TIMEOUT_HEADER, f"{TIMEOUT_HEADER} is {asked[:40]!r}: it must be a number of seconds above 0"
        )
    return min(seconds, most)


def _retry(seconds: float) -> int:
    return max(_SHORTEST_RETRY, ceil(seconds))
