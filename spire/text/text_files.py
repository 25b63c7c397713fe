"""Text files as streams of bytes: plain, compressed, in archives, and in directories.

The suffix of a file's name, in upper or lower case, is its format: .gz, .xz and .bz2 are decompressed while reading,
.tar and .zip hold further files. In directories and archives only files with the suffix of a text file are read; a file
given by its own name needs no such suffix. Does not know: encodings, and archives in archives.
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
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from spire.errors import DataError

_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_SHORT = {".tgz": ".tar.gz", ".txz": ".tar.xz", ".tbz2": ".tar.bz2"}
_JSON_LINES, _TEXT, _TAR, _ZIP = {".jsonl", ".ndjson"}, {".txt", ".text", ".md"}, ".tar", ".zip"
_NOT_TEXT = {
    **dict.fromkeys((".json", ".csv", ".tsv"), "write one object a line, as .jsonl"),
    **dict.fromkeys((".parquet", ".arrow"), "write it as .jsonl"),
    **dict.fromkeys((".7z", ".rar"), "unpack it, or pack it as .zip or .tar.xz"),
    ".zst": "unpack it, or pack it as .gz or .xz",
}
_BLOCK = 512

Told = Callable[[int], None]


class TextFile(NamedTuple):
    """A file's name for messages and a stream of its unpacked bytes, valid until `text_files` yields the next file."""

    name: str
    json_lines: bool
    stream: IO[bytes]


def find_files(paths: Iterable[Path], option: str = "--data") -> list[Path]:
    """Replace directories in `paths` by their sorted text files. Raises DataError for missing paths or no text file.

    `option` names the option that `paths` were given with.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist: {option} takes text, JSONL, directories or archives of them")
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in _walk(path) if _is_text(file.name))
        if not inside:
            raise DataError(f"{path} holds no .txt or .jsonl file: name archives and files of other names themselves")
        found += inside
    return found


def bytes_to_read(files: Iterable[Path]) -> int:
    """Return the number of bytes to read for all files. A compressed .tar counts twice: its index is read first."""
    packed_tars = {(_TAR, packed) for packed in _UNPACKERS}
    return sum(file.stat().st_size * (2 if _suffix(file.name) in packed_tars else 1) for file in files)


def is_json_lines(file: Path) -> bool:
    """True for a file of JSON lines, compressed or not."""
    return _suffix(file.name)[0] in _JSON_LINES


def text_files(files: Iterable[Path], told: Told = lambda _: None) -> Iterator[TextFile]:
    """Yield each file or an archive's text files, sorted by name. Each read from disk calls `told` with its byte count.

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
                with zipfile.ZipFile(stream) as archive:
                    members = [(info.filename, info) for info in archive.infolist() if not info.is_dir()]
                    yield from _texts_in(str(path), members, archive.open)
            else:
                yield TextFile(str(path), suffix in _JSON_LINES, stream)


@contextmanager
def open_unpacked(path: Path, told: Told = lambda _: None) -> Iterator[IO[bytes]]:
    """Open a file and decompress it while reading. Raises DataError naming the file."""
    with reading(str(path)), _Counted(path, told) as raw, io.BufferedReader(raw) as file:
        yield _unpacked(file, path.name)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert the errors of reading a file into a DataError with one line that names the file."""
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
    """A file that calls `told` with the number of bytes of each read."""

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
    """Yield the files under `directory`, following symbolic links except into directories already visited."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen: set[str] = set()
    for parent, below, names in os.walk(directory, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(parent))
        below[:] = sorted(name for name in below if os.path.realpath(Path(parent, name)) not in seen)
        yield from (Path(parent, name) for name in names)


def _suffix(name: str) -> tuple[str, str]:
    """Return the lower-case suffixes of a file's format and of its compression, such as .tar and .gz; "" for none."""
    lower = name.lower()
    for short, whole in _SHORT.items():
        lower = lower.removesuffix(short) + whole if lower.endswith(short) else lower
    path = PurePosixPath(lower)
    if path.suffix in _UNPACKERS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def _is_text(name: str) -> bool:
    """True if `name`, found in a directory or archive, names a text file. `._name` files are metadata of macOS."""
    return not name.startswith("._") and _suffix(name)[0] in _TEXT | _JSON_LINES


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    compressed = _suffix(name)[1]
    return _UNPACKERS[compressed](file) if compressed else file


def _in_tar(name: str, stream: IO[bytes]) -> Iterator[TextFile]:
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        members = [(member.name, member) for member in archive.getmembers() if member.isfile()]
        stream.seek(archive.offset)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise DataError(f"{name} is damaged or cut off (it has no end): copy it again")
        yield from _texts_in(name, members, archive.extractfile)


def _texts_in(name: str, members: list[tuple[str, Any]], opened: Callable[[Any], Any]) -> Iterator[TextFile]:
    """Yield the text files among an archive's members, sorted by name. Raises DataError if there is no text file."""
    texts = [(inside, member) for inside, member in members if _is_text(Path(inside).name)]
    if not texts:
        raise DataError(f"{name} holds no .txt or .jsonl file")
    for inside, member in sorted(texts, key=lambda text: text[0]):
        with opened(member) as packed:
            yield TextFile(f"{name}:{inside}", _suffix(inside)[0] in _JSON_LINES, _unpacked(packed, inside))
