"""API keys in a file: one line per key, with a name and the key's SHA-256. The key itself is not stored.

    alice 5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5

A key is 256 random bits and cannot be guessed, so a fast hash protects it as well as a slow one. Lines beginning with #
are comments. Several lines may have the same name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from spire.errors import DataError, SpireError
from spire.files import write_whole

# Environment variables of the API key for a gateway, and of the one for another server (`spire bench --against`).
GATEWAY_KEY, FOREIGN_KEY = "SPIRE_API_KEY", "SPIRE_AGAINST_API_KEY"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"({_NAME.pattern})[ \t]+([0-9a-f]{{64}})")
_SENDABLE = re.compile(r"[\x21-\x7e]*")


class KnownKey(NamedTuple):
    name: str
    digest: bytes


def refuse_open_address(address: str) -> None:
    """Raise SpireError if other machines can reach `address`, the IP address of a gateway without API keys."""
    if not ip_address(address.split("%")[0]).is_loopback:
        raise SpireError(
            f"other machines can reach {address}, and no API keys are asked for: make one with "
            "`spire key create NAME --file FILE` and start with --keys FILE, or serve everybody with --without-keys"
        )


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of an API key, which is stored instead of the key."""
    return hashlib.sha256(key).digest()


def read_keys(file: Path) -> tuple[list[KnownKey], list[int]]:
    """Return the API keys in a file and the numbers of its invalid lines. Raises DataError if it cannot be read."""
    keys, wrong = [], []
    for number, line in enumerate(_lines(file), 1):
        if found := _LINE.fullmatch(line.strip()):
            keys.append(KnownKey(found[1], bytes.fromhex(found[2])))
        elif line.strip() and not line.startswith("#"):
            wrong.append(number)
    return keys, wrong


def create_key(name: str, file: Path) -> str:
    """Create an API key, add its hash to `file` and return the key, which cannot be recovered. Raises DataError."""
    if not _NAME.fullmatch(name):
        raise DataError(f"{name!r} is no name for a key: up to 64 letters, digits, '.', '_' and '-'")
    key = f"spire-{secrets.token_urlsafe(32)}"
    with _one_at_a_time(file, make=True):
        lines = _lines(file) if file.exists() else []
        if any(_name_of(line) == name for line in lines):
            raise DataError(f"{file} has a key named {name!r}: choose another name, or revoke that one first")
        _write(file, [*lines, f"{name} {digest(key.encode()).hex()}"])
    return key


def revoke_key(name: str, file: Path) -> int:
    """Remove all API keys called `name` from `file`; return their number. Raises DataError if no key has this name."""
    with _one_at_a_time(file):
        lines = _lines(file)
        kept = [line for line in lines if _name_of(line) != name]
        if kept == lines:
            raise DataError(f"{file} has no key named {name!r}")
        _write(file, kept)
    return len(lines) - len(kept)


def authorization(variable: str = GATEWAY_KEY) -> dict[str, str]:
    """Return the Authorization header for the API key in an environment variable; {} if unset. Raises DataError."""
    key = os.environ.get(variable, "").strip()
    if not _SENDABLE.fullmatch(key):
        raise DataError(f"{variable} holds characters that no API key has")
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def _one_at_a_time(file: Path, make: bool = False) -> Iterator[None]:
    """Lock the directory of `file`, so that no other process changes the file between reading and replacing it.

    `make`: create the directory if it does not exist. Raises DataError.
    """
    parent = file.resolve().parent
    try:
        if make:
            parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"the keys in {file} cannot be changed: {error}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the keys in {file} cannot be read: {error}") from error


def _name_of(line: str) -> str:
    return line.split(maxsplit=1)[0] if line.strip() else ""


def _write(file: Path, lines: list[str]) -> None:
    file = file.resolve()
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600

    def write(unfinished: Path) -> None:
        unfinished.touch(mode)
        unfinished.chmod(mode)
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    write_whole(file, write)
