"""The first layer of every HTTP exchange: request id, API key, a cap and a deadline on the body, response counts.

HEAD is answered as GET, without the body. The whole body is read here, before anything parses it, so no handler ever
holds more than the cap.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import structlog

from gateway.aside import asker
from gateway.errors import STATUSES, BodyTooLarge, BodyTooSlow, ForeignPage, NotJson, Unauthorized, rest_error
from gateway.http.browsers import ForeignPages
from gateway.http.keys import Guard
from gateway.metrics import Metrics

log = structlog.get_logger("gateway")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# The label of unknown paths in the response counts.
OTHER_PATH = "other"

_REQUEST_ID = b"x-request-id"
# The most bytes of a body over the cap that are read and discarded.
_MOST_DISCARDED = 64 * 1024 * 1024
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """An ASGI application around another.

    It adds `request_id` and `key_name` (None where no key is needed) to the request's state.
    """

    def __init__(
        self,
        app: App,
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

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(_REQUEST_ID, b"")
        if not _ACCEPTABLE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id.decode(), "key_name": None}
        path = scope["path"] if scope["path"] in self.paths else OTHER_PATH
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (_REQUEST_ID, request_id)]
                self.metrics.response(path, message["status"])
                log.debug(
                    "answered",
                    path=path,
                    status=message["status"],
                    request_id=state["request_id"],
                    key=state["key_name"],
                )
            await send(message)

        try:
            state["key_name"] = self.guard.admit(scope)
            asker.set(state["key_name"] or str((scope.get("client") or ("",))[0]))
            if self.pages:
                self.pages.check(scope)
            body = await self._body(receive, self.max_body_bytes)
        except Unauthorized as error:
            await self._discard(receive)
            await _refuse(error, send_with_id, [(b"www-authenticate", error.challenge.encode())])
            return
        except (ForeignPage, NotJson) as error:
            await self._discard(receive)
            await _refuse(error, send_with_id)
            return
        except (BodyTooLarge, BodyTooSlow) as error:
            await _refuse(error, send_with_id)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send_with_id)

    async def _discard(self, receive: Receive) -> None:
        """Read and drop the body: a client still sending when the connection closes gets a reset, not the answer."""
        with contextlib.suppress(BodyTooLarge, BodyTooSlow):
            await self._body(receive, most=0)

    async def _body(self, receive: Receive, most: int) -> bytes | None:
        """Return the whole body; None if the client has disconnected. Raises BodyTooLarge or BodyTooSlow."""
        chunks: list[bytes] = []
        size = 0
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


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, then what the client sends next."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def _refuse(error: Exception, send: Send, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    status, answer = rest_error(error)
    # Closing the connection tells the client to stop sending the body.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
