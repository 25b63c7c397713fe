"""Files of text in all the forms that people keep them in: found, unpacked, and named when they are damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from spire.errors import DataError
from spire.text.documents import Chats, read_documents
from spire.text.prompts import read_prompts
from spire.text.text_files import bytes_to_read, find_files

FILES = {"b/two.txt": b"second", "a.jsonl": b'{"text": "first"}\n', "._a.jsonl": b"\x00\x05", "notes.pdf": b"%PDF"}
TEXTS = ["first", "second"]


def tar(files: dict[str, bytes] = FILES) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def packed_zip(files: dict[str, bytes] = FILES) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "books.tar": tar,
    "books.tar.gz": lambda: gzip.compress(tar()),
    "BOOKS.TGZ": lambda: gzip.compress(tar()),
    "books.tar.xz": lambda: lzma.compress(tar()),
    "books.tar.bz2": lambda: bz2.compress(tar()),
    "books.zip": packed_zip,
    "within.tar": lambda: tar({"a.JSONL.gz": gzip.compress(FILES["a.jsonl"]), "b.txt.xz": lzma.compress(b"second")}),
}
ALONE: dict[str, Callable[[], bytes]] = {
    "TEXT.TXT": lambda: b"second",
    "text.TXT.GZ": lambda: gzip.compress(b"second"),
    "text.txt.xz": lambda: lzma.compress(b"second"),
    "text.txt.bz2": lambda: bz2.compress(b"second"),
    "notes.md": lambda: b"second",
    "README": lambda: b"second",
    "lines.JSONL": lambda: b'{"text": "second"}',
    "lines.ndjson.gz": lambda: gzip.compress(b'{"text": "second"}'),
    "two_streams.txt.gz": lambda: gzip.compress(b"sec") + gzip.compress(b"ond"),
}


def texts(*paths: Path) -> list[str]:
    return list(read_documents(find_files(paths), Chats(paths[0].parent)))


def kept(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_gives_its_texts_in_the_order_of_their_names(name: str, tmp_path: Path) -> None:
    assert texts(kept(tmp_path / name, ARCHIVES[name]())) == TEXTS


@pytest.mark.parametrize("name", ALONE)
def test_a_file_is_read_by_its_suffix_in_capitals_or_not(name: str, tmp_path: Path) -> None:
    assert texts(kept(tmp_path / name, ALONE[name]())) == ["second"]


@pytest.mark.parametrize("name", [*ARCHIVES, "text.TXT.GZ", "text.txt.xz", "text.txt.bz2", "lines.ndjson.gz"])
@given(share=st.floats(0, 1, exclude_max=True))
def test_what_is_cut_off_anywhere_is_named_or_was_whole(
    name: str, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = (ARCHIVES | ALONE)[name]()
    expected = ["second"] if name in ALONE else TEXTS
    path = kept(tmp_path_factory.mktemp("cut") / name, whole[: int(share * len(whole))])
    try:
        said, read = "", texts(path)
    except DataError as error:
        said, read = str(error), expected
    assert read == expected
    assert not said or str(path) in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["prompts.jsonl.gz", "prompts.txt.xz"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_prompts_that_are_cut_off_are_named(name: str, share: float, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(2000)).encode()
    whole = gzip.compress(lines) if name.endswith("gz") else lzma.compress(lines)
    path = kept(tmp_path / name, whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=rf"{name} is cut off"):
        list(read_prompts([path]))


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 4])
def test_a_tar_archive_that_ends_between_its_files_is_cut_off(blocks: int, tmp_path: Path) -> None:
    """Where nothing is compressed only the missing end tells."""
    with pytest.raises(DataError, match=r"books\.tar is damaged or cut off"):
        texts(kept(tmp_path / "books.tar", tar()[: 512 * blocks]))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(b"second" * 100, mtime=0))
    whole[-6] ^= 1
    with pytest.raises(DataError, match=r"text\.txt\.gz is damaged or cut off \(CRC check failed"):
        texts(kept(tmp_path / "text.txt.gz", bytes(whole)))


def test_directories_are_read_in_order_through_links_and_loops(tmp_path: Path) -> None:
    books = tmp_path / "books"
    kept(books / "z.txt", b"third")
    kept(books / "a.JSONL.gz", gzip.compress(FILES["a.jsonl"]))
    kept(books / "empty.txt", b"")
    kept(books / "blank.txt", b" \n\t\r\n")
    kept(books / "picture.png", b"\x89PNG")
    kept(books / "archive.tar", tar())
    kept(tmp_path / "elsewhere" / "b.txt", b"second")
    (books / "linked").symlink_to(tmp_path / "elsewhere")
    (books / "loop").symlink_to(books)
    (tmp_path / "elsewhere" / "back").symlink_to(books)
    assert texts(books) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent.txt", "does not exist"),
        ("directory", r"holds no \.txt or \.jsonl file: name archives"),
        ("dangling", "does not exist"),
        ("rows.json", r"is \.json, which is not read: write one object a line, as \.jsonl"),
        ("rows.parquet", r"is \.parquet, which is not read"),
        ("rows.jsonl.zst", r"is \.zst, which is not read: unpack it"),
        ("empty.tar", r"holds no \.txt or \.jsonl file"),
        ("empty.zip", r"holds no \.txt or \.jsonl file"),
        ("plain.txt.gz", "Not a gzipped file"),
        ("blank.txt", "no text found in"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_do(name: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "directory":
        path.mkdir()
    elif name == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif name != "absent.txt":
        kept(
            path, {"empty.tar": tar({"x.pdf": b""}), "empty.zip": packed_zip({}), "blank.txt": b" \n"}.get(name, b"{}")
        )
    with pytest.raises(DataError, match=says) as refusal:
        texts(path)
    assert str(path) in str(refusal.value)


def test_a_zip_archive_with_a_password_says_so(tmp_path: Path) -> None:
    locked = bytearray(packed_zip({"a.txt": b"x"}))
    # The flag of encryption, at the member and in the directory.
    locked[6] |= 1
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(DataError, match=r"locked\.zip cannot be unpacked: .*encrypted"):
        texts(kept(tmp_path / "locked.zip", bytes(locked)))


@pytest.mark.parametrize("name", [*ARCHIVES, *ALONE])
def test_reading_tells_of_all_bytes_that_it_was_said_to_take(name: str, tmp_path: Path) -> None:
    path = kept(tmp_path / name, (ARCHIVES | ALONE)[name]())
    counts: list[int] = []
    list(read_documents([path], Chats(tmp_path), counts.append))
    # Of so small a zip all is read for each part of its directory.
    assert 0 < sum(counts) <= bytes_to_read([path]) + 1024
