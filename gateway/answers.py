"""A completion as an HTTP response: one JSON object, or server-sent events. Whoever leaves frees the sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.completion import Completion

_LEFT = 499


async def answer(http: Request, completion: Completion, headers: dict[str, str]) -> Response:
    """Submit the completion and answer it as its request asks. Raises OutOfCapacity or NoVerifier."""
    completion.submit()
    if completion.request.stream:
        return EventStream(completion, headers)
    try:
        whole = await _unless_gone(http.receive, completion.whole())
    finally:
        completion.close()
    return Response(status_code=_LEFT) if whole is None else JSONResponse(whole, headers=headers)


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


async def _unless_gone(receive: Callable[[], Awaitable[Any]], answer: Any) -> dict[str, Any] | None:
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
