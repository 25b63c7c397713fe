"""Grammars: what may come next, on every draft's own history, for both kinds of tokenizer that Llama models have."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from spire.errors import CheckpointError, InvalidRequest
from spire.rpc.limits import MAX_GRAMMAR_BYTES
from spire.v1 import verifier_pb2 as pb
from tests.paths import ROOT
from verifier_service.sampling.grammar import Grammars, Matcher

# More than the tokenizer's 4,096.
BYTE_LEVEL_VOCAB, BYTE_LEVEL_END = 4100, 1
STORIES_VOCAB, STORIES_END = 512, 2
LAYOUT = r"[ \t\r\n]{1,20}"


@dataclass(frozen=True)
class Language:
    """A tokenizer, and grammars over it for a model that ends with `ends`."""

    tokenizer: Tokenizer
    grammars: Grammars
    vocab_size: int
    ends: tuple[int, ...]

    def compile(self, **kind: str) -> Matcher:
        return self.grammars.compile(pb.Grammar(**kind))

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def language(tokenizer_json: bytes, vocab_size: int, ends: tuple[int, ...]) -> Language:
    grammars = Grammars(tokenizer_json, vocab_size, ends)
    return Language(Tokenizer.from_buffer(tokenizer_json), grammars, vocab_size, ends)


@pytest.fixture(scope="module")
def byte_level() -> Language:
    return language((ROOT / "models/target/tokenizer.json").read_bytes(), BYTE_LEVEL_VOCAB, (BYTE_LEVEL_END,))


@pytest.fixture(scope="module")
def sentencepiece(stories_dir: Path) -> Language:
    return language((stories_dir / "tokenizer.json").read_bytes(), STORIES_VOCAB, (STORIES_END,))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def spoken(request: pytest.FixtureRequest) -> Language:
    return request.getfixturevalue(request.param)


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str = Field(max_length=12)
    number: int


class Person(BaseModel):
    """As users send it: references, a nested object, an optional field, an enum, a number, an array."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    height: float = Field(ge=0.5, le=2.5)
    mood: Literal["calm", "läßt", 'a "quote"']
    home: Place
    tags: list[Literal["a", "bb"]] = Field(max_length=3)
    nick: str | None = Field(default=None, max_length=4)


LIST = r"""
start: list
list: "[" [item ("," item){0,2}] "]"
item: NUMBER | list
NUMBER: /0|[1-9][0-9]{0,3}/
"""


def is_list_of_numbers(text: str) -> bool:
    def numbers(value: object) -> bool:
        return all(map(numbers, value)) if isinstance(value, list) else isinstance(value, int)

    return isinstance(value := json.loads(text), list) and numbers(value)


WORDS = r"(\d{4}-\d\d|[a-z]{1,5}é/?){1,3}\."

GRAMMARS: dict[str, tuple[dict[str, str], Callable[[str], object]]] = {
    "schema": ({"json_schema": json.dumps(Person.model_json_schema())}, Person.model_validate_json),
    "regex": ({"regex": WORDS}, lambda text: re.fullmatch(WORDS, text)),
    "lark": ({"lark": LIST}, is_list_of_numbers),
}
every_grammar = pytest.mark.parametrize(("kind", "matches"), GRAMMARS.values(), ids=GRAMMARS)


def walk(matcher: Matcher, ends: Sequence[int], rng: random.Random, length: int = 1000) -> list[int]:
    """Up to `length` tokens, each any of those allowed; the end where it may come, more often than not."""
    output: list[int] = []
    while len(output) < length and not set(output) & set(ends):
        allowed = matcher.masks([])[0].nonzero().flatten().tolist()
        assert allowed
        closing = [token for token in allowed if token in ends]
        output.append(rng.choice(closing if closing and rng.random() < 0.6 else allowed))
        matcher.advance(output[-1:])
    return output


@every_grammar
def test_whatever_is_drawn_from_the_masks_is_in_the_language(
    spoken: Language, kind: dict[str, str], matches: Callable[[str], object]
) -> None:
    rng = random.Random(1)
    for _ in range(12):
        output = walk(spoken.compile(**kind), spoken.ends, rng)
        assert output[-1] in spoken.ends
        assert matches(spoken.text(output[:-1])), spoken.text(output)


def test_every_spelling_of_a_text_in_the_language_is_allowed(byte_level: Language) -> None:
    text = '{"street": "Hill läne",\n  "number": 1203}'
    letter_by_letter = [token for letter in text for token in byte_level.tokens(letter)]
    assert letter_by_letter != byte_level.tokens(text)
    for tokens in (letter_by_letter, byte_level.tokens(text)):
        schema = json.dumps(Place.model_json_schema())
        byte_level.compile(json_schema=schema, json_whitespace=LAYOUT).advance([*tokens, BYTE_LEVEL_END])


