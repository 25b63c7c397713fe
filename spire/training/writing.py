"""`spire write`: chats for training, written by the model that a gateway serves.

A draft learns best from its target's own text. Prompts come from files, or the model writes them itself: a chat that
ends behind the user's tag is continued by what a user would say. Prompts that say the same as an earlier one are left
out. Every chat is appended to the output as a line of JSON with `messages`, so that a run that was broken off can be
continued. An answer that `max_tokens` cut off is marked by its `finish_reason`. If it goes round in circles, its prompt
is written without it: training ignores that, and no later run tries it.

Does not know: which model is served, and how it decodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from spire.errors import DataError, SpireError
from spire.http import GatewayError, answer_of, async_client_for, gateway_errors, refusal_of
from spire.service.keys import authorization
from spire.text.prompts import Prompt
from spire.text.repetition import goes_in_circles

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
# Of a whole answer, which waits for its turn.
_SECONDS = 3600.0
# So many prompts in a row that are blank, cut off or known end the search for more.
_MOST_IN_VAIN = 200
# How every line of the output begins.
_BEGINNING = b'{"messages": ['


@dataclass(frozen=True)
class Writing:
    """How text is written: the gateway, the answers at a time, and the sampling of prompts and answers.

    Prompts that the model writes start with `begin`.
    """

    url: str
    concurrency: int = 16
    max_tokens: int = 512
    temperature: float = 1.0
    seed: int = 0
    begin: str = ""


@dataclass
class Written:
    """The result of a run: chats written, of which so many answers were `cut_off`, and tokens generated.

    Left out were prompts that were `known`, answers that went round `in_circles` until they were cut off, and prompts
    that the gateway `refused`, for example because they are too long.
    """

    chats: int = 0
    cut_off: int = 0
    tokens: int = 0
    known: int = 0
    in_circles: int = 0
    refused: int = 0

    @property
    def prompts(self) -> int:
        """The number of prompts that are dealt with."""
        return self.chats + self.known + self.in_circles + self.refused


class _Refused(GatewayError):
    """Error for a request that the gateway refused for what it says; others may be answered."""


def write_chats(
    out: Path,
    prompts: Iterable[Prompt] | None,
    count: int | None,
    writing: Writing,
    told: Callable[[Written], None] = lambda _: None,
) -> Written:
    """Have `prompts` answered, or prompts that the model writes, and append the chats to `out`.

    Ends after the last of `prompts`, or with `count` chats in `out`, less those that are left out.
    Calls `told` after each answer. Raises DataError for an output that is not such a file, and GatewayError for a
    gateway that cannot be reached or refuses.
    """
    try:
        return asyncio.run(_Writer(out, writing, told).write(prompts, count))
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error


class _Writer:
    def __init__(self, out: Path, writing: Writing, told: Callable[[Written], None]):
        self._out, self._writing, self._told = out, writing, told
        self._done = Written()
        # The prompts that are answered or being answered.
        self._known = set(_answered(out))

    async def write(self, prompts: Iterable[Prompt] | None, count: int | None) -> Written:
        wanted = None if count is None else max(0, count - len(self._known))
        options = {"timeout": _SECONDS, "headers": authorization()}
        async with async_client_for(self._writing.url, _LIMITS, **options) as self._client:
            source = self._invented() if prompts is None else _each(prompts)
            with self._out.open("a", encoding="utf-8") as self._file:
                async with asyncio.TaskGroup() as group:
                    free = asyncio.Semaphore(self._writing.concurrency)
                    async for prompt in self._new(source, wanted):
                        await free.acquire()
                        answering = group.create_task(self._answer(prompt))
                        answering.add_done_callback(lambda _: free.release())
        return self._done

    async def _new(self, source: AsyncIterator[Prompt], wanted: int | None) -> AsyncIterator[Prompt]:
        """Yield at most `wanted` prompts that are not known."""
        given = 0
        if wanted == 0:
            return
        async for prompt in source:
            if prompt.normalized in self._known:
                self._done.known += 1
                continue
            self._known.add(prompt.normalized)
            yield prompt
            given += 1
            if given == wanted:
                return

    async def _invented(self) -> AsyncIterator[Prompt]:
        """Yield prompts that the model writes behind the user's tag, without end."""
        number, in_vain = len(self._known), 0
        begin = self._writing.begin
        user = {"messages": [{"role": "user", "content": begin}], "continue_final_message": True}
        waiting, finished = set[asyncio.Task[tuple[str, str]]](), set[asyncio.Task[tuple[str, str]]]()
        try:
            while in_vain < _MOST_IN_VAIN:
                while len(waiting) < max(1, self._writing.concurrency // 4):
                    waiting.add(asyncio.create_task(self._ask(user, f"prompt {number}")))
                    number += 1
                finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    text, reason = task.result()
                    prompt, in_vain = Prompt.of_user(f"{begin}{text}".strip()), in_vain + 1
                    if reason == "stop" and text.strip():
                        in_vain = in_vain if prompt.normalized in self._known else 0
                        yield prompt
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, *finished, return_exceptions=True)
        raise SpireError(
            f"the last {_MOST_IN_VAIN} prompts that the model wrote were blank, cut off or known: give it prompts "
            "(--prompts FILE), or raise --max-tokens or --temperature"
        )

    async def _answer(self, prompt: Prompt) -> None:
        """Have a prompt answered and write the chat, without an answer that goes round in circles."""
        try:
            text, reason = await self._ask({"messages": prompt.messages}, json.dumps(prompt.messages))
        except _Refused:
            self._done.refused += 1
        else:
            cut_off, messages = reason != "stop", list(prompt.messages)
            in_circles = cut_off and goes_in_circles(text)
            if not in_circles:
                messages.append({"role": "assistant", "content": text})
            chat = {"messages": messages} | ({"finish_reason": reason} if cut_off and not in_circles else {})
            self._file.write(json.dumps(chat, ensure_ascii=False) + "\n")
            self._file.flush()
            self._done.chats += not in_circles
            self._done.cut_off += cut_off and not in_circles
            self._done.in_circles += in_circles
        self._told(self._done)

    async def _ask(self, request: dict[str, Any], name: str) -> tuple[str, str]:
        """Return the text and the finish reason of a chat. `name` determines its seed."""
        seed = int.from_bytes(hashlib.sha256(f"{self._writing.seed} {name}".encode()).digest()[:6], "big")
        sampling = {"temperature": self._writing.temperature, "max_tokens": self._writing.max_tokens, "seed": seed}
        with gateway_errors(self._writing.url):
            response = await self._client.post(f"{self._writing.url}/v1/chat/completions", json=request | sampling)
        if response.status_code != httpx.codes.OK:
            kind = _Refused if response.status_code == httpx.codes.BAD_REQUEST else GatewayError
            raise kind(refusal_of(response))
        answer = answer_of(response)
        self._done.tokens += answer["usage"]["completion_tokens"]
        return answer["choices"][0]["message"]["content"] or "", answer["choices"][0]["finish_reason"]


async def _each(prompts: Iterable[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt


def _answered(out: Path) -> Iterator[tuple[str, ...]]:
    """Yield the prompts of the chats in the output of an earlier run, normalized. Repair its last line afterwards."""
    if not out.exists():
        return
    raw = out.read_bytes()
    end = raw.rfind(b"\n") + 1
    if _is_broken_off(raw[end:]):
        raw = raw[:end]
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            yield Prompt(messages[:-1] if messages[-1]["role"] == "assistant" else messages).normalized
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(f"{out}, line {number} is no chat: name another file to write to") from None
    with out.open("r+b") as file:
        file.truncate(len(raw))
        file.seek(0, os.SEEK_END)
        file.write(b"" if raw.endswith(b"\n") or not raw else b"\n")


def _is_broken_off(line: bytes) -> bool:
    """True for the beginning of a line that a run has written."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(_BEGINNING[: len(line)])
    return False
