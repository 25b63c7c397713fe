"""Text to tokens and back, by the tokenizer the verifier serves.

Text appears piece by piece. A piece is held back while it may be half a character or the beginning of a stop string,
so the pieces of a choice, put together, are exactly the decoding of its tokens up to the stop string.
What is emitted depends on the tokens alone, never on how rounds happened to group them.
"""

from __future__ import annotations

import asyncio
from functools import partial

from tokenizers import Tokenizer

from spire.errors import InvalidRequest, MismatchError

# Longer prompts are encoded on a thread, so that they do not stop everybody's rounds.
_INLINE_CHARACTERS = 2000
# Tokens of the prompt that the first piece is decoded after: some tokenizers drop a leading space otherwise.
_CONTEXT_TOKENS = 4
_BROKEN = "\ufffd"


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than the model has positions."""


class TextCodec:
    """Encodes prompts and decodes tokens."""

    def __init__(self, tokenizer_json: bytes):
        try:
            self.tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise MismatchError(f"the verifier's tokenizer.json cannot be read: {error}") from error
        self.longest_token = max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    async def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the start token in front if so wished. Raises PromptTooLong, cheaply, when that is plain."""
        if len(text) > max_tokens * self.longest_token:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters; the model's context is {max_tokens} tokens "
                f"of at most {self.longest_token} characters"
            )
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return (await asyncio.to_thread(encode)).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Detokenizer:
    """Tokens in, text out, whole characters only."""

    def __init__(self, codec: TextCodec, prompt: list[int]):
        self.codec = codec
        context = prompt[-_CONTEXT_TOKENS:]
        if codec.decode(context).endswith(_BROKEN):
            context = []
        # The first `_read` tokens of the window are emitted: they stay as the context of those that follow.
        self._window = context
        self._read = len(context)

    def push(self, tokens: list[int]) -> str:
        self._window = self._window + tokens
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text

    def flush(self) -> str:
        """What is still held back, whole or not."""
        text = self._pending()
        self._read = len(self._window)
        return text

    def _pending(self) -> str:
        before = self.codec.decode(self._window[: self._read])
        return self.codec.decode(self._window)[len(before) :]


class StopFilter:
    """Lets text through up to the first stop string, which it never emits.

    The stop string that ends first wins, and of those ending together the one that begins first.
    """

    def __init__(self, stops: list[str]):
        self.stops = stops
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        text = self._held + text
        if (cut := self._first_stop(text)) is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string may begin with, the whole stop string excluded."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class TextStream:
    """The text of one choice as it grows: detokenizer, then stop filter.

    `taken` counts the tokens that belong to the choice: all that were pushed, up to the one that ended a stop string.
    """

    def __init__(self, codec: TextCodec, prompt: list[int], stops: list[str]):
        self._detokenizer = Detokenizer(codec, prompt)
        self._filter = StopFilter(stops)
        self.taken = 0

    @property
    def stopped(self) -> bool:
        return self._filter.stopped

    def push(self, tokens: list[int]) -> str:
        if not self._filter.stops:
            self.taken += len(tokens)
            return self._detokenizer.push(tokens)
        text = ""
        for token in tokens:
            if not self.stopped:
                self.taken += 1
                text += self._filter.push(self._detokenizer.push([token]))
        return text

    def flush(self) -> str:
        """The end of the choice: what was held back as half a character or as the beginning of a stop string."""
        if self.stopped:
            return ""
        text = self._filter.push(self._detokenizer.flush())
        return text if self.stopped else text + self._filter.flush()
