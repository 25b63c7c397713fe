"""Origins of the parts of a generated text: accepted draft tokens, or tokens chosen by the target.

The gateway reports the origin of each token (`return_token_origins`) and, with logprobs, its offset in the text.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import click

Origin = Literal["draft", "target"]

ASKED = {"return_token_origins": True, "return_token_ids": True}


class Origins:
    """Splits the streamed text of one choice into runs of one origin: accepted draft tokens, or the target's tokens."""

    def __init__(self) -> None:
        self._told = 0
        self._offsets: list[int] = []
        self._origins: list[Origin] = []

    def runs(self, piece: dict[str, Any]) -> Iterator[tuple[str, Origin]]:
        """Yield (text, origin) for each run of the next piece. A token's text never arrives before its origin."""
        self._offsets += (piece["logprobs"] or {}).get("text_offset", [])
        self._origins += piece["token_origins"]
        begin, self._told = self._told, self._told + len(piece["text"])
        letters = zip(piece["text"], range(begin, self._told), strict=True)
        for origin, run in groupby(letters, lambda letter: self._origins[bisect_right(self._offsets, letter[1]) - 1]):
            yield "".join(letter for letter, _ in run), origin


class Painter:
    """Marks text of accepted draft tokens: by colour on a terminal unless NO_COLOR is set, else by brackets."""

    def __init__(self, coloured: bool | None = None):
        self.coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if coloured is None else coloured
        self._open = False

    @property
    def legend(self) -> str:
        mark = click.style("green", fg="green", underline=True) if self.coloured else "⟦brackets⟧"
        return f"in {mark}: guessed by the draft and accepted; the rest: chosen by the target"

    def paint(self, text: str, origin: Origin) -> str:
        drafted = origin == "draft"
        if self.coloured:
            return click.style(text, fg="green", underline=True) if drafted else text
        turned, self._open = drafted != self._open, drafted
        return ("⟦" if drafted else "⟧") + text if turned else text

    def end(self) -> str:
        """Return the bracket that closes the marked text at the end of the output, or ""."""
        was_open, self._open = self._open, False
        return "⟧" if was_open else ""
