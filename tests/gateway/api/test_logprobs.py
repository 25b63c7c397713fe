"""Logprobs are those of a full prefill, whichever way a token came, in the four arrays of the completions API."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.api.logprobs import LogprobEntry, arrays
from gateway.rounds.messages import logprobs_of
from gateway.sequence import Logprob
from gateway.text.tokenizer import TextCodec
from spire.errors import MismatchError
from spire.v1 import tensor_pb2, verifier_pb2
from tests.gateway.api.conftest import PROMPT, TOLERANCE, Reference
from tests.gateway.conftest import OFF, Api, stream
from tests.marks import thoroughly
from tests.services import running

FORGETFUL = ["-m", "tests.forgetful_verifier"]
WAYS = [OFF, {"k": 1}, {"k": 4}]


def check_arrays(reference: Reference, tokens: list[int], logprobs: dict[str, Any], expected: torch.Tensor) -> None:
    """That the arrays say of `tokens` what the rows of `expected` [T, V] say."""
    assert logprobs["tokens"] == [reference.codec.token_text(token) for token in tokens]
    wanted = [expected[at, token].item() for at, token in enumerate(tokens)]
    assert logprobs["token_logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
    for at, alternatives in enumerate(logprobs["top_logprobs"]):
        best = expected[at].topk(3)
        assert sorted(alternatives.values(), reverse=True)[:3] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert alternatives[logprobs["tokens"][at]] == logprobs["token_logprobs"][at]
        likeliest = reference.codec.token_text(int(best.indices[0]))
        assert alternatives[likeliest] == max(alternatives.values())


@pytest.mark.parametrize("speculation", WAYS, ids=str)
@pytest.mark.parametrize("temperature", [0, thoroughly(0.8), thoroughly(1.3)])
def test_output_logprobs_are_those_of_a_full_prefill(
    api: Api, reference: Reference, temperature: float, speculation: dict[str, Any]
) -> None:
    answer = api.complete(
        PROMPT,
        max_tokens=60,
        temperature=temperature,
        seed=2,
        ignore_eos=True,
        logprobs=3,
        return_token_ids=True,
        return_token_origins=True,
        speculation=speculation,
    )
    (choice,) = answer["choices"]
    if speculation != OFF and temperature == 0:
        assert {"draft", "target"} == set(choice["token_origins"])
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    expected = reference.logprobs(prompt + output, temperature or 1.0)[len(prompt) - 1 : -1]
    check_arrays(reference, output, choice["logprobs"], expected)


@pytest.mark.parametrize("speculation", WAYS, ids=str)
def test_echo_logprobs_are_those_of_a_full_prefill_and_begin_with_none(
    api: Api, reference: Reference, speculation: dict[str, Any]
) -> None:
    api.complete(PROMPT, max_tokens=1)  # a prefix that could be reused must not be
    request: dict[str, Any] = {"max_tokens": 20, "echo": True, "logprobs": 3, "return_token_ids": True}
    (choice,) = api.complete(PROMPT, seed=1, **request, speculation=speculation)["choices"]
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    logprobs = choice["logprobs"]
    firsts = [logprobs[name].pop(0) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    assert firsts == ["<s>", None, None, 0]
    check_arrays(reference, tokens[1:], logprobs, reference.logprobs(tokens)[:-1])
    assert choice["text"].startswith(PROMPT)


def test_loglikelihoods_of_a_benchmark_are_found_as_it_looks_for_them(api: Api, reference: Reference) -> None:
    """Token ids in, one token more than asked about out, the greedy flag from equal numbers."""
    context = reference.codec.tokenizer.encode(PROMPT).ids
    greedy = api.complete(context, max_tokens=5, temperature=0, return_token_ids=True)["choices"][0]["token_ids"]
    prompts = [context + greedy, [*context, 300, 301]]
    request = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    found = []
    for choice, prompt in zip(api.complete(prompts, **request)["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        tokens = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        found.append(all(number == max(top.values()) for number, top in zip(tokens, tops, strict=True)))
        table = reference.logprobs(prompt)[len(context) - 1 : -1]
        wanted = sum(table[at, token].item() for at, token in enumerate(prompt[len(context) :]))
        assert sum(tokens) == pytest.approx(wanted, abs=1e-3)
    assert found == [True, False]


def test_no_output_is_needed_to_score_a_prompt(api: Api, reference: Reference) -> None:
    answer = api.complete(PROMPT, max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    tokens = choice["prompt_token_ids"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
    table = reference.logprobs(tokens)
    wanted = [table[at, token].item() for at, token in enumerate(tokens[1:])]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=TOLERANCE)
    assert len(choice["logprobs"]["text_offset"]) == len(tokens)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "never there"])
def test_offsets_cut_the_text_into_its_tokens(api: Api, echo: bool, stop: str | None) -> None:
    prompt = "A caf\u00e9, \u96ea\u2603 and"
    (choice,) = api.complete(prompt, max_tokens=40, seed=3, echo=echo, logprobs=0, stop=stop, ignore_eos=True)[
        "choices"
    ]
    logprobs, text = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, begin, end in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        shown = text[begin:end]
        if not token.startswith(("bytes:", "<")) and "\ufffd" not in shown and len(shown) == len(token):
            assert shown == token
    whole = [t for t in logprobs["tokens"] if not t.startswith(("bytes:", "<"))]
    assert len(whole) > 20
    assert logprobs["top_logprobs"] == [None] * echo + [{}] * (len(offsets) - echo)


@pytest.mark.parametrize("echo", [thoroughly(False), True])
@pytest.mark.parametrize("stop", [None, thoroughly("never there"), "e"])
def test_a_streams_chunks_carry_the_logprobs_of_the_whole_answer(api: Api, echo: bool, stop: str | None) -> None:
    request: dict[str, Any] = {"max_tokens": 50, "seed": 5, "temperature": 0.7, "logprobs": 2, "echo": echo}
    request |= {"stop": stop, "speculation": {"rule": "invariant"}}
    (whole,) = api.complete(PROMPT, **request)["choices"]
    pieces = [event["choices"][0] for event in stream(api, PROMPT, **request)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name in ("tokens", "text_offset"):
        assert [item for piece in pieces for item in piece["logprobs"][name]] == whole["logprobs"][name]
    ours = [number for piece in pieces for number in piece["logprobs"]["token_logprobs"]]
    assert ours[echo:] == pytest.approx(whole["logprobs"]["token_logprobs"][echo:], abs=TOLERANCE)
    assert len(pieces) > 1 or stop == "e"


def test_a_stream_tells_the_logprobs_of_a_prompt_that_has_no_text(api: Api, reference: Reference) -> None:
    """The start token alone, and behind it nothing that is a whole character."""
    start, half = (reference.codec.tokenizer.token_to_id(name) for name in ("<s>", "<0xE2>"))
    request: dict[str, Any] = {"max_tokens": 3, "logprobs": 0, "echo": True, "allowed_token_ids": [half]}
    (whole,) = api.complete([start], **request)["choices"]
    pieces = [event["choices"][0] for event in stream(api, [start], **request)]
    assert whole["logprobs"]["tokens"][0] == "<s>"
    assert [token for piece in pieces for token in piece["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]


def test_what_a_stop_string_cuts_off_has_no_logprobs(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    full = api.complete(PROMPT, **request)["choices"][0]
    at = full["logprobs"]["text_offset"][20]
    stop = full["text"][at : at + 5]
    at = full["text"].index(stop)
    cut = api.complete(PROMPT, **request, stop=stop)["choices"][0]
    kept = [offset for offset in full["logprobs"]["text_offset"] if offset < at]
    assert cut["logprobs"]["text_offset"] == kept
    assert len(cut["logprobs"]["tokens"]) == len(kept) < len(cut["token_ids"])


def test_an_end_token_has_a_place_without_a_text(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    stop = api.complete(PROMPT, **request)["choices"][0]["token_ids"][10]
    choice = api.complete(PROMPT, **request, stop_token_ids=[stop])["choices"][0]
    assert choice["token_ids"][-1] == stop
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


def test_what_the_pipeline_excludes_has_the_lowest_logprob(api: Api) -> None:
    choice = api.complete(PROMPT, max_tokens=5, seed=1, top_k=1, logprobs=3)["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [0.0] * 5
    for alternatives in choice["logprobs"]["top_logprobs"]:
        assert sorted(alternatives.values()) == [-9999.0, -9999.0, 0.0]


def test_the_sampling_pipeline_shows_in_the_logprobs(api: Api, reference: Reference) -> None:
    """A bias and a temperature, by hand."""
    request: dict[str, Any] = {"max_tokens": 20, "temperature": 0.7, "seed": 6, "logit_bias": {"300": 4, "260": -100}}
    (choice,) = api.complete(PROMPT, **request, logprobs=3, return_token_ids=True, speculation={"k": 3})["choices"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    logits = reference.logits(prompt + output)[len(prompt) - 1 : -1]
    logits[:, 300] += 4
    logits[:, 260] -= 100
    check_arrays(reference, output, choice["logprobs"], (logits / 0.7).log_softmax(-1))


def test_every_choice_and_prompt_has_its_own_logprobs(api: Api, reference: Reference) -> None:
    request: dict[str, Any] = {"max_tokens": 8, "seed": 2, "n": 2, "logprobs": 3, "return_token_ids": True}
    for choice in api.complete([PROMPT, "The cat"], **request)["choices"]:
        prompt, output = choice["prompt_token_ids"], choice["token_ids"]
        expected = reference.logprobs(prompt + output)[len(prompt) - 1 : -1]
        check_arrays(reference, output, choice["logprobs"], expected)


def test_a_round_without_its_logprobs_is_replayed(api: Api, stories_dir: Path) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "seed": 5, "logprobs": 2, "echo": True, "return_token_ids": True}
    (expected,) = api.complete(PROMPT, **request, speculation=OFF)["choices"]
    with running(stories_dir, verifier=FORGETFUL) as system:
        forgetful = Api(system.url)
        (choice,) = forgetful.complete(PROMPT, **request)["choices"]
        assert forgetful.metric("spire_replays_total") > 5
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    ours, theirs = (answer["logprobs"]["token_logprobs"][1:] for answer in (choice, expected))
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_more_logprobs_than_are_held_for_one_request_are_refused_by_name(api: Api) -> None:
    wanted = {"n": 16, "max_tokens": 450, "logprobs": 20}
    response = api.post(prompt=["a"] * 16, **wanted)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    assert "2097152" in response.json()["error"]["message"]


# -- what comes from the verifier ------------------------------------------------------------------------------------


def wire(shape: list[int], numbers: list[float], dtype: Any = torch.float32) -> tensor_pb2.Tensor:
    kind = tensor_pb2.DTYPE_FLOAT32 if dtype is torch.float32 else tensor_pb2.DTYPE_INT32
    return tensor_pb2.Tensor(dtype=kind, shape=shape, data=torch.tensor(numbers, dtype=dtype).numpy().tobytes())


def message(tokens: int, top: int) -> verifier_pb2.Logprobs:
    count = tokens * top
    return verifier_pb2.Logprobs(
        tokens=wire([tokens], [-float(at) for at in range(tokens)]),
        top_ids=wire([tokens, top], list(range(count)), torch.int32),
        top=wire([tokens, top], [-0.5 * at for at in range(count)]),
    )


def test_each_token_gets_its_own_row() -> None:
    second = logprobs_of(message(3, 2), tokens=3, top=2)[1]
    assert (second.token, [*second.top]) == (-1.0, [(2, -1.0), (3, -1.5)])
    assert not logprobs_of(verifier_pb2.Logprobs(), tokens=0, top=5)


@pytest.mark.parametrize(
    "wrong",
    [
        verifier_pb2.Logprobs(),
        message(2, 2),
        message(3, 0),
        message(3, 3),
        verifier_pb2.Logprobs(tokens=wire([3], [0, 0, 0]), top_ids=message(3, 2).top_ids),
        verifier_pb2.Logprobs(tokens=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[3], data=b"12")),
        verifier_pb2.Logprobs(tokens=wire([3], [0, 0, 0], torch.int32)),
    ],
    ids=["none", "too few", "no others", "too many others", "ids alone", "short", "integers"],
)
def test_other_logprobs_than_were_asked_for_are_no_answer(wrong: verifier_pb2.Logprobs) -> None:
    with pytest.raises(MismatchError):
        logprobs_of(wrong, tokens=3, top=2)


def test_of_two_tokens_with_one_text_the_likelier_is_shown(stories_dir: Path) -> None:
    codec = TextCodec((stories_dir / "tokenizer.json").read_bytes())
    letter, byte = codec.tokenizer.token_to_id("a"), codec.tokenizer.token_to_id("<0x61>")
    entry = LogprobEntry(byte, Logprob(-math.inf, [(letter, -0.25)]), 7)
    assert {name: list(shown) for name, shown in arrays([entry], codec, top=1).items()} == {
        "tokens": ["a"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"a": -0.25}],
        "text_offset": [7],
    }
