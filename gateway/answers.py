"""A completion as an HTTP response: one JSON object, or server-sent events. Whoever leaves frees the sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.completion import Completion
from gateway.errors import CLIENT_LEFT

Answer = TypeVar("Answer")


async def answer(http: Request, completion: Completion, headers: dict[str, str]) -> Response:
    """Submit the completion and answer it as its request asks. Raises QueueFull, InvalidRequest or NoVerifier."""
    completion.submit()
    begun: EventStream | None = None
    try:
        if completion.request.stream:
            # What is refused at once has a status of its own instead of an event.
            if await _unless_gone(http.receive, completion.begun()):
                begun = EventStream(completion, headers)
            return begun or Response(status_code=CLIENT_LEFT)
        whole = await _unless_gone(http.receive, completion.whole())
        return Response(status_code=CLIENT_LEFT) if whole is None else JSONResponse(whole, headers=headers)
    finally:
        if begun is None:
            completion.close()


class EventStream(StreamingResponse):
    """Server-sent events; whoever leaves, and however, the sequences are freed."""

    def __init__(self, completion: Completion, headers: dict[str, str]):
        headers = headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(completion.events(), headers=headers, media_type="text/event-stream")
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()


async def _unless_gone(receive: Callable[[], Awaitable[Any]], answer: Coroutine[Any, Any, Answer]) -> Answer | None:
    """The answer; None when the client left before it came."""
    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
