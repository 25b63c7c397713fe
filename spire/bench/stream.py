"""Streamed completions, each event stamped when it arrives: the load and the clock of `spire bench`.

Any server that streams OpenAI's completions will do. What it does not know: retries. A broken stream ends the
measurement, and so does a refusal where none is expected.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spire.bench.client import BenchError
from spire.bench.exchange import Exchange, Refusal, body_of, connect, request_to

# An answer may take hours. One of which nothing has come for so long, no piece and no sign of life, does not come.
_SILENCE_SECONDS = 1800
_EVENT, _END = b"data: {", b'"finish_reason":"'
# The first chunk is the end of a prefill; the second one comes from a round.
ROUND_CHUNK = 2


@dataclass(frozen=True)
class Timed:
    """A request's body and when it is sent, in seconds after the load begins."""

    body: dict[str, Any]
    at: float = 0.0


@dataclass
class Streamed:
    """One answer. `arrivals` are (moment, tokens) of each chunk that brought any; moments are of the monotonic clock.

    `exact`: whether chunks told their tokens. Otherwise the total of `usage` is spread evenly over them.
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


class Listener:
    """Hears, while the load runs, that all requests have been in a round and that one of them has ended."""

    def __init__(self, requests: int):
        self._outside = requests
        self.all_decode, self.one_ended = asyncio.Event(), asyncio.Event()

    def decodes(self) -> None:
        self._outside -= 1
        if not self._outside:
            self.all_decode.set()

    def ended(self) -> None:
        self.one_ended.set()


class _Recorder(Exchange):
    """Tells the listener what comes, without reading it."""

    def __init__(self, listener: Listener):
        super().__init__()
        self._listener = listener
        self._events, self._decodes = 0, False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._events += data.count(_EVENT)
        if self._events >= ROUND_CHUNK:
            self._tell_decodes()
        if _END in data:
            self._listener.ended()

    def _tell_decodes(self) -> None:
        if not self._decodes:
            self._decodes = True
            self._listener.decodes()

    def connection_lost(self, error: Exception | None) -> None:
        self._tell_decodes()
        self._listener.ended()
        super().connection_lost(error)


async def stream_all(
    url: str, requests: list[Timed], headers: dict[str, str] | None = None, listener: Listener | None = None
) -> list[Streamed]:
    """Send each request when it is due and read every answer to its end. Raises BenchError for a refusal."""
    recorders = await _record_all(url, requests, headers or {}, listener or Listener(len(requests)))
    return [_read(url, recorder) for recorder in recorders]


async def stream_each(
    url: str, requests: list[Timed], headers: dict[str, str] | None = None
) -> list[Streamed | Refusal]:
    """The same for a server that may refuse some of them."""
    recorders = await _record_all(url, requests, headers or {}, Listener(len(requests)))
    return [_outcome(url, recorder) for recorder in recorders]


async def _record_all(url: str, requests: list[Timed], headers: dict[str, str], listener: Listener) -> list[_Recorder]:
    began = time.monotonic()

    async def one(request: Timed) -> _Recorder:
        await asyncio.sleep(began + request.at - time.monotonic())
        return await _record(url, request.body, headers, listener)

    return await asyncio.gather(*map(one, requests))


async def _record(url: str, body: dict[str, Any], more: dict[str, str], listener: Listener) -> _Recorder:
    address = url.rstrip("/") + "/v1/completions"
    request = request_to(address, {"Accept": "text/event-stream"} | more, json.dumps(body).encode())
    recorder = await connect(address, lambda: _Recorder(listener))
    recorder.send(request)
    try:
        await recorder.finish(_SILENCE_SECONDS)
    except TimeoutError as error:
        raise BenchError(f"{url} broke off: nothing of an answer came for {_SILENCE_SECONDS} s") from error
    finally:
        recorder.close()
    return recorder


# --- when it is over --------------------------------------------------------------------------------------------------


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


def _outcome(url: str, recorder: _Recorder) -> Streamed | Refusal:
    try:
        return _read(url, recorder)
    except Refusal as refusal:
        return refusal


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
    """The server-sent events of an answer, each with the moment its last byte came."""
    unfinished = b""
    for moment, data in body_of(url, recorder):
        *events, unfinished = (unfinished + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if event.startswith(b"data: ") and text != b"[DONE]":
                yield moment, json.loads(text)
