"""API keys: admits requests that carry a key of the key file. Without a key file, all requests are admitted.

Every path but OPEN_PATHS needs a key. The checked path is the one that selects the route, so the Host header and the
rest of the URL cannot give access to another path. The key file is read again when it changes; while it cannot be
read, every key is refused. Does not know: quotas.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from gateway.errors import Unauthorized
from gateway.http.page import PATHS as PAGE_PATHS
from spire.errors import DataError, SpireError
from spire.service.keys import digest, read_keys

OPEN_PATHS = frozenset({"/health"}) | PAGE_PATHS

log = structlog.get_logger("gateway")


class Keys:
    """The API keys of a file, read again when it changes. Raises DataError if the file is unreadable or invalid."""

    def __init__(self, file: Path):
        self._file = file
        self._seen = _version(file)
        self._keys, wrong = read_keys(file)
        if wrong:
            raise DataError(f"{file}, line {wrong[0]}: not a name and a hash, as `spire key create` writes them")
        if not self._keys:
            log.warning("there are no API keys: every request is refused", file=str(file))

    def name_of(self, key: bytes) -> str | None:
        """Return the name of an API key, None if unknown. The time taken does not reveal whether the key is known."""
        self._refresh()
        presented = digest(key)
        names = [known.name for known in self._keys if hmac.compare_digest(known.digest, presented)]
        return names[-1] if names else None

    def _refresh(self) -> None:
        if (version := _version(self._file)) == self._seen:
            return
        self._seen = version
        try:
            self._keys, wrong = read_keys(self._file)
        except SpireError as error:
            log.error("no API keys: every request is refused", reason=str(error))
            self._keys, wrong = [], []
        if wrong:
            log.error("some lines are no API keys", file=str(self._file), lines=wrong)
        log.info("API keys read again", file=str(self._file), keys=len(self._keys))


def _version(file: Path) -> tuple[int, ...] | None:
    """Return metadata of a file that change whenever the file changes; None if there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Guard:
    """Admits requests by their API key; all requests if `keys` is None."""

    def __init__(self, keys: Keys | None):
        self._keys = keys

    @property
    def open_paths(self) -> frozenset[str] | None:
        """The paths that need no key; None if no path needs a key."""
        return None if self._keys is None else OPEN_PATHS

    def admit(self, scope: Mapping[str, Any]) -> str | None:
        """Return the name of the request's API key, None if the request needs no key. Raises Unauthorized."""
        if self._keys is None or scope["path"] in OPEN_PATHS:
            return None
        name = self._keys.name_of(_bearer(scope))
        if name is None:
            raise Unauthorized("this API key is not known here: it was revoked, or mistyped", 'error="invalid_token"')
        return name


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """Return the API key of a request. Raises Unauthorized unless one header `Authorization: Bearer KEY` came."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    if kind.lower() != b"bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send it in one header 'Authorization: Bearer KEY'")
    return bytes(key.strip())
