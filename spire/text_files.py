"""Files as people keep text: plain, compressed, in archives, in directories. They are opened as streams of bytes.

A name's end decides, in capitals or not: .gz, .xz and .bz2 are unpacked on the way, .tar and .zip hold further files.
Of a directory or an archive those files count that are text by their names; one that is named itself is read as text.
What it does not know: encodings, and archives in archives.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from spire.errors import DataError

_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_SHORT = {".tgz": ".tar.gz", ".txz": ".tar.xz", ".tbz2": ".tar.bz2"}
_JSON_LINES, _TEXT, _TAR, _ZIP = {".jsonl", ".ndjson"}, {".txt", ".text", ".md"}, ".tar", ".zip"
_NOT_TEXT = {
    ".json": "write one object a line, as .jsonl",
    ".csv": "write one object a line, as .jsonl",
    ".tsv": "write one object a line, as .jsonl",
    ".parquet": "write it as .jsonl",
    ".arrow": "write it as .jsonl",
    ".zst": "unpack it, or pack it as .gz or .xz",
    ".7z": "unpack it, or pack it as .zip or .tar.xz",
    ".rar": "unpack it, or pack it as .zip or .tar.xz",
}
_BLOCK = 512

Told = Callable[[int], None]


@dataclass(frozen=True)
class TextFile:
    """A file by its name for messages, and its bytes, unpacked. The stream ends with the iteration that gave it."""

    name: str
    json_lines: bool
    stream: IO[bytes]


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Each path, or the text files under it in the order of their names. Raises DataError naming what is not there."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist: --data takes text, JSONL, directories or archives of them")
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in _walk(path) if _is_text(file.name))
        if not inside:
            raise DataError(f"{path} holds no .txt or .jsonl file: name archives and files of other names themselves")
        found += inside
    return found


def bytes_to_read(files: Iterable[Path]) -> int:
    """What reading all of them takes: a compressed .tar is read through for its contents first."""
    return sum(file.stat().st_size * (2 if _is_packed_tar(*_suffix(file.name)) else 1) for file in files)


def text_files(files: Iterable[Path], told: Told = lambda _: None) -> Iterator[TextFile]:
    """The files, and those in archives by their names; `told` hears of the bytes that were read from the disk.

    Raises DataError naming a file that cannot be read.
    """
    for path in files:
        suffix, _ = _suffix(path.name)
        if advice := _NOT_TEXT.get(suffix):
            raise DataError(f"{path} is {suffix}, which is not read: {advice}")
        with open_unpacked(path, told) as stream:
            if suffix == _TAR:
                yield from _in_tar(str(path), stream)
            elif suffix == _ZIP:
                yield from _in_zip(str(path), stream)
            else:
                yield TextFile(str(path), suffix in _JSON_LINES, stream)


@contextmanager
def open_unpacked(path: Path, told: Told = lambda _: None) -> Iterator[IO[bytes]]:
    """The bytes of a file as they were before it was compressed. Raises DataError naming it."""
    with reading(str(path)), _Counted(path, told) as raw, io.BufferedReader(raw) as file:
        yield _unpacked(file, path.name)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns what reading a file raises into one line that names it."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{name} is cut off: it ends before what was compressed does. Copy it again") from error
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} is damaged or cut off ({error}): copy it again") from error
    except (zipfile.LargeZipFile, NotImplementedError, RuntimeError) as error:  # a password, another compression
        raise DataError(f"{name} cannot be unpacked: {error}") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


class _Counted(io.FileIO):
    """A file that tells how much of it was read."""

    def __init__(self, path: Path, told: Told):
        super().__init__(path)
        self._told = told

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._told(count or 0)
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._told(len(data))
        return data


def _walk(directory: Path) -> Iterator[Path]:
    """Files under it, through links too; what leads back to a directory that was seen is left out."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen: set[str] = set()
    for parent, below, names in os.walk(directory, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(parent))
        below[:] = sorted(name for name in below if os.path.realpath(Path(parent, name)) not in seen)
        yield from (Path(parent, name) for name in names)


def _suffix(name: str) -> tuple[str, str]:
    """What a file is by its name, without what it is compressed by; and that, which may be empty."""
    lower = name.lower()
    for short, whole in _SHORT.items():
        lower = lower.removesuffix(short) + whole if lower.endswith(short) else lower
    path = PurePosixPath(lower)
    if path.suffix in _UNPACKERS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def _is_packed_tar(suffix: str, compressed: str) -> bool:
    return suffix == _TAR and bool(compressed)


def _is_text(name: str) -> bool:
    """Whether a file that was not named is meant. ._name is what macOS keeps beside a file of that name."""
    return not name.startswith("._") and _suffix(name)[0] in _TEXT | _JSON_LINES


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    _, compressed = _suffix(name)
    unpacked: IO[bytes] = _UNPACKERS[compressed](file) if compressed else file
    return unpacked


def _in_tar(name: str, stream: IO[bytes]) -> Iterator[TextFile]:
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        members = [member for member in archive.getmembers() if member.isfile() and _is_text(Path(member.name).name)]
        stream.seek(archive.offset)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise DataError(f"{name} is damaged or cut off (it has no end): copy it again")
        if not members:
            raise DataError(f"{name} holds no .txt or .jsonl file")
        for member in sorted(members, key=lambda member: member.name):
            packed = archive.extractfile(member)
            assert packed is not None  # it is a file
            yield TextFile(f"{name}:{member.name}", _is_json_lines(member.name), _unpacked(packed, member.name))


def _in_zip(name: str, stream: IO[bytes]) -> Iterator[TextFile]:
    with zipfile.ZipFile(stream) as archive:
        members = [info for info in archive.infolist() if not info.is_dir() and _is_text(Path(info.filename).name)]
        if not members:
            raise DataError(f"{name} holds no .txt or .jsonl file")
        for info in sorted(members, key=lambda info: info.filename):
            with archive.open(info) as packed:
                inside = _unpacked(packed, info.filename)
                yield TextFile(f"{name}:{info.filename}", _is_json_lines(info.filename), inside)


def _is_json_lines(name: str) -> bool:
    return _suffix(name)[0] in _JSON_LINES
