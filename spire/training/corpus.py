"""Text in, token windows out. The order of the windows is a function of (seed, step) alone.

So a run that was killed resumes bit for bit, and nothing about the order needs to be stored.
Text comes as `.txt` files, `.jsonl` files with a `text` field, directories of them, or tar archives of them.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spire.errors import DataError
from spire.files import user_cache, write_whole

START, END = "<s>", "</s>"
_TEXT_SUFFIXES = {".txt", ".jsonl"}


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Every document under `paths`, in a fixed order. Raises DataError naming a file that cannot be used."""
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist: --data takes text, JSONL, directories or tar archives of them")
        if path.is_dir():
            yield from read_texts(sorted(p for p in path.rglob("*") if p.suffix in _TEXT_SUFFIXES))
        elif path.suffix in _TEXT_SUFFIXES:
            yield from _documents(path.name, path.read_bytes())
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                members = sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name)
                for member in members:
                    if (file := archive.extractfile(member)) and Path(member.name).suffix in _TEXT_SUFFIXES:
                        yield from _documents(f"{path.name}:{member.name}", file.read())
        else:
            raise DataError(f"{path} is neither .txt, .jsonl, a directory nor a tar archive")


def _documents(name: str, raw: bytes) -> Iterator[str]:
    try:
        text = raw.decode("utf-8")
        if not name.endswith(".jsonl"):
            yield text
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)["text"]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name} cannot be read as text: {error!r}") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with `<s>` = 0 and `</s>` = 1, which puts `<s>` before every prompt it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return tokenizer


class TokenStream:
    """A corpus as one row of token ids, document after document, each ended by the end token."""

    def __init__(self, tokens: NDArray[np.uint32], start_token: int, name: str = ""):
        self.tokens, self.start_token = tokens, start_token
        # Tells apart what is derived from different streams.
        self.name = name

    @classmethod
    def build(cls, paths: list[Path], tokenizer: Tokenizer, start: int, end: int) -> TokenStream:
        """Encode `paths`, or reuse what an earlier run left in the user's cache for the same files and tokenizer."""
        key = hashlib.sha256(tokenizer.to_str().encode())
        for path in paths:
            if not path.exists():
                raise DataError(f"{path} does not exist: --data takes text, JSONL, directories or tar archives of them")
            key.update(f"{path.resolve()}{path.stat().st_size}{path.stat().st_mtime_ns}".encode())
        name = key.hexdigest()[:16]
        file = user_cache() / f"tokens-{name}.npy"
        if not file.exists():
            rows = [
                np.array([*encoding, end], dtype=np.uint32)
                for encoding in (
                    tokenizer.encode(text, add_special_tokens=False).ids
                    for text in track(read_texts(paths), description="tokenizing")
                )
            ]
            if not rows:
                raise DataError(f"no text found in {', '.join(map(str, paths))}")
            write_whole(file, lambda unfinished: np.save(unfinished, np.concatenate(rows)))
        return cls(np.load(file, mmap_mode="r"), start, name)

    def batch(self, seed: int, step: int, batch: int, length: int) -> NDArray[np.int64]:
        """Training windows [batch, length] of one step, each the start token and a random stretch of text."""
        if len(self.tokens) < length:
            raise DataError(f"the corpus holds {len(self.tokens):,} tokens, fewer than one sequence of {length}")
        starts = np.random.default_rng((seed, step)).integers(0, len(self.tokens) - length + 2, size=batch)
        return np.stack([self.window(start, length) for start in starts])

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        stretch = self.tokens[start : start + length - 1].astype(np.int64)
        return np.concatenate(([self.start_token], stretch))
