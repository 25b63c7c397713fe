"""One choice of a completion: what its sequence has grown by, as text, logprobs and origins of tokens.

Tokens are read from the sequence, where the engine commits them; text is made here, while the next round is under way.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from gateway.logprobs import Entry, mean
from gateway.sequence import Round, Sequence
from gateway.tokenizer import TextCodec, TextStream


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice has grown by. Logprobs come with the text: those of held back tokens come later."""

    index: int
    text: str
    tokens: list[int]
    origins: list[str]
    rounds: list[Round]
    entries: list[Entry]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the beginning of its choices' texts: its text, and where each of its tokens begins."""

    text: str
    offsets: list[int]

    @classmethod
    def of_text(cls, codec: TextCodec, prompt: str, add_special_tokens: bool) -> Echo:
        return cls(prompt, codec.offsets(prompt, add_special_tokens))

    @classmethod
    def of_tokens(cls, codec: TextCodec, prompt: list[int], skip_special_tokens: bool) -> Echo:
        stream = TextStream(codec, [], [], skip_special_tokens=skip_special_tokens)
        return cls(stream.push(prompt) + stream.flush(), stream.offsets)


class Choice:
    """One sequence seen as text."""

    def __init__(self, index: int, sequence: Sequence, text: TextStream):
        self.index, self.sequence, self._text = index, sequence, text
        self.finish_reason: str | None = None
        self._echo: Echo | None = None
        self._seen = 0
        # Where the output begins in the choice's text, how far that was told, and how many tokens' logprobs.
        self._begin = self._emitted = self._told = 0
        self._told_rounds = 0

    def begin_with(self, echo: Echo) -> None:
        """Have the prompt's text in front."""
        self._echo, self._begin = echo, len(echo.text)

    @property
    def tokens(self) -> int:
        """How many tokens belong to the text: none after a stop string."""
        return self._text.taken

    @property
    def accepted(self) -> int:
        return min(self.sequence.accepted, self.tokens)

    @property
    def rejected(self) -> int:
        return self.sequence.drafted - self.accepted

    @property
    def mean_logprob(self) -> float:
        return mean(self.sequence.logprobs[: self.tokens])

    def pull(self) -> Piece | None:
        """What is new since the last pull; None when nothing is to be said."""
        if self.finish_reason is not None:
            return None
        sequence, taken = self.sequence, self._text.taken
        new = sequence.output[self._seen :]
        self._seen += len(new)
        text = self._text.push(new)
        if sequence.finished and not self._text.stopped:
            text += self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        elif sequence.finished:
            self.finish_reason = sequence.finish_reason
        elif not new:
            return None
        self._emitted += len(text)
        origins = ["draft" if drafted else "target" for drafted in sequence.from_draft[taken : self.tokens]]
        prompt_text, entries = self._echoed()
        entries += self._new_entries()
        tokens = sequence.output[taken : self.tokens]
        return Piece(self.index, prompt_text + text, tokens, origins, self._new_rounds(), entries, self.finish_reason)

    def _echoed(self) -> tuple[str, list[Entry]]:
        """The prompt, once."""
        echo, self._echo = self._echo, None
        if echo is None:
            return "", []
        prompt, logprobs = self.sequence.prompt, self.sequence.prompt_logprobs
        if logprobs is None:
            return echo.text, []
        return echo.text, [*map(Entry, prompt, [None, *logprobs], echo.offsets)]

    def _new_rounds(self) -> list[Round]:
        """Those that gave tokens of the text: of what a stop string has cut off there are none."""
        new = self.sequence.rounds[self._told_rounds :]
        self._told_rounds += len(new)
        if not self._text.stopped:
            return new
        return [
            replace(round_, tokens=min(round_.tokens, self.tokens - round_.begin))
            for round_ in new
            if round_.begin < self.tokens
        ]

    def _new_entries(self) -> list[Entry]:
        """Those of tokens whose text has been told, and at the end of all but what a stop string has cut off."""
        whole = self.finish_reason is not None and not self._text.stopped
        end = self.tokens if whole else bisect_left(self._text.offsets, self._emitted)
        told, self._told = self._told, end
        sequence, offsets = self.sequence, self._text.offsets[told:end]
        places = [self._begin + offset for offset in offsets]
        return [*map(Entry, sequence.output[told:end], sequence.logprobs[told:end], places)]
