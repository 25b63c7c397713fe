"""The first layer of every HTTP exchange: request id, a cap and a deadline on the body, the count of responses.

The body is read here whole, before anything parses it, so no handler ever holds more than the cap.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.errors import BodyTooLarge, BodyTooSlow, rest_error
from gateway.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_REQUEST_ID = b"x-request-id"
# Of a body over the cap this much is read and thrown away: who still sends when the connection is closed gets a reset
# instead of the answer.
_MOST_DISCARDED = 64 * 1024 * 1024
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Front:
    """An ASGI application around another."""

    def __init__(self, app: App, metrics: Metrics, paths: frozenset[str], max_body_bytes: int, body_deadline: float):
        self.app, self.metrics, self.paths = app, metrics, paths
        self.max_body_bytes, self.body_deadline = max_body_bytes, body_deadline

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(_REQUEST_ID, b"")
        if not _ACCEPTABLE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (_REQUEST_ID, request_id)]
                self.metrics.response(path, message["status"])
            await send(message)

        try:
            body = await self._body(receive)
        except (BodyTooLarge, BodyTooSlow) as error:
            await _refuse(error, send_with_id)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send_with_id)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None when the client has left. Raises BodyTooLarge or BodyTooSlow."""
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.body_deadline):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= self.max_body_bytes:
                        chunks.append(message.get("body", b""))
                    elif not message.get("more_body") or size > _MOST_DISCARDED:
                        raise BodyTooLarge(f"the request body may have {self.max_body_bytes} bytes")
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise BodyTooSlow(f"the request body did not arrive within {self.body_deadline:g} s") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever the client does next."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def _refuse(error: Exception, send: Send) -> None:
    status, answer = rest_error(error)
    # Closing tells the client to stop sending the rest.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