def test_threads_may_compile_at_once(byte_level: Language) -> None:
    with ThreadPoolExecutor(4) as threads:
        matchers = threads.map(lambda count: byte_level.compile(regex=f"a{{{count}}}"), range(1, 9))
    for count, matcher in enumerate(matchers, 1):
        matcher.advance(byte_level.tokens("a") * count)
        assert set(matcher.masks([])[0].nonzero().flatten().tolist()) == set(byte_level.ends)


@settings(max_examples=25, deadline=None)
@given(grammar=st.sampled_from(list(GRAMMARS)), seed=st.integers(0, 999), committed=st.integers(0, 40), data=st.data())
def test_a_row_is_what_would_be_allowed_had_its_draft_been_committed(
    byte_level: Language, grammar: str, seed: int, committed: int, data: st.DataObject
) -> None:
    kind, _ = GRAMMARS[grammar]
    output = walk(byte_level.compile(**kind), byte_level.ends, random.Random(seed), committed + 5)
    output, draft = output[:committed], output[committed:]
    for at in data.draw(st.lists(st.integers(0, 4), max_size=2)):
        draft[at : at + 1] = [data.draw(st.integers(0, BYTE_LEVEL_VOCAB - 1))]
    matcher = byte_level.compile(**kind)
    matcher.advance(output)
    before_V = matcher.masks([])[0]
    rows_TV = matcher.masks(draft)
    assert rows_TV.shape == (len(draft) + 1, BYTE_LEVEL_VOCAB)
    assert torch.equal(matcher.masks([])[0], before_V), "the draft has left something behind"
    for i, row_V in enumerate(rows_TV):
        reference = byte_level.compile(**kind)
        reference.advance([*output, *draft[:i]])
        assert torch.equal(row_V, reference.masks([])[0])
        if i == len(draft) or not row_V[draft[i]]:
            break
    else:
        return
    if i < len(draft):
        with pytest.raises(InvalidRequest, match=f"token {draft[i]} cannot come here"):
            matcher.advance(draft[: i + 1])


def test_special_tokens_and_ids_without_a_token_are_never_allowed(byte_level: Language) -> None:
    anything_V = byte_level.compile(regex=r"(?s:.*)").masks([])[0]
    assert not anything_V[0], "<s>"
    assert not anything_V[4096:].any()
    assert anything_V[1], "the end may come at once"
    negated_V = byte_level.compile(lark="start: ~/a/").masks([])[0]  # matches bytes that no text has
    assert not negated_V[0]
    assert not negated_V[4096:].any()


def test_every_end_token_ends_and_is_no_text_even_if_the_tokenizer_says_so() -> None:
    tokenizer_json = (ROOT / "models/target/tokenizer.json").read_bytes()
    letter = Tokenizer.from_buffer(tokenizer_json).token_to_id("a")
    two = language(tokenizer_json, BYTE_LEVEL_VOCAB, (1, letter))
    matcher = two.compile(regex="[ab]")
    assert matcher.masks([])[0].nonzero().flatten().tolist() == two.tokens("b")
    matcher.advance(two.tokens("b"))
    for _ in range(3):  # nothing may follow, then it has ended, then it has ended twice
        assert matcher.masks([])[0].nonzero().flatten().tolist() == [1, letter]
        assert matcher.masks([letter, 1])[1:].sum(dim=1).tolist() == [2, 2]
        matcher.advance([letter])
    with pytest.raises(InvalidRequest, match="cannot come here"):
        matcher.advance(two.tokens("b"))


def test_text_that_only_an_end_token_spells_cannot_be_written() -> None:
    tokenizer_json = (ROOT / "models/target/tokenizer.json").read_bytes()
    brace = Tokenizer.from_buffer(tokenizer_json).token_to_id("{")
    mute = language(tokenizer_json, BYTE_LEVEL_VOCAB, (brace,))
    with pytest.raises(InvalidRequest, match="no token can begin"):
        mute.compile(regex=r"\{+")
    matcher = mute.compile(regex=r"a\{b")
    matcher.advance(mute.tokens("a"))
    assert matcher.masks([])[0].nonzero().flatten().tolist() == [brace]
    matcher.advance([brace])
    assert matcher.masks([brace]).sum(dim=1).tolist() == [1, 1]


def test_an_output_cannot_end_before_it_is_complete(spoken: Language) -> None:
    matcher = spoken.compile(regex="abc?")
    first = spoken.tokenizer.token_to_id("a")
    assert not matcher.masks([])[0, spoken.ends[0]]
    matcher.advance([first])
    with pytest.raises(InvalidRequest, match="cannot come here"):
        matcher.advance([spoken.ends[0]])


