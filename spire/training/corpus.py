"""Training windows of tokens from a text corpus. The windows of a step depend on (seed, step) alone.

An interrupted run therefore resumes bit for bit, without a stored order. `spire.text.documents` reads corpus files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spire.errors import DataError
from spire.files import user_cache, write_whole
from spire.progress import bytes_shown
from spire.text.documents import Chats, read_documents
from spire.text.text_files import bytes_to_read, find_files

START, END = "<s>", "</s>"
# Version of the document reader: tokens cached by an earlier version are not reused.
_READER = b"2"
_HASHED_TOKENS = 4096


def corpus_texts(paths: Iterable[Path], chats: Chats, doing: str) -> Iterator[str]:
    """Yield all documents under `paths`, with a progress bar labelled `doing`. Raises DataError naming the problem."""
    files = find_files(paths)
    with bytes_shown(doing, bytes_to_read(files)) as told:
        yield from read_documents(files, chats, told)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `<s>` = 0 and `</s>` = 1 that adds `<s>` before each encoded prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # the caller's `texts` show their own progress
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return tokenizer


def described(tokens: NDArray[np.uint32]) -> str:
    """Return a description that tells corpora apart: the number of tokens, and a hash of some of them."""
    some = tokens[:: max(1, len(tokens) // _HASHED_TOKENS)]
    return f"{len(tokens):,} tokens ({hashlib.sha256(some.tobytes()).hexdigest()[:8]})"


class TokenStream:
    """A corpus as one array of token ids: all documents in sequence, each followed by the end token."""

    def __init__(self, tokens: NDArray[np.uint32], start_token: int, name: str = ""):
        self.tokens, self.start_token = tokens, start_token
        # Identifies the stream in the names of files derived from it.
        self.name = name

    @classmethod
    def build(cls, paths: list[Path], tokenizer: Tokenizer, start: int, end: int, chats: Chats) -> TokenStream:
        """Tokenize the files in `paths`, or load the cached tokens of the same files, tokenizer and chat template."""
        # The key changes with the files, the tokenizer, the template or the reader.
        key = hashlib.sha256(_READER + tokenizer.to_str().encode() + chats.key.encode())
        for source in find_files(paths):
            key.update(f"{source.resolve()}{source.stat().st_size}{source.stat().st_mtime_ns}".encode())
        name = key.hexdigest()[:16]
        file = user_cache() / f"tokens-{name}.npy"
        if not file.exists():
            texts = corpus_texts(paths, chats, "tokenizing")
            encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
            rows = [np.array([*ids, end], dtype=np.uint32) for ids in encoded]
            write_whole(file, lambda unfinished: np.save(unfinished, np.concatenate(rows)))
        return cls(np.load(file, mmap_mode="r"), start, name)

    def batch(self, seed: int, step: int, batch: int, length: int) -> NDArray[np.int64]:
        """Return one step's training windows [batch, length], each the start token and a random corpus excerpt."""
        if len(self.tokens) < length:
            raise DataError(f"the corpus holds {len(self.tokens):,} tokens, fewer than one sequence of {length}")
        starts = np.random.default_rng((seed, step)).integers(0, len(self.tokens) - length + 2, size=batch)
        stretches = (self.tokens[start : start + length - 1].astype(np.int64) for start in starts)
        return np.stack([np.concatenate(([self.start_token], stretch)) for stretch in stretches])
