"""The errors of the gateway, and the one table that turns errors into REST errors."""

from __future__ import annotations

from typing import Any

from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, RequestError, SpireError


class BadParameter(InvalidRequest):
    """The parameter `param` of a request is wrong."""

    def __init__(self, param: str, message: str, code: str = "invalid_value"):
        super().__init__(message, param)
        self.code = code


def over_context(param: str, max_context: int, however: str) -> BadParameter:
    """Return the error for a request that is too long, in the words by which clients know that they can shorten it."""
    message = f"This model's maximum context length is {max_context} tokens. However, {however}"
    return BadParameter(param, message, "context_length_exceeded")


class UnknownModel(RequestError):
    pass


class Unauthorized(RequestError):
    """The API key is missing or unknown; `challenge` is the value of the WWW-Authenticate header."""

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.challenge = ", ".join(['Bearer realm="spire"', *filter(None, [problem])])


class ForeignPage(RequestError):
    """The request may come from a foreign web page: neither this gateway's own nor one of an allowed origin."""


class NotJson(RequestError):
    """The body is not declared to be JSON."""


class BodyTooLarge(RequestError):
    pass


class BodyTooSlow(RequestError):
    pass


class ClientLeft(RequestError):
    """The client has disconnected before the answer."""


class QueueFull(OutOfCapacity):
    """Too many sequences wait already; there may be room in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class OverQuota(QueueFull):
    """An API key has used up its requests or tokens for now."""


class DeadlinePassed(RequestError):
    """The request took longer than its deadline allows."""


class PeerLost(SpireError):
    """A model service went away or did not answer in time."""


class ReaderTooSlow(SpireError):
    """A client leaves too much of its answer unread."""


class NoVerifier(SpireError):
    """No verifier can be reached now; there may be one in `seconds`."""

    def __init__(self, message: str, seconds: int = 0):
        super().__init__(message)
        self.retry_after = max(_RETRY_AFTER_SECONDS[503], seconds)


class ShuttingDown(SpireError):
    """This gateway shuts down and takes no more requests."""


_TABLE: list[tuple[type[SpireError], int, str, str]] = [
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (ForeignPage, 403, "permission_error", "foreign_page"),
    (NotJson, 415, "invalid_request_error", "unsupported_media_type"),
    (UnknownModel, 404, "not_found_error", "model_not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (ClientLeft, 499, "invalid_request_error", "client_left"),
    (ReaderTooSlow, 408, "invalid_request_error", "reader_too_slow"),
    (OverQuota, 429, "rate_limit_error", "rate_limit_exceeded"),
    (OutOfCapacity, 429, "rate_limit_error", "queue_full"),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (NoVerifier, 503, "unavailable_error", "no_verifier"),
    (ShuttingDown, 503, "unavailable_error", "shutting_down"),
    (PeerLost, 503, "unavailable_error", "verifier_lost"),
    (DeadlinePassed, 504, "timeout_error", "deadline_passed"),
    (NotFinite, 500, "internal_error", "not_finite"),
]
# Every status of a response; 307 and 405 are the router's.
STATUSES = sorted({200, 307, 405} | {status for _, status, _, _ in _TABLE})
_RETRY_AFTER_SECONDS = {429: 1, 503: 2}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def rest_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of an error. An error that is not Spire's own reveals no internals."""
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            param, code = getattr(error, "param", None) or None, getattr(error, "code", code)
            return status, error_body(str(error), name, param, code)
    message = str(error) if isinstance(error, SpireError) else "internal error"
    return 500, error_body(message, "internal_error", None, "internal_error")


def error_headers(error: Exception, status: int) -> dict[str, str]:
    """Return the headers of an error: when to ask again, if that is of any use, and how to name an API key."""
    headers = {"WWW-Authenticate": error.challenge} if isinstance(error, Unauthorized) else {}
    if (seconds := getattr(error, "retry_after", _RETRY_AFTER_SECONDS.get(status))) is not None:
        headers["Retry-After"] = str(seconds)
    return headers
