"""Prompts cut from real text: a start token and a stretch of a book, exactly as long as asked, as token ids."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from spire.errors import DataError
from spire.model.config import load_model_config
from spire.model.tokenizer import load_tokenizer

BUNDLED_TEXT = Path(__file__).parent / "prose.txt"


class PromptSource:
    """Text files, tokenized once with the tokenizer of a model directory."""

    def __init__(self, model: Path, files: list[Path]):
        config = load_model_config(model)
        tokenizer = load_tokenizer(model, config.vocab_size)
        self.start = config.bos_token_id
        self.documents = [self._encode(tokenizer, path) for path in _text_files(files)]

    def _encode(self, tokenizer: Tokenizer, path: Path) -> list[int]:
        ids: list[int] = tokenizer.encode(path.read_text(), add_special_tokens=False).ids
        return ids

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """`count` prompts of `length` tokens from random places; documents are chosen by their length."""
        body = length - (self.start is not None)
        fitting = [document for document in self.documents if len(document) >= body]
        if not fitting:
            longest = max(map(len, self.documents), default=0)
            raise DataError(f"no text is {length} tokens long: the longest of {len(self.documents)} has {longest}")
        rng = random.Random(seed)
        chosen = rng.choices(fitting, weights=[len(document) - body + 1 for document in fitting], k=count)
        prefix = [] if self.start is None else [self.start]
        return [prefix + _stretch(document, body, rng) for document in chosen]


def _stretch(document: list[int], length: int, rng: random.Random) -> list[int]:
    start = rng.randrange(len(document) - length + 1)
    return document[start : start + length]


def _text_files(paths: list[Path]) -> list[Path]:
    files = [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(f"{missing[0]} does not exist: --data takes text files or directories of them")
    if not files:
        raise DataError(f"no .txt file under {', '.join(map(str, paths))}")
    return files
