"""Logprobs of a prompt are those of a full forward, shown once for all its choices and off the event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import StreamingResponse

from gateway.api.answers import json_answer
from gateway.api.chat import ChatCompletion
from gateway.api.completion import Completion
from gateway.text.json_pieces import pieces_of
from tests.gateway.api.conftest import PROMPT, TOLERANCE, Reference
from tests.gateway.api.decoded import Read, decoded
from tests.gateway.conftest import OFF, Api
from tests.services import running


def check_positions(reference: Reference, tokens: list[int], positions: list[dict[str, Any] | None], top: int) -> None:
    """That for each token but the first there are itself and the `top` likeliest ones, as a full forward has them."""
    assert positions[0] is None
    assert len(positions) == len(tokens)
    table = reference.logprobs(tokens)
    for at, position in enumerate(positions[1:]):
        token, row = tokens[at + 1], table[at]
        assert position is not None
        likeliest = row.topk(top).indices.tolist() if top else []
        assert position.keys() == {str(other) for other in [token, *likeliest]}
        for other, told in position.items():
            assert told["logprob"] == pytest.approx(row[int(other)].item(), abs=TOLERANCE)
            assert told["decoded_token"] == reference.codec.token_text(int(other))
        own = position[str(token)]
        close = (row - row[token]).abs() < TOLERANCE
        assert abs(own["rank"] - 1 - int((row > row[token]).sum())) <= int(close.sum()) - 1
        ranks = sorted(told["rank"] for other, told in position.items() if int(other) in likeliest)
        assert ranks == list(range(1, top + 1))


@pytest.mark.parametrize("speculation", [OFF, {"k": 4}], ids=str)
@pytest.mark.parametrize(("top", "logprobs"), [(0, None), (3, None), (1, 4), (5, 2)])
def test_prompt_logprobs_are_those_of_a_full_forward(
    api: Api, reference: Reference, top: int, logprobs: int | None, speculation: dict[str, Any]
) -> None:
    api.complete(PROMPT, max_tokens=1)  # a prefix that could be reused must not be
    request: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "speculation": speculation, "logprobs": logprobs}
    request["return_token_ids"] = True
    plain = api.complete([PROMPT, "Lily"], n=2, **request)["choices"]
    scored = api.complete([PROMPT, "Lily"], n=2, **request, prompt_logprobs=top)["choices"]
    for choice, without in zip(scored, plain, strict=True):
        check_positions(reference, choice["prompt_token_ids"], choice.pop("prompt_logprobs"), top)
        told, told_without = choice.pop("logprobs"), without.pop("logprobs")
        assert choice == without
        assert (told is None) == (logprobs is None)
        if told is not None:
            assert [*map(list, told["top_logprobs"])] == [*map(list, told_without["top_logprobs"])]


def test_a_prompt_of_one_token_has_no_logprobs(api: Api) -> None:
    (choice,) = api.complete([5], max_tokens=2, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [None]


def test_prompt_logprobs_are_told_beside_an_echo(api: Api) -> None:
    (choice,) = api.complete(PROMPT, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    echoed, scored = choice["logprobs"]["token_logprobs"], choice["prompt_logprobs"]
    assert echoed[1:] == [next(iter(position.values()))["logprob"] for position in scored[1:]]
    assert {len(alternatives) for alternatives in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}


def test_prompt_logprobs_do_not_come_in_a_stream(api: Api) -> None:
    for wrong, says in (({"stream": True, "prompt_logprobs": 1}, "stream"), ({"prompt_logprobs": 21}, "20")):
        error = api.post(prompt=PROMPT, **wrong).json()["error"]
        assert (error["param"], says in error["message"]) == ("prompt_logprobs", True)


def test_a_chat_has_its_prompt_s_logprobs_beside_the_choices(stories_chat_dir: Path, reference: Reference) -> None:
    messages = [{"role": "user", "content": "Lily and the dog"}]
    with running(stories_chat_dir) as system:
        chat = {"messages": messages, "max_tokens": 3, "prompt_logprobs": 2, "return_token_ids": True, "n": 2}
        answer = Api(system.url).http.post("/v1/chat/completions", json=chat).json()
    check_positions(reference, answer["choices"][0]["prompt_token_ids"], answer["prompt_logprobs"], 2)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


# -- the event loop --------------------------------------------------------------------------------------------------


def scores_of(completion: Completion, choice: int = 0) -> Read:
    scores = completion.choices[choice].sequence.prompt_logprobs
    assert isinstance(scores, Read)
    return scores


def pieces_read(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as its client reads it."""
    read: dict[str, Any] = json.loads(b"".join(pieces_of(answer)))
    return read