def test_where_an_output_may_end_or_go_on_both_are_allowed(spoken: Language) -> None:
    matcher = spoken.compile(regex="x+")
    x = spoken.tokenizer.token_to_id("x")
    matcher.advance([x])
    assert matcher.masks([x])[:, [x, spoken.ends[0]]].all()


def test_a_draft_into_a_dead_end_ends_there_and_harms_nothing(byte_level: Language) -> None:
    matcher = byte_level.compile(lark='start: "a" ("b" | "c" never)\nnever: never')
    a, b, c = (byte_level.tokens(letter)[0] for letter in "abc")
    rows_TV = matcher.masks([a, c, b])
    assert rows_TV[2].nonzero().flatten().tolist() == [BYTE_LEVEL_END]
    matcher.advance([a, b, BYTE_LEVEL_END])


JSON = """{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "maxItems": 3,
"items": {"enum": ["c d", ", : "]}}}, "required": ["a", "b"], "additionalProperties": false}"""


def test_json_is_compact_unless_white_space_is_asked_for(byte_level: Language) -> None:
    def written(schema: str, **options: str) -> list[str]:
        matchers = [byte_level.compile(json_schema=schema, **options) for _ in range(10)]
        walks = [walk(matcher, byte_level.ends, random.Random(seed)) for seed, matcher in enumerate(matchers)]
        return [byte_level.text(output[:-1]) for output in walks]

    compact = r'\{"a":-?\d+,"b":\[("(c d|, : )"(,(?=")|(?=\])))*\]\}'
    assert [text for text in written(JSON) if not re.fullmatch(compact, text)] == []
    own = json.dumps(json.loads(JSON) | {"x-guidance": {"whitespace_pattern": LAYOUT}})
    for texts in (written(JSON, json_whitespace=LAYOUT), written(own)):
        assert {*json.loads(texts[0])} == {"a", "b"}
        assert not all(re.fullmatch(compact, text) for text in texts)


def test_white_space_between_the_tokens_of_json_may_be_bounded_or_not(byte_level: Language) -> None:
    bounded = byte_level.compile(json_schema='{"type": "array"}', json_whitespace=LAYOUT)
    bounded.advance([*byte_level.tokens("["), *byte_level.tokens(" ") * 20])
    assert not bounded.masks([])[0, byte_level.tokens(" ")].any()
    wide = byte_level.compile(json_schema='{"type": "array", "x-guidance": {"whitespace_pattern": " *"}}')
    wide.advance([*byte_level.tokens("["), *byte_level.tokens(" ") * 40])


def test_a_grammar_in_the_notation_of_llama_cpp_is_followed(byte_level: Language) -> None:
    source = 'root ::= "say " who ("!" | "?"){2}  # rules refer to one another\nwho ::= [a-c]+ | "<s>"\n'
    texts = {
        byte_level.text(walk(byte_level.compile(lark=source), byte_level.ends, random.Random(seed))[:-1])
        for seed in range(20)
    }
    assert len(texts) > 5
    assert [text for text in texts if not re.fullmatch(r"say ([a-c]+|<s>)[!?]{2}", text)] == []


