"""Prompts that are chats: the last message of a user, after as many earlier exchanges as fit.

Measured are the answers that a chat model gives: prompts whose plain answer ends early, or repeats itself, are left
out, and their share is told. What repeats itself is guessed so easily that it says nothing about a draft.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from spire.bench.client import Client, Completed, Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.checkpoints.tokenizer import load_tokenizer
from spire.errors import DataError
from spire.model.config import load_model_config
from spire.text.documents import Chats
from spire.text.prompts import read_prompts
from spire.text.repetition import LEAST_DISTINCT, distinct_share
from spire.text.text_files import find_files

# Conversations that are tried as earlier exchanges of one prompt.
_MOST_EARLIER = 64
_MOST_CHARACTERS = 1_000_000
# Prompts that are tried for each that is needed, before there are too few.
_MOST_TRIED = 20


class ChatSource:
    """Chats in files, as prompts by the template of a model. Raises DataError for files that hold none."""

    def __init__(self, model: Path, files: list[Path]):
        config = load_model_config(model)
        self.ends = set(config.eos_token_ids)
        self._template, self._tokenizer = Chats(model).template, load_tokenizer(model, config.vocab_size)
        if not self._template.source:
            raise DataError(f"{model} has no chat template: measure it on text, with --data")
        self._names = ", ".join(map(str, files))
        self._prompts = list(read_prompts(find_files(files, "--chats")))

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return `count` prompts of at most `length` tokens. Raises DataError if every message is longer."""
        return [self._prompt(length, random.Random(f"{seed} {at}")) for at in range(count)]

    def _prompt(self, length: int, rng: random.Random) -> list[int]:
        order = rng.sample(self._prompts, len(self._prompts))
        asked = (prompt.messages for prompt in order)
        fitting = (messages for messages in asked if len(self._encoded(messages)) <= length)
        if not (messages := next(fitting, None)):
            raise DataError(f"no chat in {self._names} is as short as {length} tokens")
        for earlier in order[:_MOST_EARLIER]:
            if earlier.answer and earlier.messages[-1:] != messages[-1:]:
                longer = [*earlier.messages, earlier.answer, *messages]
                if len(self._encoded(longer)) > length:
                    break
                messages = longer
        return self._encoded(messages)

    def _encoded(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._template.render(messages, _MOST_CHARACTERS)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def source_of(model: Path, data: list[Path] | None, chats: list[Path] | None) -> PromptSource | ChatSource:
    """Return the prompts that options name: text, chats, or the bundled text. Raises DataError, also for both."""
    if data and chats:
        raise DataError("text (--data) and chats (--chats) exclude each other")
    return ChatSource(model, chats) if chats else PromptSource(model, data or [BUNDLED_TEXT])


class ChosenChats:
    """The prompts of a source whose plain answers, as a running gateway gives them, are neither short nor repetitive.

    `tried`, `short`, `repetitive`: how many prompts were tried, and how many were left out for which reason.
    """

    def __init__(self, source: ChatSource, url: str, request: Request, concurrency: int = 16):
        self._source, self._url, self._concurrency = source, url, concurrency
        self._request = replace(request, k=0, cache_salt="")
        self._chosen: dict[tuple[int, int, int], list[list[int]]] = {}
        self.tried = self.short = self.repetitive = 0

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return `count` prompts of at most `length` tokens; that at place `i` is answered by seed `seed + i`.

        Raises DataError if too few prompts have such answers, and BenchError if the gateway fails.
        """
        key = count, length, seed
        if key not in self._chosen:
            self._chosen[key] = asyncio.run(self._choose(*key))
        return self._chosen[key]

    @property
    def left_out(self) -> str:
        """The shares of prompts that were left out, for people."""
        shares = (f"{number / max(1, self.tried):.0%}" for number in (self.short, self.repetitive))
        return "left out of {} chats: {} whose answers end early, {} that repeat themselves".format(self.tried, *shares)

    async def _choose(self, count: int, length: int, seed: int) -> list[list[int]]:
        chosen: dict[int, list[int]] = {}
        async with Client(self._url, self._concurrency) as client:
            for turn in range(_MOST_TRIED):
                places = [place for place in range(count) if place not in chosen]
                prompts = self._source.cut(len(places), length, seed + 7919 * turn)
                answers = await client.complete_all(self._request, prompts, seeds=[seed + place for place in places])
                usable = map(self._is_usable, answers)
                chosen |= {place: prompt for place, prompt, good in zip(places, prompts, usable, strict=True) if good}
                if len(chosen) == count:
                    return [chosen[place] for place in range(count)]
        raise DataError(f"too few prompts for {count} answers of {self._request.max_tokens} tokens: {self.left_out}")

    def _is_usable(self, answer: Completed) -> bool:
        self.tried += 1
        short = bool(self._source.ends & set(answer.token_ids))
        repetitive = not short and distinct_share(answer.token_ids) < LEAST_DISTINCT
        self.short += short
        self.repetitive += repetitive
        return not short and not repetitive