@pytest.mark.parametrize(("kind", "prompts"), [(Completion, 2), (ChatCompletion, 1)])
def test_a_prompt_s_logprobs_are_shown_once_for_all_its_choices(
    reference: Reference, kind: type[Completion], prompts: int
) -> None:
    lengths = [300, 400][:prompts]

    async def answer() -> tuple[dict[str, Any], list[Read]]:
        completion = decoded(kind, reference.codec, [[7] * length for length in lengths], n=4, prompt_logprobs=2)
        return pieces_read(await completion.whole()), [scores_of(completion, 4 * at) for at in range(prompts)]

    told, scores = asyncio.run(answer())
    assert [each.times for each in scores] == [length - 1 for length in lengths]
    scored = told["choices"] if kind is Completion else [told]
    assert [len(each["prompt_logprobs"]) for each in scored] == sorted(lengths * (4 if kind is Completion else 1))


@pytest.mark.parametrize("streamed", [False, True])
def test_the_logprobs_of_a_long_echo_are_shown_once_for_all_its_choices(reference: Reference, streamed: bool) -> None:
    async def answer() -> Read:
        completion = decoded(Completion, reference.codec, [[7] * 300], n=4, logprobs=2, echo=True, stream=streamed)
        if streamed:
            events = [event async for event in completion.events()]
            assert b"error" not in b"".join(events)
            assert sum(b'"text_offset":[0,' in event for event in events) == 4
            assert not scores_of(completion).on_the_loop
        else:
            choices = pieces_read(await completion.whole())["choices"]
            assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [301] * 4
        return scores_of(completion)

    # For tokens, logprobs, alternatives and offsets.
    assert asyncio.run(answer()).times == 4 * 299


def test_an_answer_of_many_choices_holds_the_prompt_s_logprobs_once(reference: Reference) -> None:
    """256 choices of one prompt made 36 MB of a request of 22 KB."""

    async def answer() -> list[bytes]:
        completion = decoded(Completion, reference.codec, [[7] * 300], n=16, logprobs=2, echo=True)
        return list(pieces_of(await completion.whole()))

    pieces = asyncio.run(answer())
    sent, held = sum(map(len, pieces)), sum(len(piece) for piece in {id(piece): piece for piece in pieces}.values())
    assert held < sent / 6


def test_a_long_answer_is_written_while_it_is_sent_and_off_the_loop(reference: Reference) -> None:
    async def answer() -> tuple[bytes, Read, int]:
        completion = decoded(Completion, reference.codec, [[7] * 4000], logprobs=2, echo=True)
        response = json_answer(await completion.whole(), {})
        assert isinstance(response, StreamingResponse)
        at_first = scores_of(completion).times
        chunks = [bytes(chunk) async for chunk in response.body_iterator if isinstance(chunk, bytes)]
        assert max(map(len, chunks)) < 1 << 17
        return b"".join(chunks), scores_of(completion), at_first

    body, scores, at_first = asyncio.run(answer())
    assert len(json.loads(body)["choices"][0]["logprobs"]["tokens"]) == 4001
    assert at_first < scores.times


def test_a_prompt_is_scored_for_the_first_of_its_choices_alone(reference: Reference) -> None:
    async def wanted(**fields: Any) -> list[bool]:
        completion = decoded(Completion, reference.codec, [[7] * 3, [8] * 3], n=2, best_of=3, **fields)
        return [choice.sequence.wants_prompt_logprobs for choice in completion.choices]

    once = [True, False, False] * 2
    assert asyncio.run(wanted(echo=True, logprobs=0)) == once
    assert asyncio.run(wanted(prompt_logprobs=0)) == once


def test_choices_wait_for_the_prompt_s_scores_of_the_first(reference: Reference) -> None:
    async def told() -> list[int]:
        completion = decoded(Completion, reference.codec, [[7] * 3], n=2, echo=True, logprobs=0)
        scores = scores_of(completion)
        completion.choices[0].sequence.prompt_logprobs = None
        await asyncio.to_thread(completion._echo_prompts)
        assert completion.choices[1].pull() is None
        completion.choices[0].sequence.prompt_logprobs = scores  # type: ignore[assignment]
        return [piece.index for choice in completion.choices if (piece := choice.pull())]

    assert asyncio.run(told()) == [0, 1]
