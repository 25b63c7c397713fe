"""Prompts cut from real text, as token ids: a start token and an excerpt, exactly as long as requested."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from spire.checkpoints.tokenizer import load_tokenizer
from spire.errors import DataError
from spire.model.config import load_model_config
from spire.progress import bytes_shown
from spire.text.documents import Chats, read_documents
from spire.text.text_files import bytes_to_read, find_files

BUNDLED_TEXT = Path(__file__).parent / "prose.txt"


class PromptMaker(Protocol):
    """A maker of prompts for measurements."""

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return `count` prompts of `length` tokens, which depend on the arguments only. Raises DataError."""


class PromptSource:
    """Documents to cut prompts from, tokenized once by the tokenizer of a model, whose template renders chats."""

    def __init__(self, model: Path, data: list[Path]):
        config = load_model_config(model)
        tokenizer = load_tokenizer(model, config.vocab_size)
        self.start = config.bos_token_id
        files = find_files(data)
        with bytes_shown("tokenizing prompts", bytes_to_read(files)) as told:
            texts = read_documents(files, Chats(model), told)
            self.documents: list[list[int]] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Cut `count` prompts of `length` tokens at random positions. Raises DataError if all documents are shorter."""
        body = length - (self.start is not None)
        fitting = [document for document in self.documents if len(document) >= body]
        if not fitting:
            longest = max(map(len, self.documents), default=0)
            raise DataError(f"no text is {length} tokens long: the longest of {len(self.documents)} has {longest}")
        rng = random.Random(seed)
        chosen = rng.choices(fitting, weights=[len(document) - body + 1 for document in fitting], k=count)
        prefix = [] if self.start is None else [self.start]
        starts = [rng.randrange(len(document) - body + 1) for document in chosen]
        return [prefix + document[start : start + body] for document, start in zip(chosen, starts, strict=True)]