def test_a_batch_of_matchers_answers_like_each_and_a_failure_stays_its_own(
    byte_level: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier_service.sampling.grammar._MOST_TOKEN_SECONDS", math.inf)
    too_many = byte_level.compile(lark='start: x{1,1000}\nx: y{1,1000}\ny: z{1,1000}\nz: "a"')
    a = byte_level.tokens("a")[0]
    with pytest.raises(InvalidRequest, match=r"cannot be followed: .*items"):
        too_many.advance([a] * 100)
    number, letters = byte_level.compile(regex="[0-9]+"), byte_level.compile(regex="[a-z]*")
    asked = [(number, byte_level.tokens("12")), (too_many, [a]), (letters, []), (letters, [a, a, 0, a])]
    answers = byte_level.grammars.masks(asked)
    assert isinstance(answers[1], InvalidRequest)
    for at in (0, 2, 3):
        assert torch.equal(torch.as_tensor(answers[at]), asked[at][0].masks(asked[at][1]))
    assert byte_level.grammars.masks([]) == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (pb.Grammar(), "empty: give it a json_schema, a regex or a lark"),
        (pb.Grammar(regex="a("), "unclosed group"),
        (pb.Grammar(regex="(?=a)b"), "look-around, .* is not supported"),
        (pb.Grammar(json_schema="{'a': 1}"), "no JSON: .* line 1 column 2"),
        (pb.Grammar(json_schema="true"), "an object is needed"),
        (pb.Grammar(json_schema='{"a":' * 10_000), "no JSON: .*recursion"),
        (pb.Grammar(json_schema='{"type": "strin"}'), "Invalid type: strin"),
        (pb.Grammar(json_schema='{"enum": []}'), "Unsatisfiable"),
        (pb.Grammar(json_schema='{"type": "array", "uniqueItems": true}'), 'Unimplemented keys: \\["uniqueItems"\\]'),
        (pb.Grammar(json_schema='{"$ref": "http://127.0.0.1/schema"}'), "does not fetch"),
        (pb.Grammar(json_schema='{"$ref": "#"}'), "no token can begin"),
        (pb.Grammar(lark='start: "a" missing'), 'unknown name: "missing"'),
        (pb.Grammar(lark='start: "a" </s> "b"'), "asks for the token </s>"),
        (pb.Grammar(lark="start: <[0-9]>"), r"asks for the token <\[0-9\]>"),
        (pb.Grammar(lark="root ::= ("), r"GBNF\): Expected '\)' at line 1"),
        (pb.Grammar(lark='start: x\nx ::= "a"'), "GBNF"),
        (pb.Grammar(lark="root ::= missing"), "'missing' not found"),
        (pb.Grammar(lark="root ::= " + "(" * 5000), "GBNF.*recursion"),
        (pb.Grammar(json_schema="{}", json_whitespace="("), "unclosed group"),
        (pb.Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "65537 bytes, at most 65536"),
    ],
)
def test_a_wrong_grammar_is_refused_in_words(byte_level: Language, grammar: pb.Grammar, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        byte_level.grammars.compile(grammar)
    assert len(str(refusal.value)) < 800


@pytest.mark.parametrize(
    "grammar",
    [
        pb.Grammar(json_schema='{"type": "integer", "multipleOf": 9999991}'),  # minutes
        pb.Grammar(regex="a?" * 20_000),  # gigabytes
        pb.Grammar(lark="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'),  # stack
        pb.Grammar(lark="\n".join(f"r{i}::=r{i + 1}" for i in range(4500)) + '\nr4500::="a"\nroot::=r0'),  # time
    ],
    ids=["time", "memory", "stack", "conversion"],
)
def test_a_grammar_that_would_take_the_verifier_down_is_refused(byte_level: Language, grammar: pb.Grammar) -> None:
    with pytest.raises(InvalidRequest, match="too complex"):
        byte_level.grammars.compile(grammar)


def test_an_ambiguous_grammar_is_refused_before_its_masks_take_long() -> None:
    """A mask of this one took 0.4 s, and everybody's step waited for it."""
    tokenizer_json = (ROOT / "models/target/tokenizer.json").read_bytes()
    grammars = Grammars(tokenizer_json, 4096, [0])
    with pytest.raises(InvalidRequest, match="Too many items"):
        grammars.compile(pb.Grammar(lark="start: x\nx: x x x | x x | /[a-z ]/"))


def test_what_looks_like_a_special_token_in_quotes_is_text(byte_level: Language) -> None:
    source = 'start: "<s>" /<b>/ "\\"<s>" // <s>\n'
    matcher = byte_level.compile(lark=source)
    output = walk(matcher, byte_level.ends, random.Random(3))
    assert byte_level.text(output[:-1]) == '<s><b>"<s>'


def test_a_model_without_end_tokens_is_told_so(byte_level: Language) -> None:
    endless = Grammars((ROOT / "models/target/tokenizer.json").read_bytes(), BYTE_LEVEL_VOCAB, ())
    with pytest.raises(InvalidRequest, match="no end token"):
        endless.compile(pb.Grammar(regex="a"))


@pytest.mark.parametrize(
    "model", [{}, {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}], ids=["no model", "no bytes"]
)
def test_a_tokenizer_without_bytes_is_refused_with_the_reason(model: dict[str, object]) -> None:
    tokenizer_json = json.dumps({"version": "1.0", "model": model, "added_tokens": []}).encode()
    with pytest.raises(CheckpointError, match=r"cannot be followed with this tokenizer.json: .+"):
        Grammars(tokenizer_json, 10, (1,))


def test_a_grammar_whose_tokens_take_ever_longer_is_refused_soon(byte_level: Language) -> None:
    """Its state grows with each token, and its time with the state's square: at 265 tokens 37 ms each."""
    matcher = byte_level.compile(lark='start: s\ns: s s | s s s | "a" | "aa" | "xyz"')
    (a,) = byte_level.tokens("a")
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        matcher.advance([a] * 250)
    assert matcher.token_seconds < 0.01
