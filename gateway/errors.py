"""What can go wrong at the gateway, and the one table that turns it into REST errors."""

from __future__ import annotations

from typing import Any

from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, RequestError, SpireError


class BadParameter(InvalidRequest):
    """A request's parameter is wrong; `param` names it."""

    def __init__(self, param: str, message: str, code: str = "invalid_value"):
        super().__init__(message, param)
        self.code = code


def over_context(param: str, max_context: int, however: str) -> BadParameter:
    """A request is too long, in the words that clients look for when they want to shorten it."""
    message = f"This model's maximum context length is {max_context} tokens. However, {however}"
    return BadParameter(param, message, "context_length_exceeded")


class UnknownModel(RequestError):
    pass


class Unauthorized(RequestError):
    """No API key, or none that is known; `challenge` is what WWW-Authenticate says of it."""

    def __init__(self, message: str, problem: str = ""):
        super().__init__(message)
        self.challenge = ", ".join(['Bearer realm="spire"', *filter(None, [problem])])


class ForeignPage(RequestError):
    """A page that a browser was shown asks, and not one of this gateway's own or of an origin that may."""


class NotJson(RequestError):
    """The body is not declared to be JSON."""


class BodyTooLarge(RequestError):
    pass


class BodyTooSlow(RequestError):
    pass


class QueueFull(OutOfCapacity):
    """Too many wait already; `retry_after` seconds from now there may be room."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class OverQuota(QueueFull):
    """An API key has had what it may have for now."""


class DeadlinePassed(RequestError):
    """The request took longer than it may."""


class PeerLost(SpireError):
    """A model service went away or did not answer in time."""


class ReaderTooSlow(SpireError):
    """A client does not read what it is sent."""


class NoVerifier(SpireError):
    """No verifier can be reached now; in `seconds` there may be one."""

    def __init__(self, message: str, seconds: int = 0):
        super().__init__(message)
        self.retry_after = max(_RETRY_AFTER_SECONDS[503], seconds)


class ShuttingDown(SpireError):
    """This gateway takes nothing more."""


_TABLE: list[tuple[type[SpireError], int, str, str]] = [
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (ForeignPage, 403, "permission_error", "foreign_page"),
    (NotJson, 415, "invalid_request_error", "unsupported_media_type"),
    (UnknownModel, 404, "not_found_error", "model_not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
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
# Of a client that left before it was answered.
CLIENT_LEFT = 499
# Every status that is answered: 307 and 405 are the router's.
STATUSES = sorted({200, 307, 405, CLIENT_LEFT} | {status for _, status, _, _ in _TABLE})
_RETRY_AFTER_SECONDS = {429: 1, 503: 2}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def rest_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error. What is not Spire's own says nothing of the inside."""
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            param, code = getattr(error, "param", None) or None, getattr(error, "code", code)
            return status, error_body(str(error), name, param, code)
    message = str(error) if isinstance(error, SpireError) else "internal error"
    return 500, error_body(message, "internal_error", None, "internal_error")


def retry_after(error: Exception, status: int) -> dict[str, str]:
    """The header that says when to ask again; none where asking again is of no use."""
    seconds = getattr(error, "retry_after", _RETRY_AFTER_SECONDS.get(status))
    return {} if seconds is None else {"Retry-After": str(seconds)}
