"""Encodes text to tokens and decodes tokens incrementally, with the verifier's tokenizer.

Text is emitted in pieces; a last part that may be an incomplete character or begin a stop string is withheld for now.
So the concatenated pieces of a choice equal its tokens decoded at once, up to the stop string; only bytes that form no
character may decode differently. The text depends on the tokens alone, never on the rounds that they came in.
"""

from __future__ import annotations

import codecs
import re
from functools import cache, lru_cache, partial
from itertools import accumulate

from gateway.errors import over_context
from spire.checkpoints.tokenizer import tokenizer_of
from spire.errors import MismatchError

# Tokens of the prompt's end that are decoded before the first piece: else some tokenizers drop its leading space.
_CONTEXT_TOKENS = 4
_BROKEN = "\ufffd"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TextCodec:
    """Encodes prompts to tokens and decodes tokens to text, with the verifier's tokenizer."""

    def __init__(self, tokenizer_json: bytes):
        try:
            self.tokenizer = tokenizer_of(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise MismatchError(f"the verifier's tokenizer.json cannot be read: {error}") from error
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, about in added.items() if about.special)
        # Cached: logprobs need them for many alternatives at each position.
        self.token_bytes, self.token_text = cache(self._token_bytes), cache(self._token_text)
        self.longest_token = max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Return a text's token ids. Raises BadParameter if it has too many characters for `max_tokens` tokens."""
        if len(text) > max_tokens * self.longest_token:
            however = f"your prompt has {len(text)} characters, and a token at most {self.longest_token}."
            raise over_context(name, max_tokens, f"{however} Please reduce the length of the prompt.")
        # A batch of one text: the library releases the interpreter lock only for batches.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text: its name if it is special, nothing if the id is unknown."""
        # The text of the token after itself: some tokenizers drop the leading space of the first token.
        text = self.decode([token, token])[len(self.decode([token])) :]
        name = self.tokenizer.id_to_token(token) or ""
        return _bytes_of(name) if _BROKEN in text else (text or name).encode()

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text and return the character offset of each token."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return [*accumulate((begin for begin, _ in encoding.offsets), max)]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def decode_long(self, tokens: list[int]) -> str:
        """Decode tokens, special tokens included, without holding the interpreter lock (GIL)."""
        return self.tokenizer.decode_batch([tokens], skip_special_tokens=False)[0]

    def _token_text(self, token: int) -> str:
        """Return a token's text for display: a special token's name, `bytes:\\xe2` for an incomplete character."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in raw)


def _bytes_of(name: str) -> bytes:
    """Return the bytes that a token's name encodes: `<0xE2>` is one byte, other names use GPT-2's byte alphabet."""
    if one := _ONE_BYTE.fullmatch(name):
        return bytes.fromhex(one[1])
    alphabet = _byte_alphabet()
    return b"".join(bytes([alphabet[letter]]) if letter in alphabet else letter.encode() for letter in name)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet, {letter: byte}: printable bytes stand for themselves, others start at chr(256)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class Detokenizer:
    """Decodes tokens to text incrementally, in whole characters only.

    A token's cost does not grow with the text: only the bytes of an incomplete character, three at most, are withheld,
    and only the last emitted tokens are decoded again. Bytes that form no character are each emitted as U+FFFD.
    """

    def __init__(self, codec: TextCodec, prompt: list[int], skip_special_tokens: bool = True):
        self._codec = codec
        self._voiceless = codec.special if skip_special_tokens else frozenset[int]()
        self._decode = partial(codec.decode, skip_special_tokens=skip_special_tokens)
        # The last emitted tokens, which are decoded again in front of the next ones, and their text.
        self._context = prompt[-_CONTEXT_TOKENS:]
        self._before = self._decode(self._context)
        if self._before.endswith(_BROKEN):
            self._context, self._before = [], ""
        # Tokens not emitted yet: they end with an incomplete character, whose bytes are in `_half`.
        self._held: list[int] = []
        self._half = b""

    def push(self, token: int) -> str:
        """Add a token. Return the newly completed text, which may be empty."""
        if token in self._voiceless:
            return ""
        self._held.append(token)
        reader = _UTF8("replace")
        reader.decode(self._half + self._codec.token_bytes(token))
        self._half = reader.getstate()[0]  # bytes that begin a character and may still be completed
        return self._tell(len(self._held) - self._tokens_of_half())

    def flush(self) -> str:
        """Return the withheld text at the end of all tokens, even an incomplete character."""
        self._half = b""
        return self._tell(len(self._held))

    def _tokens_of_half(self) -> int:
        """Return how many of the last tokens contain bytes of the incomplete character at the end of the text."""
        size = count = 0
        while size < len(self._half):
            count += 1
            size += len(self._codec.token_bytes(self._held[-count]))
        return count

    def _tell(self, count: int) -> str:
        told, self._held = self._held[:count], self._held[count:]
        if not told:
            return ""
        whole, alone = self._decode(self._context + told), self._decode(told)
        # Some tokenizers decode a whole run of bytes as broken if its end is broken: emitted text cannot change.
        text = whole[len(self._before) :] if whole.startswith(self._before) else alone
        # While such a run goes on, its beginning stays the context: the rest would decode differently without that.
        if (alone and text.endswith(alone)) or not self._context:
            self._context, self._before = told, alone
        return text


class StopFilter:
    """Emits text up to the first stop string, and the stop string itself only with `keep`.

    The stop string that ends first counts; of several with the same end, the longest. Each character is processed
    once, however much text is withheld.
    """

    def __init__(self, stops: list[str], keep: bool = False):
        self._stops, self._keep = [Stop(text) for text in stops], keep
        self.stopped = False
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        if self.stopped or not text:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        for at, character in enumerate(text, len(self._held) + 1):
            ended = [stop.length for stop in self._stops if stop.takes(character)]
            if ended and may_stop:
                self.stopped, self._held = True, ""
                return whole[: at if self._keep else at - max(ended)]
        keep = len(whole) - max(stop.begun for stop in self._stops)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Stop:
    """Finds one stop string (Knuth, Morris, Pratt). `begun`: the length of its longest prefix that ends the text."""

    def __init__(self, text: str):
        self._text, self.length = text, len(text)
        self._borders = _borders_of(text)
        self.begun = 0

    def takes(self, character: str) -> bool:
        """Add a character to the text, and return True if it completes the stop string."""
        self.begun = _longer(self._text, self._borders, self.begun, character)
        if self.begun < self.length:
            return False
        self.begun = self._borders[self.begun]
        return True


@lru_cache(maxsize=64)
def _borders_of(text: str) -> list[int]:
    """Return for each n the length of the longest proper prefix of the first n characters that is also their suffix.

    Cached because all choices of a request have the same stop strings.
    """
    borders = [0, 0]
    for character in text[1:]:
        borders.append(_longer(text, borders, borders[-1], character))
    return borders


def _longer(text: str, borders: list[int], begun: int, character: str) -> int:
    while begun and text[begun] != character:
        begun = borders[begun]
    return begun + (text[begun] == character)


class TextStream:
    """Converts the tokens of one choice to text incrementally, up to the first stop string.

    `taken` counts the tokens that belong to the choice: all pushed tokens, up to the one that completed a stop string.
    `offsets`: the number of characters before each taken token. `silent` tokens add no text; special tokens add
    text only without `skip_special_tokens`. Stop strings have no effect before the choice has `min_tokens` tokens.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: list[int],
        stops: list[str],
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        silent: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
    ):
        self._detokenizer = Detokenizer(codec, prompt, skip_special_tokens)
        self._filter = StopFilter(stops, keep_stop)
        self._min_tokens, self._silent = min_tokens, silent
        self._characters = 0
        self.taken = 0
        self.offsets: list[int] = []

    @property
    def stopped(self) -> bool:
        return self._filter.stopped

    def push(self, tokens: list[int]) -> str:
        return "".join(self._push_one(token) for token in tokens if not self.stopped)

    def _push_one(self, token: int) -> str:
        self.taken += 1
        self.offsets.append(self._characters)
        text = "" if token in self._silent else self._detokenizer.push(token)
        self._characters += len(text)
        return self._filter.push(text, may_stop=self.taken >= self._min_tokens)

    def flush(self) -> str:
        """Return the text withheld at the end: an incomplete character, or the beginning of a stop string."""
        if self.stopped:
            return ""
        text = self._filter.push(self._detokenizer.flush())
        return text if self.stopped else text + self._filter.flush()
