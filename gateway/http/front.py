"""The first layer for every HTTP request: request id, API key, size limit and timeout of the body, response counts.

HEAD is answered as GET, without the body. This layer reads the whole request body before it is parsed, so no handler
ever has more than `max_body_bytes` of a body in memory. The sizes of an asker's bodies count until their requests end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from typing import Any

import structlog
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.aside import asker
from gateway.errors import STATUSES, BodyTooLarge, BodyTooSlow, HeadTooLarge, OverQuota, error_headers, rest_error
from gateway.http.browsers import ForeignPages
from gateway.http.keys import Guard
from gateway.metrics import Metrics
from spire.errors import RequestError

log = structlog.get_logger("gateway")

# The label of unknown paths in the response counts.
OTHER_PATH = "other"

_REQUEST_ID = b"x-request-id"
# The most bytes of a refused request's body that are read, to be discarded.
_MOST_DISCARDED = 64 * 1024 * 1024
# The most headers of a request, and bytes of its query: uvicorn and FastAPI take microseconds for each of them.
_MOST_HEADERS, _MOST_QUERY_BYTES = 256, 1024
# The bodies of one asker's requests may together be as large as this many bodies of the largest size.
_MOST_BODIES = 64
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """ASGI middleware that checks API keys, reads request bodies and counts responses.

    Adds `request_id`, `key_name` (None where no key is needed) and `body`, to be taken once, to the request's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        guard: Guard,
        paths: frozenset[str],
        max_body_bytes: int,
        body_deadline: float,
        pages: ForeignPages | None = None,
    ):
        self.app, self.metrics, self.guard, self.paths = app, metrics, guard, paths
        self.max_body_bytes, self.body_deadline = max_body_bytes, body_deadline
        # The bytes of the bodies of requests in progress, by asker.
        self._held = Counter[str]()
        # None if API keys are required: a foreign page has no key.
        self.pages = pages
        metrics.expect_responses([*paths, OTHER_PATH], STATUSES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(_REQUEST_ID, b"")
        if not _ACCEPTABLE_ID.fullmatch(request_id):
            request_id = b"%032x" % random.getrandbits(128)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id.decode(), "key_name": None}
        path = scope["path"] if scope["path"] in self.paths else OTHER_PATH
        if head := scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (_REQUEST_ID, request_id)]
                status, key = message["status"], state["key_name"]
                self.metrics.response(path, status)
                log.debug("answered", path=path, status=status, request_id=state["request_id"], key=key)
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        incoming = Incoming(receive)
        with contextlib.closing(Holding(self._held, self.max_body_bytes * _MOST_BODIES)) as holding:
            try:
                self._admit(scope, state)
                state["body"] = await self._body(incoming, holding)
            except RequestError as error:
                await self._refuse(error, incoming, scope, send_with_id)
                return
            if state["body"] is not None:
                await self.app(scope, receive, send_with_id)

    def _admit(self, scope: Scope, state: dict[str, Any]) -> None:
        """Check a request's head, key and origin, and set the asker. Raises the RequestError of what is refused."""
        headers, query = len(scope["headers"]), len(scope.get("query_string", b""))
        if headers > _MOST_HEADERS or query > _MOST_QUERY_BYTES:
            limits = f"{_MOST_HEADERS} headers and {_MOST_QUERY_BYTES} bytes behind the question mark"
            raise HeadTooLarge(f"a request may have {limits}; this one has {headers} and {query}")
        state["key_name"] = self.guard.admit(scope)
        asker.set(state["key_name"] or str((scope.get("client") or ("",))[0]))
        if self.pages:
            self.pages.check(scope)

    async def _body(self, incoming: Incoming, holding: Holding) -> bytes | None:
        """Return the body; None if the client disconnects.

        Raises BodyTooLarge, BodyTooSlow, or OverQuota if the asker's other bodies leave no room.
        """
        chunks = list[bytes]()
        try:
            async with asyncio.timeout(self.body_deadline):
                while not incoming.over:
                    chunks.append(await incoming.next())
                    if incoming.size > self.max_body_bytes:
                        raise BodyTooLarge(f"the request body may have {self.max_body_bytes} bytes")
                    holding.add(len(chunks[-1]))
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not arrive within {self.body_deadline:g} s") from None
        return None if incoming.left else b"".join(chunks)

    async def _refuse(self, error: RequestError, incoming: Incoming, scope: Scope, send: Send) -> None:
        """Send the refusal at once, then discard the rest of the body, within the body's deadline.

        Were the connection closed while the client still sends, the client would get a reset instead of the answer.
        """

        async def send_and_stay(message: Message) -> None:
            await send({**message, "more_body": True})

        refusal = error_response(error)
        # Closing the connection tells the client to stop sending the body.
        refusal.headers["Connection"] = "close"
        await refusal(scope, incoming.receive, send_and_stay)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if isinstance(error, BodyTooSlow) else self.body_deadline):
                while not incoming.over and incoming.size <= _MOST_DISCARDED:
                    await incoming.next()
        await send({"type": "http.response.body", "body": b""})


class Incoming:
    """A request's body, read chunk by chunk. `over`: no more of it comes, be it that the client has `left`."""

    def __init__(self, receive: Receive):
        self.receive = receive
        self.over = self.left = False
        self.size = 0

    async def next(self) -> bytes:
        """Return the next chunk, which may be empty."""
        message = await self.receive()
        chunk: bytes = message.get("body", b"")
        self.left = message["type"] == "http.disconnect"
        self.over = self.left or not message.get("more_body")
        self.size += len(chunk)
        return chunk


class Holding:
    """The bytes of one request's body, which count for the current asker until `close`."""

    def __init__(self, held: Counter[str], most: int):
        self._held, self._most = held, most
        self._who, self._bytes = "", 0

    def add(self, count: int) -> None:
        """Count more bytes of the body. Raises OverQuota if the asker's requests then hold more than they may."""
        self._who = asker.get()
        if self._held[self._who] + count > self._most:
            limit = f"the bodies of your requests in progress may have {self._most} bytes together"
            raise OverQuota(f"{limit}: wait for some of the requests", 1)
        self._held[self._who] += count
        self._bytes += count

    def close(self) -> None:
        self._held[self._who] -= self._bytes
        if not self._held[self._who]:
            del self._held[self._who]


def error_response(error: Exception) -> JSONResponse:
    """Return the HTTP response for an error."""
    status, body = rest_error(error)
    return JSONResponse(body, status, error_headers(error, status))
