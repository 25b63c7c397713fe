"""Admission limits of requests, and the time until a retry. Every `now` is in seconds of one monotonic clock.

Two limits apply: the wait in the queue, whose drain rate is measured, and the quota per minute of each API key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import ceil, inf

from gateway.errors import BadParameter, OverQuota
from spire.errors import InvalidRequest

TIMEOUT_HEADER = "X-Request-Timeout"
# First tokens that the drain rate is measured over.
_REMEMBERED = 64


class DrainRate:
    """The drain rate of the queue: first tokens per second while further sequences wait for their first token.

    Waiting at the gateway for a place and waiting at the verifier for prefill count alike.
    """

    def __init__(self) -> None:
        self._started: deque[float] = deque(maxlen=_REMEMBERED)

    def started(self, now: float) -> None:
        """Record the first token of a sequence while other sequences still wait for their first token."""
        self._started.append(now)

    def emptied(self) -> None:
        """Reset the measured drain rate because no sequence waits any more: idle time must not count."""
        self._started.clear()

    def seconds_for(self, waiting: int, now: float) -> float | None:
        """Return the expected seconds until `waiting` sequences have their first token; None if unknown yet."""
        if len(self._started) < 2:
            return None
        first, last, count = self._started[0], self._started[-1], len(self._started)
        # The time since the last first token lowers the rate.
        return waiting * max((last - first) / (count - 1), (now - first) / count)

    def retry_after(self, waiting: int, now: float, at_least: float = 0.0) -> int:
        """Return Retry-After in whole seconds: the expected wait of `waiting` sequences, but at least `at_least`."""
        return _retry(max(self.seconds_for(waiting, now) or 0.0, at_least))


class Budget:
    """A quota per minute, refilled continuously; the unused quota accumulates to that of one minute at most."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self._left, self._seen = float(per_minute), now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available; 0 if it is available now."""
        self._left = min(self.per_minute, self._left + (now - self._seen) * self.per_minute / 60)
        self._seen = now
        return max(0.0, (amount - self._left) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Subtract `amount` from the available quota; a negative amount is a refund."""
        self._left -= amount


class Quotas:
    """The quotas of each API key. Without keys or without limits, every request is allowed."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None):
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._budgets: dict[tuple[str, str], Budget] = {}

    def charge(self, key: str | None, tokens: int, now: float) -> Charge:
        """Charge a key for a request of up to `tokens` tokens. Raises OverQuota; InvalidRequest above a whole quota."""
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
    """The tokens that an API key was charged in advance for a request."""

    def __init__(self, budget: Budget | None, tokens: int):
        self._budget, self._tokens = budget, tokens

    def settle(self, used: int) -> None:
        """Refund the tokens that the request did not use. Later calls do nothing."""
        if self._budget is not None:
            self._budget.take(used - self._tokens)
            self._budget = None


def seconds_allowed(headers: Mapping[str, str], most: float) -> float:
    """Return a request's timeout in seconds: X-Request-Timeout, by default and at most `most`. Raises BadParameter."""
    came = headers.get(TIMEOUT_HEADER, str(most))
    try:
        seconds = float(came)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise BadParameter(TIMEOUT_HEADER, f"{TIMEOUT_HEADER} is {came[:40]!r}: it must be a number of seconds above 0")
    return min(seconds, most)


def _retry(seconds: float) -> int:
    return max(1, ceil(seconds))  # a client is never told to retry at once
