"""What clients asked and were sent, event by event, and the oracle that reads it.

Oracle: every request ends well; its tokens and text are those of the undisturbed run, token for token, whatever has
happened in between, and the stream says so itself (usage, one end, one finish reason).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

Body = dict[str, Any]
# Seconds in which no token of any request comes, however slow the target, when something is stuck.
SILENCE = 240.0
# Token for token equal whatever is drafted: greedy, and the invariant rule at any temperature.
RULES: list[Body] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "speculation": {"rule": "invariant"}}]


def bodies(count: int, max_tokens: int = 200) -> list[Body]:
    """`count` requests of different prompts, the rules by turns."""
    always = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return [{"prompt": "Once upon a time" + " there" * n} | always | RULES[n % len(RULES)] for n in range(count)]


@dataclass
class Record:
    """One streamed request."""

    body: Body
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    # (when, how many tokens) of each event, in seconds of the monotonic clock.
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: int | None = None
    ends: int = 0
    error: str = ""

    @property
    def refused(self) -> bool:
        """Told at once to come back later, by a status of its own."""
        return self.error.startswith(("429 ", "503 "))

    def event(self, line: str) -> None:
        if line == "data: [DONE]":
            self.ends += 1
        elif line.startswith("data: "):
            self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", []):
            self.tokens += choice["token_ids"]
            self.text += choice["text"]
            self.arrivals.append((time.monotonic(), len(choice["token_ids"])))
            self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]

    def problems(self, expected: Record) -> list[str]:
        """What the oracle has against it; nothing if it is as the undisturbed one."""
        found = []
        if self.error:
            found.append(f"it failed: {self.error}")
        if self.tokens != expected.tokens:
            at = next(
                (i for i, pair in enumerate(zip(self.tokens, expected.tokens, strict=False)) if len({*pair}) > 1), None
            )
            where = f"the first wrong one is number {at}" if at is not None else "one is the other's beginning"
            found.append(f"{len(self.tokens)} tokens came of {len(expected.tokens)}: {where}")
        if self.text != expected.text:
            found.append("the text is another")
        if (self.usage, self.ends, self.finish_reasons) != (len(self.tokens), 1, ["length"]):
            found.append(f"usage {self.usage}, {self.ends} ends, finish reasons {self.finish_reasons}")
        return found


class Load:
    """Streams requests, each on a connection of its own, and records what comes. Leaving the block waits for all."""

    def __init__(self, url: str, requests: Sequence[Body], *, repeat: bool = False):
        self.url, self.repeat = url, repeat
        self.records: list[Record] = []
        self.refusals = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(body,), daemon=True) for body in requests]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        left = time.monotonic()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(1)
                heard = max((when for record in self.records for when, _ in record.arrivals[-1:]), default=left)
                assert time.monotonic() - max(left, heard) < SILENCE, "a request never ended"

    def _run(self, body: Body) -> None:
        while True:
            self.records.append(record := Record(body))
            stream_into(record, self.url)
            if record.refused:  # as any client does that is told to come back later
                self.records.remove(record)
                self.refusals += 1
                time.sleep(0.2)
                continue
            if not self.repeat or self._stop.is_set():
                return

    @property
    def flowing(self) -> bool:
        """Whether every connection has been sent a good part of its first text, and none has ended."""
        begun = [record for record in self.records if len(record.tokens) > 20 and not record.ends]
        return len(begun) == len(self._threads)

    def goodput(self, begin: float, end: float) -> float:
        """Tokens a second that arrived between two moments."""
        tokens = sum(n for record in self.records for when, n in record.arrivals if begin <= when < end)
        return tokens / (end - begin) if end > begin else 0.0


def stream_into(record: Record, url: str) -> None:
    body = record.body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SILENCE) as response:
            if response.status_code != 200:
                record.error = f"{response.status_code} {response.read().decode()}"
            for line in response.iter_lines():
                record.event(line)
    except httpx.HTTPError as error:
        record.error = repr(error)


def undisturbed(url: str, requests: Sequence[Body]) -> list[Record]:
    """What these requests are answered while nothing happens; plain decoding has to say the same."""
    with Load(url, requests) as speculating:
        pass
    plainly = [body | {"speculation": body.get("speculation", {}) | {"draft": "off"}} for body in requests]
    with Load(url, plainly) as plain:
        pass
    drafted = in_order(speculating.records, requests)
    for one, other in zip(drafted, in_order(plain.records, plainly), strict=True):
        problems = one.problems(other)
        assert not problems, f"{problems} of {one.body}: {one.tokens} and plainly {other.tokens}"
    return drafted


def in_order(records: Sequence[Record], requests: Sequence[Body]) -> list[Record]:
    return [next(record for record in records if record.body == body) for body in requests]
