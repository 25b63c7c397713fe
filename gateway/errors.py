"""The errors of the gateway, and the table that maps errors to REST errors."""

from __future__ import annotations

from typing import Any

from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, RequestError, SpireError


class BadParameter(InvalidRequest):
    """The parameter `param` of a request is wrong."""

    def __init__(self, param: str, message: str, code: str = "invalid_value"):
        super().__init__(message, param)
        self.code = code


def over_context(param: str, max_context: int, however: str) -> BadParameter:
    """Return the error for a request longer than the context, with the message by which clients recognize it."""
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
    """The request may come from a web page of another site, whose origin is not allowed."""


class NotJson(RequestError):
    """The request's content type is not JSON."""


class HeadTooLarge(RequestError):
    """The request has too many headers, or too long a query."""


class BodyTooLarge(RequestError):
    pass


class BodyTooSlow(RequestError):
    pass


class ClientLeft(RequestError):
    """The client has disconnected before the answer."""


class QueueFull(OutOfCapacity):
    """Too many sequences wait in the queue; a retry may succeed after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class OverQuota(QueueFull):
    """The API key has exceeded its quota of requests or tokens per minute."""


class DeadlinePassed(RequestError):
    """The request did not end before its deadline."""


class PeerLost(SpireError):
    """A model service disconnected or did not answer in time."""


class ReaderTooSlow(SpireError):
    """The client reads its answer too slowly: too much output is unread."""


class NoVerifier(SpireError):
    """No verifier is connected; a retry may succeed after `seconds` seconds."""

    def __init__(self, message: str, seconds: int = 0):
        super().__init__(message)
        self.retry_after = max(_RETRY_AFTER_SECONDS[503], seconds)


class ShuttingDown(SpireError):
    """This gateway is shutting down and refuses new requests."""


_TABLE: list[tuple[type[SpireError], int, str, str]] = [
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (ForeignPage, 403, "permission_error", "foreign_page"),
    (NotJson, 415, "invalid_request_error", "unsupported_media_type"),
    (UnknownModel, 404, "not_found_error", "model_not_found"),
    (HeadTooLarge, 431, "invalid_request_error", "head_too_large"),
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
# All HTTP statuses of responses; 307 and 405 come from the router.
STATUSES = sorted({200, 307, 405} | {status for _, status, _, _ in _TABLE})
_RETRY_AFTER_SECONDS = {429: 1, 503: 2}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return the JSON of an error. Unpaired surrogates, which UTF-8 cannot encode, are escaped."""
    words = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: word and word.encode(errors="backslashreplace").decode() for name, word in words.items()}}


def rest_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and JSON body for an error. Only the messages of SpireErrors are shown to clients."""
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            param, code = getattr(error, "param", None) or None, getattr(error, "code", code)
            return status, error_body(str(error), name, param, code)
    message = str(error) if isinstance(error, SpireError) else "internal error"
    return 500, error_body(message, "internal_error", None, "internal_error")


def error_headers(error: Exception, status: int) -> dict[str, str]:
    """Return the headers for an error: Retry-After if a retry may succeed, WWW-Authenticate for Unauthorized."""
    headers = {"WWW-Authenticate": error.challenge} if isinstance(error, Unauthorized) else {}
    if (seconds := getattr(error, "retry_after", _RETRY_AFTER_SECONDS.get(status))) is not None:
        headers["Retry-After"] = str(seconds)
    return headers
