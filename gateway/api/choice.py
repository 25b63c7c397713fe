"""One choice of a completion: the new output of its sequence as text, logprobs and token origins.

Tokens are read from the sequence, where the engine commits them, and decoded here while the next round runs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf

from gateway.api.logprobs import LogprobEntry, PromptEntries, arrays
from gateway.sequence import RoundResult, Sequence
from gateway.text.json_pieces import Shared
from gateway.text.tokenizer import TextCodec, TextStream

# Most tokens, logprobs and rounds of a choice in a piece: more would block the event loop.
_MOST_PULLED = 64


class Echo:
    """A prompt that precedes the text of its choices: the prompt's text, and the character offset of each token.

    All choices of a prompt share one Echo: the verifier scores the prompt for the first choice only, and the logprobs
    are encoded once.
    """

    def __init__(self, text: str, offsets: list[int]):
        self.text, self.offsets = text, offsets
        # The sequence that gets the prompt's logprobs; None if none are shown.
        self.scored: Sequence | None = None
        self._shown: dict[str, Shared] = {}

    @property
    def awaited(self) -> bool:
        """True until the requested logprobs of the prompt arrive; False if none are requested."""
        return self.scored is not None and self.scored.prompt_logprobs is None

    def arrays(self, codec: TextCodec, top: int) -> dict[str, Shared]:
        """Return the prompt's logprobs, with `top` alternatives each, in the completions format; empty if none."""
        if self.scored is not None and self.scored.prompt_logprobs is not None and not self._shown:
            entries = PromptEntries(self.scored.prompt, self.scored.prompt_logprobs, self.offsets)
            self._shown = {name: Shared(shown) for name, shown in arrays(entries, codec, top).items()}
        return self._shown


@dataclass(frozen=True, slots=True)
class Piece:
    """The output of one choice since its previous piece.

    `entries`: the logprobs of tokens whose text has been emitted; those of withheld text come in a later piece.
    `echo`, the prompt if it is to be shown, precedes the text and has its own logprobs.
    """

    index: int
    echo: Echo | None
    text: str
    tokens: list[int]
    origins: list[str]
    rounds: list[RoundResult]
    entries: list[LogprobEntry]
    finish_reason: str | None


class Choice:
    """One choice of the answer: converts its sequence's output to text, one piece per `pull`."""

    def __init__(self, index: int, sequence: Sequence, text: TextStream):
        self.index, self.sequence, self._text = index, sequence, text
        self.finish_reason: str | None = None
        self._echo: Echo | None = None
        # Characters of the echo, characters of output emitted, and tokens whose logprobs were emitted.
        self._begin = self._emitted = self._told = 0
        self._told_rounds = 0

    def begin_with(self, echo: Echo) -> None:
        """Emit the echoed prompt before the text of the choice."""
        self._echo, self._begin = echo, len(echo.text)

    @property
    def tokens(self) -> int:
        """The number of output tokens of the choice; tokens after a stop string do not count."""
        return self._text.taken

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the choice's output tokens; -inf without tokens."""
        logprobs = self.sequence.logprobs[: self.tokens]
        return sum(logprob.token for logprob in logprobs) / len(logprobs) if logprobs else -inf

    def pull(self) -> Piece | None:
        """Return the next piece of the choice's output since the last pull; None if there is none."""
        if self.finish_reason is not None or (self._echo is not None and self._echo.awaited):
            return None
        sequence, taken = self.sequence, self._text.taken
        new = sequence.output[sequence.heard : sequence.heard + _MOST_PULLED]
        sequence.heard += len(new)
        text = self._text.push(new)
        over = sequence.finished and sequence.heard == len(sequence.output)
        if over and not self._text.stopped:
            text += self._text.flush()
        self._emitted += len(text)
        # Logprobs may be emitted of all tokens of a whole output, else of those whose text has been emitted.
        whole = over and not self._text.stopped
        told = self.tokens if whole else bisect_left(self._text.offsets, self._emitted)
        rounds, entries = self._new_rounds(), self._new_entries(told)
        if not (new or rounds or entries or over or self._text.stopped):
            return None
        if (over or self._text.stopped) and self._told == told and self._told_rounds == len(sequence.rounds):
            self.finish_reason = "stop" if self._text.stopped else sequence.finish_reason
        origins = ["draft" if drafted else "target" for drafted in sequence.from_draft[taken : self.tokens]]
        echo, self._echo = self._echo, None
        tokens = sequence.output[taken : self.tokens]
        return Piece(self.index, echo, text, tokens, origins, rounds, entries, self.finish_reason)

    def _new_rounds(self) -> list[RoundResult]:
        """Return the results of the next rounds, without tokens after a stop string."""
        new = self.sequence.rounds[self._told_rounds : self._told_rounds + _MOST_PULLED]
        self._told_rounds += len(new)
        if not self._text.stopped:
            return new
        return [replace(one, tokens=min(one.tokens, self.tokens - one.begin)) for one in new if one.begin < self.tokens]

    def _new_entries(self, end: int) -> list[LogprobEntry]:
        """Return the logprobs of the next tokens, of the first `end` tokens."""
        new = slice(self._told, min(end, self._told + _MOST_PULLED))
        self._told = new.stop
        places = [self._begin + offset for offset in self._text.offsets[new]]
        return [*map(LogprobEntry, self.sequence.output[new], self.sequence.logprobs[new], places)]
