"""API keys: admits requests that carry a key of the key file. Without a key file, all requests are admitted.

Every path but OPEN_PATHS needs a key. The path checked is the one that routes are chosen by, so nothing that a client
writes into Host or around the path opens another path. The file is read again when it changes; while it cannot be
read, no key is admitted. Does not know: how much a key may request.
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
    """The current keys of a file. Raises DataError if the file cannot be read or has a line that is no key."""

    def __init__(self, file: Path):
        self._file = file
        self._seen = _version(file)
        self._keys, wrong = read_keys(file)
        if wrong:
            raise DataError(f"{file}, line {wrong[0]}: not a name and a hash, as `spire key create` writes them")
        if not self._keys:
            log.warning("there are no API keys: every request is refused", file=str(file))

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, None for an unknown key. Takes as long for an unknown key as for a known one."""
        self._refresh()
        presented, found = digest(key), None
        for known in self._keys:
            if hmac.compare_digest(known.digest, presented):
                found = known.name
        return found

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
    """Return values that differ after a change of the file; None while there is no file."""
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
        """Return the name of the request's key, None if the request needs no key. Raises Unauthorized."""
        if self._keys is None or scope["path"] in OPEN_PATHS:
            return None
        name = self._keys.name_of(_bearer(scope))
        if name is None:
            raise Unauthorized("this API key is not known here: it was revoked, or mistyped", 'error="invalid_token"')
        return name


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """Return the key of a request. Raises Unauthorized if the request has none or several Authorization headers."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    if kind.lower() != b"bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send it in one header 'Authorization: Bearer KEY'")
    return bytes(key.strip())
