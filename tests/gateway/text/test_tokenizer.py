"""Streamed text is exactly the decoding of the tokens, and never shows a stop string."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.errors import BadParameter
from gateway.text.tokenizer import Stop, StopFilter, TextCodec, TextStream
from spire.errors import MismatchError


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """Byte-level, every byte a token, with a few merges: characters split over tokens are the rule."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: at + 2 for at, letter in enumerate(alphabet)}
    vocabulary |= {"th": len(vocabulary), "the": len(vocabulary) + 1, "Ġthe": len(vocabulary) + 2}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextCodec(tokenizer.to_str().encode())


def streamed(stream: TextStream, tokens: list[int], cuts: list[int]) -> str:
    """The text of `tokens`, pushed in the pieces that `cuts` make."""
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return "".join(stream.push(tokens[begin:end]) for begin, end in pairwise(edges)) + stream.flush()


TOKENS = st.lists(st.integers(0, 260), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=8)


@settings(max_examples=300, deadline=None)
@given(tokens=TOKENS, cuts=CUTS)
def test_any_tokens_in_any_pieces_give_their_decoding(codec: TextCodec, tokens: list[int], cuts: list[int]) -> None:
    assert streamed(TextStream(codec, [], []), tokens, cuts) == codec.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 260) | st.sampled_from([0, 1]), max_size=40), cuts=CUTS)
def test_special_tokens_are_part_of_the_text_if_they_are_not_skipped(
    codec: TextCodec, tokens: list[int], cuts: list[int]
) -> None:
    stream = TextStream(codec, [], [], skip_special_tokens=False)
    text = streamed(stream, tokens, cuts)
    assert text == codec.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.count("<s>") >= tokens.count(0)
    begins = [at for token, at in zip(tokens, stream.offsets, strict=True) if token == 0]
    assert all(text[at:].lstrip("�").startswith("<s>") for at in begins)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), cuts=CUTS)
