"""Work whose size a client chooses keeps neither the event loop nor other clients."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import aside
from gateway.api.answers import json_answer, unless_gone
from gateway.api.app import create_app
from gateway.api.completion import Completion
from gateway.api.tokenization import DetokenizeRequest
from gateway.config import GatewayConfig
from gateway.errors import BadParameter, ClientLeft
from gateway.http.keys import Guard
from gateway.metrics import Metrics
from gateway.requests.bodies import parse
from gateway.requests.schemas import CompletionRequest
from gateway.rounds.engine import Engine
from gateway.sequence import RoundResult
from gateway.text.json_reader import MOST_PARTS, MOST_VALUES, read_json
from gateway.text.tokenizer import TextCodec
from gateway.verifier_client import ServedModel
from spire.service.fair_pool import FairPool
from spire.text.chat_template import ChatTemplate
from spire.v1 import verifier_pb2
from tests.conftest import CHAT_TEMPLATE
from tests.gateway.api.decoded import decoded
from tests.marks import thoroughly
from tests.stretches import longest_stretch_of

JSON = {"content-type": "application/json"}
# Of processor time. What is small is done in a millisecond or two.
LONGEST = 0.02
MOST_BYTES = 2 << 20
BYTES = MOST_BYTES - 100


class ByAddress(Guard):
    """Tells askers apart by a header, as keys would."""

    def admit(self, scope: Any) -> str | None:
        return next((value.decode() for name, value in scope["headers"] if name == b"x-asker"), None)


@pytest.fixture
def codec(stories_dir: Path) -> TextCodec:
    return TextCodec((stories_dir / "tokenizer.json").read_bytes())


@pytest.fixture
def ask(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A client of a gateway whose verifier is met and never asked."""
    monkeypatch.setattr(aside, "_POOL", FairPool(2, "test"))

    @asynccontextmanager
    async def client() -> AsyncIterator[httpx.AsyncClient]:
        config = GatewayConfig()
        engine = Engine(config, Metrics())
        info = verifier_pb2.GetInfoResponse(model_name="stories", max_context=512, vocab_size=512)
        engine.verifier.model = ServedModel(info, codec, ChatTemplate(CHAT_TEMPLATE, {}), 0)
        engine.verifier.up = engine.verifier.serving = True
        app = create_app(config, engine, ByAddress(None), "127.0.0.1")
        headers = {"Content-Type": "application/json"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            yield http

    return client


def body_of(kind: str) -> tuple[str, bytes]:
    """A path, and a body of 2 MiB for it."""
    complete, chat, tokenize, detokenize = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
    message = b'{"role":"user","content":"a"},'
    return {
        "ids": (complete, b'{"prompt":[' + b"1," * (BYTES // 2) + b"1]}"),
        "prompts": (complete, b'{"prompt":[' + b'"a b c",' * (BYTES // 8) + b'"a"]}'),
        "long prompts": (complete, b'{"prompt":[' + (b'"' + b"a " * 2000 + b'",') * 200 + b'"a"]}'),
        "lists": (complete, b'{"prompt":"a","extra":[' + b"[]," * (BYTES // 3) + b"1]}"),
        "members": (complete, b'{"prompt":"a","extra":{' + b'"a":1,' * (BYTES // 6) + b'"b":1}}'),
        "deep": (complete, b'{"prompt":' + b"[" * BYTES),
        "wrong stops": (complete, b'{"prompt":"a","stop":[' + b"1," * (BYTES // 2) + b"1]}"),
        "biases": (
            complete,
            b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":"b"' % at for at in range(60000)) + b"}}",
        ),
        "a schema": (complete, b'{"prompt":"a","guided_json":"' + b"[]," * (BYTES // 3) + b'"}'),
        "a schema of numbers": (
            complete,
            b'{"prompt":"a","guided_json":{"enum":[' + b"1," * (MOST_VALUES - 9) + b"1]}}",
        ),
        "variables": (
            chat,
            b'{"messages":[' + message[:-1] + b'],"chat_template_kwargs":{"a":[' + b"1," * 500_000 + b"1]}}",
        ),
        "ignored texts": (complete, b'{"prompt":"a","prompt_logprobs":-1,"extra":[' + b'"",' * 500_000 + b"1]}"),
        "choices": (complete, b'{"prompt":"a","guided_choice":[' + b'"\\\\\\\\",' * (BYTES // 8) + b'"a"]}'),
        "a model": (complete, b'{"prompt":"a","model":"' + b"a" * BYTES + b'"}'),
        "messages": (chat, b'{"messages":[' + message * 16000 + message[:-1] + b"]}"),
        "a message": (chat, b'{"messages":[{"role":"user","content":"' + b"a " * (BYTES // 2) + b'"}]}'),
        "parts": (chat, b'{"messages":[{"role":"user","content":[' + b'{"type":"text"},' * 16000 + b"1]}]}"),
        "text": (tokenize, b'{"return_token_strs":true,"prompt":"' + b"a" * 3000 + b'"}'),
        "tokens": (detokenize, b'{"tokens":[' + b"300," * 200_000 + b"300]}"),
        "wrong tokens": (detokenize, b'{"tokens":[' + b'"a",' * 200_000 + b"300]}"),
    }[kind]


KINDS = [
    *(
        "ids",
        "long prompts",
        "lists",
        "members",
        "deep",
        "biases",
        "a schema",
        "a schema of numbers",
        "variables",
        "ignored texts",
        "choices",
        "a model",
        "a message",
        "text",
    ),
    *map(thoroughly, ("prompts", "wrong stops", "messages", "parts", "tokens", "wrong tokens")),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_no_body_keeps_the_event_loop(ask: Callable[[], Any], kind: str) -> None:
    path, body = body_of(kind)
    assert len(body) <= MOST_BYTES
    async with ask() as http:
        await http.post(path, content=b"{}", headers=JSON)
        longest, answer = await longest_stretch_of(lambda: http.post(path, content=body, headers=JSON), LONGEST)
    assert answer.status_code == (200 if kind in ("text", "tokens") else 404 if kind == "a model" else 400), (
        answer.text[:300]
    )
    assert len(answer.text) < 1000 or answer.status_code == 200
    assert longest.seconds < LONGEST, longest


def test_of_a_list_of_wrong_items_the_first_is_told() -> None:
    with pytest.raises(BadParameter, match=r"^tokens\[0\][^;]*$"):
        parse(b'{"tokens": ["a", "b", "c"]}', DetokenizeRequest)


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":1}'])
def test_a_body_of_more_parts_than_a_request_needs_is_refused(value: str) -> None:
    assert len(read_json(f"[{','.join([value] * (MOST_PARTS - 1))}]".encode())) == MOST_PARTS - 1
    with pytest.raises(BadParameter, match="it may have 16384"):
        read_json(f"[{','.join([value] * (MOST_PARTS + 1))}]".encode())


def test_what_is_in_a_text_is_no_part_of_a_body() -> None:
    text = '[{:\\"[[{{' * MOST_PARTS + "\\"
    assert read_json(json.dumps([text]).encode()) == [text]


@pytest.mark.parametrize("of", ["encode", "decode_long"])
def test_tokenizing_leaves_the_interpreter_to_others(codec: TextCodec, of: str) -> None:
    argument = {"encode": ("a b " * 200_000, 10**6), "decode_long": ([300] * 2_000_000,)}[of]
    ended, turns = threading.Event(), 0

    def work() -> None:
        getattr(codec, of)(*argument)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ended.is_set():
        ended.wait(0.001)
        turns += 1
    thread.join()
    assert turns > 20


async def test_who_tokenizes_much_waits_behind_himself_alone(
    ask: Callable[[], Any], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, encode = threading.Event(), codec.encode

    def slow(text: str, *options: Any) -> list[int]:
        if text.startswith("long"):
            assert held.wait(60)
        return encode(text, *options)

    monkeypatch.setattr(codec, "encode", slow)
    async with ask() as http:

        def tokenize(who: str, text: str) -> asyncio.Task[httpx.Response]:
            body = {"prompt": text + " a" * aside.SMALL}
            return asyncio.create_task(http.post("/tokenize", json=body, headers={"x-asker": who}, timeout=60))

        many = [tokenize("greedy", "long") for _ in range(20)]
        other = await asyncio.wait_for(tokenize("other", "short"), 30)
        assert other.status_code in (200, 400)
        assert not any(one.done() for one in many)
        held.set()
        await asyncio.gather(*many)


async def test_what_a_client_has_left_is_not_tokenized(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, held, asked = FairPool(1, "test"), threading.Event(), list[str]()
    monkeypatch.setattr(aside, "_POOL", pool)
    monkeypatch.setattr(codec, "encode", lambda text, *_: asked.append(text) or [1])
    pool.submit("another", held.wait, 60)

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        await unless_gone(gone, aside.aside(codec.encode, "a", 512))
    for _ in range(3):  # until the cancelled task has heard of it
        await asyncio.sleep(0)
    held.set()
    assert await aside.aside(lambda: "next") == "next"
    assert asked == []


async def test_a_long_output_is_made_text_in_stretches(codec: TextCodec) -> None:
    def long() -> Completion:
        completion = decoded(Completion, codec, [[7]], n=16, logprobs=2)
        for choice in completion.choices:
            sequence, count = choice.sequence, 4000
            sequence.output, sequence.from_draft = [300] * count, [False] * count
            sequence.logprobs = sequence.logprobs * count
        return completion

    completions = [long(), long(), long()]
    unread = iter(completions)
    longest, _ = await longest_stretch_of(lambda: next(unread).whole(), LONGEST)
    ended = completions[: len(completions) - len(list(unread))]
    assert [choice.tokens for each in ended for choice in each.choices] == [4000] * 16 * len(ended)
    assert longest.seconds < LONGEST, longest


async def test_stop_strings_are_prepared_once_for_all_choices(codec: TextCodec) -> None:
    stops = [letter * 1024 for letter in "abcd"]
    began = time.thread_time()
    decoded(Completion, codec, [[7]] * 16, n=16, stop=stops)
    assert time.thread_time() - began < 2 * LONGEST, "256 choices are made in this stretch, too"


async def test_logprobs_that_were_held_back_come_in_pieces(codec: TextCodec) -> None:
    """As of a text without any characters, whose end alone shows that they belong to it."""
    completion = decoded(Completion, codec, [[7]], logprobs=2, return_rounds=True)
    (choice,), count = completion.choices, 1000
    sequence = choice.sequence
    sequence.output, sequence.from_draft = [0] * count, [False] * count
    sequence.logprobs = sequence.logprobs * count
    sequence.rounds = [RoundResult(at, 1, 0, 0) for at in range(count)]
    pieces = list(iter(choice.pull, None))
    assert max(len(piece.entries) for piece in pieces) <= 64
    assert max(len(piece.rounds) for piece in pieces) <= 64
    assert [entry.token for piece in pieces for entry in piece.entries] == sequence.output
    assert [round_.begin for piece in pieces for round_ in piece.rounds] == list(range(count))
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


async def test_a_long_prompts_logprobs_are_written_in_short_stretches(codec: TextCodec) -> None:
    async def written() -> None:
        completion = decoded(Completion, codec, [[5] * 20_000], prompt_logprobs=20)
        json_answer(await completion.whole(), {})

    longest, _ = await longest_stretch_of(written, LONGEST)
    assert longest.seconds < LONGEST, longest


def test_a_request_keeps_no_field_that_is_ignored() -> None:
    request = parse(b'{"prompt": "x", "metadata": {"a": [1, 2]}, "stream_options": {"other": 1}}', CompletionRequest)
    assert "metadata" not in repr(request)
    assert not request.model_extra
