"""Grammars: masks of the tokens that may come next, so that the whole output matches the grammar of the request.

A mask allows every tokenization of an allowed text, not only the tokenizer's own. Special tokens cannot be part of an
output. An output that no token can continue ends.

Does not know: that a grammar may require more tokens than max_tokens.

Shapes: R rows of a batch, W words of 32 bits, V vocabulary.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer, regex_to_lark
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens
from tokenizers import AddedToken
from torch import Tensor

from spire.checkpoints.tokenizer import tokenizer_of
from spire.errors import CheckpointError, InvalidRequest
from spire.rpc.limits import MAX_GRAMMAR_BYTES
from spire.v1 import verifier_pb2 as pb
from verifier_service.sampling import grammar_trial

# Otherwise the library allows only one token where the text is forced, and spends seconds on long forced texts.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_LARK_TOKEN = re.compile(
    r'"(?:\\(?s:.)|[^"\\])*+(?:"|\Z)|(?://|#).*|(?P<special><[^<>\s]+>)|/(?:\\(?s:.)|[^/\\])*+(?:/|\Z)'
)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOO_COMPLEX = (
    f"too complex: to compile it takes more than {grammar_trial.CPU_SECONDS} s, "
    f"{grammar_trial.MEMORY_BYTES >> 20} MiB of memory or {grammar_trial.STACK_BYTES >> 20} MiB of stack"
)
_TRIALS = grammar_trial.Trials()
# The longest processor time for a token of one grammar, on the average of so many tokens.
_MOST_TOKEN_SECONDS, _AVERAGED = 0.002, 16
# The longest error message: the library's messages quote the grammar.
_MAX_CHARACTERS = 600
# The formats of JSON schemas that are enforced, because the library knows them. The library refuses a schema with any
# other format; other formats are removed: they are annotations, as JSON Schema defines.
ENFORCED = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
# Keywords whose values are data, even if they look like schemas, and keywords whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})


class Grammars:
    """Compiles grammars for one model, on any number of threads. Raises CheckpointError for an unusable tokenizer."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, end_tokens: Sequence[int]):
        self._tokenizer, self.end = _read_tokenizer(tokenizer_json, vocab_size)
        self.ends_V = np.zeros(vocab_size, dtype=np.bool_)
        self.ends_V[list(end_tokens)] = True
        special = [self._tokenizer.is_special_token(token) for token in range(vocab_size)]
        # Tokens that can be part of an output.
        self.text_V = ~(np.array(special) | self.ends_V)
        self._words = (self._tokenizer.vocab_size + 31) // 32
        self._executor = LLExecutor()

    def compile(self, grammar: pb.Grammar) -> Matcher:
        """Compile a grammar and return its matcher. Raises InvalidRequest, worded for the grammar's author."""
        if not self.ends_V.any():
            raise _wrong("this model has no end token: nothing could end an output that a grammar describes")
        source = _source(grammar)
        _, words = _tried("compile", source)
        _check(words)
        state = grammar_trial.start(self._tokenizer, source)
        _check(grammar_trial.error(state))
        matcher = Matcher(self, state)
        if not (matcher.masks([])[0].numpy() & self.text_V).any() and not state.is_accepting():
            raise _wrong("no token can begin what the grammar describes")
        return matcher

    def masks(self, asked: Sequence[tuple[Matcher, Sequence[int]]]) -> list[Tensor | InvalidRequest]:
        """Return for each (matcher, draft) the result of `Matcher.masks`, or its error; computed in parallel."""
        drafts = [matcher.live(draft) for matcher, draft in asked]
        # A draft is tried on a copy: a library state is unusable once no token can continue.
        states = [one.state.deep_copy() if draft else one.state for (one, _), draft in zip(asked, drafts, strict=True)]
        *firsts, count = accumulate((len(draft) + 1 for _, draft in asked), initial=0)
        allowed_RV = self._rows(list(zip(states, firsts, drafts, strict=True)), count)
        answers: list[Tensor | InvalidRequest] = []
        for state, first, draft, (matcher, whole) in zip(states, firsts, drafts, asked, strict=True):
            end = first + len(whole) + 1
            allowed_RV[first + (0 if matcher.ended else len(draft) + 1) : end] = self.ends_V
            try:
                _check(grammar_trial.error(state))
                answers.append(torch.from_numpy(allowed_RV[first:end]))
            except InvalidRequest as error:
                answers.append(error)
        return answers

    def _rows(self, walks: list[tuple[LLMatcher, int, list[int]]], count: int) -> np.ndarray:
        """Return bool [R, V]: for each (state, first row, draft) the tokens allowed now and after each draft token."""
        bits_RW = np.full((count, self._words), -1, dtype=np.int32)
        if here := [(state, first) for state, first, draft in walks if not draft]:
            fill_next_token_bitmask_par(self._executor, here, bits_RW)
        if ahead := [walk for walk in walks if walk[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, ahead, bits_RW)
        bits_RV = np.unpackbits(bits_RW.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        allowed_RV = bits_RV[:, : len(self.text_V)] & self.text_V
        allowed_RV[bits_RV[:, self.end] | ~allowed_RV.any(axis=1)] |= self.ends_V
        return allowed_RV


class Matcher:
    """The state of one sequence's grammar after its output so far. Use it from one thread at a time."""

    def __init__(self, grammars: Grammars, state: LLMatcher):
        self._grammars = grammars
        self.state = state
        self.ended = False
        # Processor seconds to append a token, averaged over about _AVERAGED tokens. A mask takes as long.
        self.token_seconds = 0.0

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output. Raises InvalidRequest at a forbidden token; the matcher is unusable then."""
        for token in tokens:
            began = time.thread_time()
            if not self._take(token):
                _check(grammar_trial.error(self.state))
                raise _wrong(f"token {token} cannot come here: the grammar forbids it after what was generated")
            self.token_seconds += (time.thread_time() - began - self.token_seconds) / _AVERAGED
            if self.token_seconds > _MOST_TOKEN_SECONDS:
                raise self.too_slow()

    def too_slow(self) -> InvalidRequest:
        """Return the error for a grammar that takes too long to follow."""
        return _wrong(f"the grammar is too ambiguous: its next token takes {self.token_seconds * 1e3:.2g} ms to read")

    def masks(self, draft: Sequence[int]) -> Tensor:
        """Return bool [len(draft) + 1, V]: row i holds the tokens allowed after the output and draft[:i].

        Every row allows at least one token, and only end tokens once the output has ended. Rows after a forbidden draft
        token are meaningless. The output is not changed. Raises InvalidRequest if the grammar has become too complex to
        follow.
        """
        (answer,) = self._grammars.masks([(self, draft)])
        if isinstance(answer, InvalidRequest):
            raise answer
        return answer

    def live(self, draft: Sequence[int]) -> list[int]:
        """Return the draft tokens before the first that ends the output or cannot be part of an output."""
        if self.ended:
            return []
        text_V = self._grammars.text_V
        return list(draft[: next((i for i, token in enumerate(draft) if not text_V[token]), len(draft))])

    def _take(self, token: int) -> bool:
        if self._grammars.ends_V[token]:
            self.ended = self.ended or bool(self.masks([])[0, token])
            return self.ended
        return bool(self.live([token])) and self.state.try_consume_tokens([token]) == 1


def _read_tokenizer(tokenizer_json: bytes, vocab_size: int) -> tuple[LLTokenizer, int]:
    """Return the grammar library's tokenizer, and its token for the end of an output. Raises CheckpointError.

    The end token is added here: a model may have several end tokens, and some tokenizers treat them as text.
    """
    name = "<|end of what the grammar describes|>"
    try:
        tokenizer = tokenizer_of(tokenizer_json)
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        end = tokenizer.get_vocab()[name]
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=end), end
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise CheckpointError(f"grammars cannot be followed with this tokenizer.json: {error}") from error


def _source(grammar: pb.Grammar) -> str:
    """Return the grammar in the notation of llguidance. Raises InvalidRequest."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise _wrong("the grammar is empty: give it a json_schema, a regex or a lark")
    text = getattr(grammar, kind)
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise _wrong(f"the {kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken")
    match kind:
        case "regex":
            source = f"start: /{regex_to_lark(text, use_ascii='')}/"
        case "json_schema":
            source = f"start: %json {_with_layout(text, grammar.json_whitespace)}"
        case _ if _GBNF_RULE.search(text):
            source, words = _tried("convert", text)
            _check(words)
        case _:
            source = text
            if found := next((match for match in _LARK_TOKEN.finditer(text) if match["special"]), None):
                raise _wrong(f"the lark asks for the token {found[0]}: outputs are text, and text is quoted")
    return source + _OPTIONS


def _with_layout(schema_json: str, whitespace: str) -> str:
    """Return the schema with `whitespace` as the pattern between JSON tokens, unless the schema sets one itself."""
    try:
        schema = with_enforced_formats(json.loads(schema_json))
    except (ValueError, RecursionError) as error:
        raise _wrong(f"the json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _wrong(f"the json_schema is {schema_json[:20]}, an object is needed; {{}} allows any JSON")
    own = schema.get("x-guidance")
    options = own if isinstance(own, dict) else {}
    if not any(name.startswith("whitespace_") for name in options):
        options = options | {"whitespace_pattern": whitespace}
    return json.dumps(schema | {"x-guidance": options})


def with_enforced_formats(schema: Any) -> Any:
    """Return the schema without the formats that are not in ENFORCED, at every depth."""
    if isinstance(schema, list):
        return [with_enforced_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _inside(keyword, value)
        for keyword, value in schema.items()
        if keyword != "format" or not isinstance(value, str) or value in ENFORCED
    }


def _inside(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _NAMED and isinstance(value, dict):
        return {name: with_enforced_formats(schema) for name, schema in value.items()}
    return with_enforced_formats(value)


@lru_cache(maxsize=256)
def _tried(task: Literal["compile", "convert"], source: str) -> tuple[str, str]:
    """Compile or convert a grammar in a separate process. Return (output, error message or an empty string).

    Raises InvalidRequest if the process died, which is not remembered: the machine may have been the reason.
    """
    if (answer := _TRIALS.run(task, source)) is None:
        raise _wrong(f"the grammar cannot be followed: {_TOO_COMPLEX}")
    return answer


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, "grammar")


def _check(words: str) -> None:
    """Raise InvalidRequest with the library's message, if any, without its quotes of the translated source."""
    if not words:
        return
    words = re.split(r"\n *\d+ \| |\n<", words)[0].removeprefix("at 1(8): ")
    if len(words) > _MAX_CHARACTERS:
        words = f"{words[: _MAX_CHARACTERS // 2]} … {words[-_MAX_CHARACTERS // 2 :]}"
    raise _wrong(f"the grammar cannot be followed: {words}")
