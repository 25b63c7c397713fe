"""Streamed completions whose events are timed on arrival: the load generator of `spire bench`.

Works with any server that streams OpenAI's completions. A broken stream or an unexpected refusal ends the measurement.
Does not know: retries.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spire.bench.client import BenchError
from spire.bench.exchange import Exchange, HttpRefusal, body_of, connect, request_to

# An answer may take hours; after this time without any received byte it counts as broken off.
_SILENCE_SECONDS = 1800
_EVENT, _END = b"data: {", b'"finish_reason":"'
# The first chunk comes from the prefill, the second from a round.
ROUND_CHUNK = 2


class Timed(NamedTuple):
    """A request body and `at`, its time of sending in seconds after the start of the load."""

    body: dict[str, Any]
    at: float = 0.0


@dataclass
class Streamed:
    """One streamed answer. `arrivals` holds (monotonic time, tokens) of each chunk with tokens.

    `exact` is True if the tokens of each chunk are known; otherwise the total of `usage` is spread evenly over chunks.
    """

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    exact: bool = True

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]


class LoadListener:
    """Events of a running load: `all_decode` (all requests have been in a round) and `one_ended` (a request ended)."""

    def __init__(self, requests: int):
        self._requests, self._decoding = requests, set[object]()
        self.all_decode, self.one_ended = asyncio.Event(), asyncio.Event()

    def decodes(self, request: object) -> None:
        """Record that a request has been in a round, or has ended."""
        self._decoding.add(request)
        if len(self._decoding) == self._requests:
            self.all_decode.set()


class _Recorder(Exchange):
    """An exchange that detects events by byte patterns, without parsing the answer, and notifies the listener."""

    def __init__(self, listener: LoadListener):
        super().__init__()
        self._listener, self._events = listener, 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._events += data.count(_EVENT)
        if self._events >= ROUND_CHUNK:
            self._listener.decodes(self)
        if _END in data:
            self._listener.one_ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.decodes(self)
        self._listener.one_ended.set()
        super().connection_lost(error)


async def stream_all(
    url: str, requests: list[Timed], headers: dict[str, str] | None = None, listener: LoadListener | None = None
) -> list[Streamed]:
    """Send each request at its time and return all answers once complete. Raises BenchError, also for a refusal."""
    return [_read(url, recorder) for recorder in await _record_all(url, requests, headers or {}, listener)]


async def stream_each(
    url: str, requests: list[Timed], headers: dict[str, str] | None = None
) -> list[Streamed | HttpRefusal]:
    """Send each request at its time and return its answer or refusal. Raises BenchError for other failures."""
    outcomes: list[Streamed | HttpRefusal] = []
    for recorder in await _record_all(url, requests, headers or {}):
        try:
            outcomes.append(_read(url, recorder))
        except HttpRefusal as refusal:
            outcomes.append(refusal)
    return outcomes


async def _record_all(
    url: str, requests: list[Timed], headers: dict[str, str], listener: LoadListener | None = None
) -> list[_Recorder]:
    address, told = url.rstrip("/") + "/v1/completions", listener or LoadListener(len(requests))
    began = time.monotonic()

    async def one(request: Timed) -> _Recorder:
        await asyncio.sleep(began + request.at - time.monotonic())
        message = request_to(address, {"Accept": "text/event-stream"} | headers, json.dumps(request.body).encode())
        recorder = await connect(address, lambda: _Recorder(told))
        recorder.send(message)
        try:
            await recorder.finish(_SILENCE_SECONDS)
        except TimeoutError as error:
            raise BenchError(f"{url} broke off: nothing of an answer came for {_SILENCE_SECONDS} s") from error
        finally:
            recorder.close()
        return recorder

    return await asyncio.gather(*map(one, requests))


def _read(url: str, recorder: _Recorder) -> Streamed:
    answer, untold = Streamed(recorder.sent), False
    for moment, event in _events(url, recorder):
        if error := event.get("error"):
            raise BenchError(f"{url} broke off: {error.get('message', error)}")
        answer.metrics = event.get("metrics") or answer.metrics
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", []):
            ids = choice.get("token_ids")
            if ids or (ids is None and choice.get("text")):
                answer.arrivals.append((moment, len(ids or ())))
                untold |= ids is None
    if not answer.arrivals:
        raise BenchError(f"{url} answered without a single token")
    if untold:
        _spread(url, answer)
    return answer


def _spread(url: str, answer: Streamed) -> None:
    total = answer.usage.get("completion_tokens")
    if total is None:
        raise BenchError(f"{url} tells neither tokens nor usage in its stream: its rate cannot be known")
    chunks, answer.exact = len(answer.arrivals), total == len(answer.arrivals)
    bounds = [round(total * at / chunks) for at in range(chunks + 1)]
    answer.arrivals = [
        (moment, after - before)
        for (moment, _), before, after in zip(answer.arrivals, bounds[:-1], bounds[1:], strict=True)
    ]


def _events(url: str, recorder: _Recorder) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the server-sent events of an answer, each with the arrival time of its last byte."""
    unfinished = b""
    for moment, data in body_of(url, recorder):
        *events, unfinished = (unfinished + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if event.startswith(b"data: ") and text != b"[DONE]":
                yield moment, json.loads(text)
