"""One choice of a completion: what its sequence has grown by, as text, logprobs and origins of tokens.

Tokens are read from the sequence, where the engine commits them; text is made here, while the next round is under way.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from gateway.json_pieces import Shared
from gateway.logprobs import Entry, PromptEntries, arrays, mean
from gateway.sequence import Round, Sequence
from gateway.tokenizer import TextCodec, TextStream

# Tokens of a choice that are made text at once: more keep the event loop from others.
_MOST_PULLED = 64


class Echo:
    """A prompt as the beginning of its choices' texts: its text, and where each of its tokens begins.

    One for all of them: it is scored for the first alone, and shown once.
    """

    def __init__(self, text: str, offsets: list[int]):
        self.text, self.offsets = text, offsets
        # The sequence that is scored with its prompt, if any is.
        self.scored: Sequence | None = None
        self._shown: dict[str, Shared] = {}

    @classmethod
    def of_text(cls, codec: TextCodec, prompt: str, add_special_tokens: bool) -> Echo:
        return cls(prompt, codec.offsets(prompt, add_special_tokens))

    @classmethod
    def of_tokens(cls, codec: TextCodec, prompt: list[int], skip_special_tokens: bool) -> Echo:
        stream = TextStream(codec, [], [], skip_special_tokens=skip_special_tokens)
        return cls(stream.push(prompt) + stream.flush(), stream.offsets)

    @property
    def awaited(self) -> bool:
        """Whether its scores have yet to come."""
        return self.scored is not None and self.scored.prompt_logprobs is None

    def arrays(self, codec: TextCodec, top: int) -> dict[str, Shared]:
        """Its logprobs as completions show them; nothing where it is not scored."""
        if self.scored is not None and self.scored.prompt_logprobs is not None and not self._shown:
            entries = PromptEntries(self.scored.prompt, self.scored.prompt_logprobs, self.offsets)
            self._shown = {name: Shared(shown) for name, shown in arrays(entries, codec, top).items()}
        return self._shown


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice has grown by. Logprobs come with the text: those of held back tokens come later.

    `echo` is in front of the text, with logprobs of its own.
    """

    index: int
    echo: Echo | None
    text: str
    tokens: list[int]
    origins: list[str]
    rounds: list[Round]
    entries: list[Entry]
    finish_reason: str | None


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
        """What is new since the last pull, of much of it the beginning; None when nothing is to be said."""
        if self.finish_reason is not None or (self._echo is not None and self._echo.awaited):
            return None
        sequence, taken = self.sequence, self._text.taken
        new = sequence.output[self._seen : self._seen + _MOST_PULLED]
        self._seen += len(new)
        sequence.heard = self._seen
        text = self._text.push(new)
        over = sequence.finished and self._seen == len(sequence.output)
        if over and not self._text.stopped:
            text += self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        elif over:
            self.finish_reason = sequence.finish_reason
        elif not new:
            return None
        self._emitted += len(text)
        origins = ["draft" if drafted else "target" for drafted in sequence.from_draft[taken : self.tokens]]
        echo, self._echo = self._echo, None
        tokens, rounds, entries = sequence.output[taken : self.tokens], self._new_rounds(), self._new_entries()
        return Piece(self.index, echo, text, tokens, origins, rounds, entries, self.finish_reason)

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
