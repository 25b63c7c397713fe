"""The first layer for every HTTP request: request id, API key, size limit and timeout of the body, response counts.

HEAD is answered as GET, without the body. This layer reads the whole request body before it is parsed, so no handler
ever has more than `max_body_bytes` of a body in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re

import structlog
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.aside import asker
from gateway.errors import STATUSES, BodyTooLarge, BodyTooSlow, error_headers, rest_error
from gateway.http.browsers import ForeignPages
from gateway.http.keys import Guard
from gateway.metrics import Metrics
from spire.errors import RequestError

log = structlog.get_logger("gateway")

# The label of unknown paths in the response counts.
OTHER_PATH = "other"

_REQUEST_ID = b"x-request-id"
# The most bytes of a body over the limit that are read and discarded.
_MOST_DISCARDED = 64 * 1024 * 1024
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """ASGI middleware that checks API keys, reads request bodies and counts responses.

    Adds `request_id` and `key_name` (None where no key is needed) to the request's state.
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

        try:
            state["key_name"] = self.guard.admit(scope)
            asker.set(state["key_name"] or str((scope.get("client") or ("",))[0]))
            if self.pages:
                self.pages.check(scope)
            body = await self._body(receive, self.max_body_bytes)
        except RequestError as error:
            if not isinstance(error, BodyTooLarge | BodyTooSlow):
                # Read and dropped: a client still sending when the connection closes gets a reset, not the answer.
                with contextlib.suppress(BodyTooLarge, BodyTooSlow):
                    await self._body(receive, most=0)
            refusal = error_response(error)
            # Closing the connection tells the client to stop sending the body.
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send_with_id)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send_with_id)

    async def _body(self, receive: Receive, most: int) -> bytes | None:
        """Return the body, at most `most` bytes; None if the client disconnects. Raises BodyTooLarge or BodyTooSlow."""
        chunks, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self.body_deadline):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= most:
                        chunks.append(message.get("body", b""))
                    elif not message.get("more_body") or size > _MOST_DISCARDED:
                        raise BodyTooLarge(f"the request body may have {most} bytes")
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not arrive within {self.body_deadline:g} s") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` callable that yields `body` first, then later messages of the client."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def error_response(error: Exception) -> JSONResponse:
    """Return the HTTP response for an error."""
    status, body = rest_error(error)
    return JSONResponse(body, status, error_headers(error, status))
