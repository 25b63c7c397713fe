"""The HTTP response of a completion: a JSON object or server-sent events. If the client leaves, its sequences end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api.completion import Completion
from gateway.aside import aside
from gateway.errors import ClientLeft
from gateway.text.json_pieces import chunks_of

Answer = TypeVar("Answer")

_JSON = "application/json"


async def answer(http: Request, completion: Completion, headers: dict[str, str]) -> Response:
    """Submit a completion and return its HTTP response.

    Raises the errors of `Completion.submit`, ClientLeft, DeadlinePassed or the error of a choice.
    """
    completion.submit()
    stream: EventStream | None = None
    try:
        if completion.request.stream:
            # An error before the first event is answered with its own status, not as an event.
            await unless_gone(http.receive, completion.begun())
            stream = EventStream(completion, headers)
            return stream
        return json_answer(await unless_gone(http.receive, completion.whole()), headers)
    finally:
        if stream is None:
            completion.close()


def json_answer(answer: dict[str, Any], headers: dict[str, str]) -> Response:
    """Return a JSON response. A long answer is encoded while it is sent, never as a whole in memory."""
    chunks = chunks_of(answer)
    first, second = next(chunks), next(chunks, None)
    if second is None:
        return Response(first, headers=headers, media_type=_JSON)
    return StreamingResponse(_written([first, second], chunks), headers=headers, media_type=_JSON)


async def _written(begun: list[bytes], rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in begun:
        yield chunk
    while chunk := await aside(next, rest, b""):
        yield chunk


class EventStream(StreamingResponse):
    """A response of server-sent events. However the stream ends, the completion and its sequences are closed."""

    def __init__(self, completion: Completion, headers: dict[str, str]):
        headers = headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(completion.events(), headers=headers, media_type="text/event-stream")
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()


async def unless_gone(receive: Callable[[], Awaitable[Any]], answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Await `answer` and return its result. If the client disconnects first, cancel `answer` and raise ClientLeft."""
    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientLeft("the client has disconnected")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
