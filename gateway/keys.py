"""Who may ask: whoever sends a key of the file. Without a file of keys everybody may.

Every path needs one but those that are open, and the path is the one that routes are chosen by: what a client writes
into Host or around the path opens nothing. The file is read again when it has changed; what cannot be read lets nobody
in. What it does not know: how much a key may ask.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from gateway.errors import Unauthorized
from gateway.page import PATHS as PAGE_PATHS
from spire.errors import DataError, SpireError
from spire.keys import KnownKey, digest, read_keys

OPEN_PATHS = frozenset({"/health"}) | PAGE_PATHS

log = structlog.get_logger("gateway")


class Keys:
    """The keys of a file as they are now. Raises DataError when there is no such file, or what it holds are no keys."""

    def __init__(self, file: Path):
        self._file = file
        self._seen = _version(file)
        self._keys, wrong = read_keys(file)
        if wrong:
            raise DataError(f"{file}, line {wrong[0]}: not a name and a hash, as `spire key create` writes them")
        if not self._keys:
            log.warning("there are no API keys: every request is refused", file=str(file))

    def name_of(self, key: bytes) -> str | None:
        """Whose key this is; None when it is nobody's. Takes as long for a wrong key as for any other."""
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
        self._keys = self._read_again()
        log.info("API keys read again", file=str(self._file), keys=len(self._keys))

    def _read_again(self) -> list[KnownKey]:
        try:
            keys, wrong = read_keys(self._file)
        except SpireError as error:
            log.error("no API keys: every request is refused", reason=str(error))
            return []
        if wrong:
            log.error("some lines are no API keys", file=str(self._file), lines=wrong)
        return keys


def _version(file: Path) -> tuple[int, ...] | None:
    """What differs after a change; None while there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Guard:
    """Admits requests. `keys` is None where everybody may ask."""

    def __init__(self, keys: Keys | None):
        self._keys = keys

    @property
    def open_paths(self) -> frozenset[str] | None:
        """Those that need no key; None: all."""
        return None if self._keys is None else OPEN_PATHS

    def admit(self, scope: Mapping[str, Any]) -> str | None:
        """The name of the key that a request came with, None if it needs none. Raises Unauthorized."""
        if self._keys is None or scope["path"] in OPEN_PATHS:
            return None
        name = self._keys.name_of(_bearer(scope))
        if name is None:
            raise Unauthorized("this API key is not known here: it was revoked, or mistyped", 'error="invalid_token"')
        return name


def _bearer(scope: Mapping[str, Any]) -> bytes:
    """The key of a request. Raises Unauthorized when there is none, or more than one to choose from."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    if kind.lower() != b"bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send it in one header 'Authorization: Bearer KEY'")
    return bytes(key.strip())