def test_any_text_in_any_pieces_comes_back(codec: TextCodec, text: str, cuts: list[int]) -> None:
    tokens = codec.tokenizer.encode(text).ids
    prompt = codec.tokenizer.encode("say: ").ids
    assert streamed(TextStream(codec, prompt, []), tokens, cuts) == text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abé☃", max_size=24),
    stops=st.lists(st.text("abé☃", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=CUTS,
)
def test_text_ends_before_the_stop_string_that_ends_first(
    codec: TextCodec, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokens = codec.tokenizer.encode(text).ids
    stream = TextStream(codec, [], stops)
    shown = streamed(stream, tokens, cuts)
    ends = [(at, stop) for at in range(len(text) + 1) for stop in stops if text[:at].endswith(stop)]
    if not ends:
        assert shown == text
        assert not stream.stopped
        return
    end = min(at for at, _ in ends)
    longest = max(len(stop) for at, stop in ends if at == end)
    assert shown == text[: end - longest]
    assert stream.stopped
    assert codec.decode(tokens[: stream.taken]).rstrip("\ufffd") == text[:end]


def test_a_character_split_over_tokens_is_held_back_until_whole(codec: TextCodec) -> None:
    stream = TextStream(codec, [], [])
    tokens = codec.tokenizer.encode("☃!").ids
    assert [stream.push([token]) for token in tokens] == ["", "", "☃", "!"]


def test_half_a_character_at_the_end_is_shown_as_such(codec: TextCodec) -> None:
    stream = TextStream(codec, [], [])
    tokens = codec.tokenizer.encode("a☃").ids[:-1]
    assert stream.push(tokens) == "a"
    assert stream.flush() == codec.decode(tokens).removeprefix("a")


def test_a_stop_string_that_is_kept_ends_the_text_with_itself(codec: TextCodec) -> None:
    stream = TextStream(codec, [], ["lo w", "w"], keep_stop=True)
    assert streamed(stream, codec.tokenizer.encode("hello world").ids, []) == "hello w"
    assert stream.stopped


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab\u00e9\u2603", min_size=1, max_size=20), cuts=CUTS)
def test_a_tokens_offset_is_where_its_first_character_is(codec: TextCodec, text: str, cuts: list[int]) -> None:
    tokens = codec.tokenizer.encode(text).ids
    stream = TextStream(codec, [], [])
    assert streamed(stream, tokens, cuts) == text
    assert stream.offsets == [at for at, character in enumerate(text) for _ in character.encode()]


def test_silent_tokens_have_a_place_and_no_text(codec: TextCodec) -> None:
    tokens = codec.tokenizer.encode("ab!c").ids
    stream = TextStream(codec, [], [], silent=frozenset(tokens[2:3]))
    assert streamed(stream, tokens, []) == "abc"
    assert (stream.offsets, stream.taken) == ([0, 1, 2, 2], 4)


def test_no_stop_string_is_seen_before_the_least_length(codec: TextCodec) -> None:
    tokens = codec.tokenizer.encode("ababab").ids
    assert streamed(TextStream(codec, [], ["ab"], min_tokens=4), tokens, [1, 3]) == "ab"
    assert streamed(TextStream(codec, [], ["ab"], min_tokens=5), tokens, [1, 3]) == "abab"


def test_tokens_of_no_whole_character_are_shown_as_bytes(codec: TextCodec) -> None:
    shown = [codec.token_text(token) for token in codec.tokenizer.encode(" the \u2603a").ids]
    assert shown == [" the", " ", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "a"]
    assert codec.token_text(1) == "</s>"
    the = codec.tokenizer.token_to_id("the")
    assert codec.token_bytes(the) is codec.token_bytes(the), "looked up, not decoded again: a chat shows thousands"


class Letter(str):
    """A character that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Letter.compared += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def test_the_cost_per_character_is_independent_of_held_back_stop_text() -> None:
    stop = Stop(("a" * 500 + "b") * 2)
    Letter.compared = 0
    text = ("a" * 500 + "b" + "a" * 499) * 10
    assert not any(stop.takes(Letter(character)) for character in text)
    assert Letter.compared <= 4 * len(text)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4),
    cuts=CUTS,
)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    filter_ = StopFilter(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(filter_.push(text[begin:end], may_stop=False) for begin, end in pairwise(edges))
    held = max(
        length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length]) and length <= len(text)
    )
    assert shown == text[: len(text) - held]
    assert shown + filter_.flush() == text


def test_the_beginning_of_a_stop_string_is_held_back_and_shown_at_the_end() -> None:
    stop = StopFilter(["\n\nQ:"])
    assert stop.push("yes\n\n") == "yes"
    assert stop.push("no\n") == "\n\nno"
    assert stop.flush() == "\n"
    assert not stop.stopped


def test_the_first_tokens_leading_space_survives_a_stripping_tokenizer() -> None:
    vocabulary = {"<unk>": 0, "▁Once": 1, "▁upon": 2, "▁a": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    codec = TextCodec(tokenizer.to_str().encode())
    assert codec.decode([2, 3]) == "upon a"
    assert TextStream(codec, [1], []).push([2, 3]) == " upon a"


def test_a_prompt_too_long_by_far_is_refused_before_it_is_encoded(codec: TextCodec) -> None:
    with pytest.raises(BadParameter, match="4000 characters"):
        codec.encode("x" * 4000, max_tokens=100)


def test_long_and_short_prompts_encode_alike(codec: TextCodec) -> None:
    text = "the cat " * 400
    assert codec.encode(text, 10_000) == codec.tokenizer.encode(text).ids


def test_a_broken_tokenizer_is_named() -> None:
    with pytest.raises(MismatchError, match=r"tokenizer\.json"):
        TextCodec(b"{")


class Counting(TextCodec):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(tokens)
        return super().decode(tokens, skip_special_tokens)


def id_of(codec: TextCodec, byte: int) -> int:
    """The token that is this byte alone."""
    return next(token for token in range(codec.tokenizer.get_vocab_size()) if codec.token_bytes(token) == bytes([byte]))


@pytest.mark.parametrize("run", [[0x80], [0xF0], [0xE2, 0x98], [0xF0, 0x9F, 0x98], [0xE2, 0x98, 0x41], [None]])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_token_costs_the_same_however_much_text_is_held_back(
    kind: str, run: list[int | None], codec: TextCodec, stories_dir: Path
) -> None:
    json = codec.tokenizer.to_str().encode() if kind == "byte-level" else (stories_dir / "tokenizer.json").read_bytes()
    counting = Counting(json)
    special = counting.tokenizer.token_to_id("<s>")
    tokens = [special if byte is None else id_of(counting, byte) for byte in run] * (3000 // len(run))
    stream = TextStream(counting, [], [])
    counting.decoded = 0
    text = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert counting.decoded <= 12 * len(tokens)
    assert text == counting.tokenizer.decode(tokens)
    assert len(stream.offsets) == len(tokens)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(3, 258) | st.sampled_from([300, 410, 226, 155, 175]), max_size=30), cuts=CUTS)
def test_bytes_that_a_tokenizer_falls_back_on_give_one_text_in_any_pieces(
    stories_dir: Path, tokens: list[int], cuts: list[int]
) -> None:
    codec = _stories_codec(stories_dir)
    once, in_pieces = TextStream(codec, [], []), TextStream(codec, [], [])
    assert streamed(once, tokens, []) == streamed(in_pieces, tokens, cuts)
    assert once.offsets == in_pieces.offsets


@cache
def _stories_codec(stories_dir: Path) -> TextCodec:
    return TextCodec((stories_dir / "tokenizer.json").read_bytes())


def test_the_real_tokenizer_streams_what_it_decodes(stories_dir: Path) -> None:
    codec = TextCodec((stories_dir / "tokenizer.json").read_bytes())
    prompt = codec.tokenizer.encode("Once upon a time").ids
    tokens = codec.tokenizer.encode("there was a café, 雪☃ and\n\ta girl.").ids[1:]
    stream = TextStream(codec, prompt, [])
    text = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert codec.decode(prompt + tokens) == codec.decode(prompt) + text
