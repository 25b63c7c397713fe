"""The draft service drafts for sequences that the verifier holds, and says no to everything else."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import torch

from draft_service.identity import check_handshake
from spire.checkpoints.weights import load_draft, load_target, save_draft
from spire.errors import MismatchError
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.config import DraftConfig
from spire.model.draft import prune
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.tensors import from_wire
from spire.v1 import draft_pb2 as pb, tensor_pb2, verifier_pb2
from tests.draft_service import harness
from tests.draft_service.conftest import eventually
from tests.draft_service.harness import GREEDY, WAIT_SECONDS, Following, following, item
from tests.recorder import Recorder
from tests.services import Services, running, start


@pytest.fixture(params=["by the reference", "by graphs"])
async def both(
    pair: tuple[Path, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Following]:
    """q in the replies themselves, where a test can read it."""
    if request.param == "by graphs":
        monkeypatch.setattr(harness, "new_backend", lambda: GpuBackend(Recorder()))
    async with following(pair, top_m=6) as both:
        yield both


async def test_each_sequence_of_a_request_gets_its_own_depth(both: Following) -> None:
    tokens = {"a": await both.start("a", [1, 2, 3]), "b": await both.start("b", [4])}
    drafted = await both.ask(item("a", 3, tokens["a"], k=4), item("b", 1, tokens["b"], k=1))
    assert [(d.sequence_id, len(d.tokens)) for d in drafted] == [("a", 4), ("b", 1)]


async def test_q_holds_what_was_drawn_and_sums_to_one(both: Following) -> None:
    token = await both.start("q", [1, 2, 3])
    (drafted,) = await both.ask(item("q", 3, token))
    ids, probabilities = from_wire(drafted.q.ids), from_wire(drafted.q.probabilities)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(4))
    assert all(drawn in row for drawn, row in zip(drafted.tokens, ids.tolist(), strict=True))


async def test_a_greedy_sequence_carries_no_q(both: Following) -> None:
    token = await both.start("greedy", [1, 2, 3], GREEDY)
    (drafted,) = await both.ask(item("greedy", 3, token, sampling=GREEDY))
    assert len(drafted.tokens) == 4
    assert not drafted.HasField("q")


async def test_a_request_that_is_made_again_is_replied_to_alike(both: Following) -> None:
    token = await both.start("again", [7, 2, 9])
    first, second = [await both.ask(item("again", 3, token)) for _ in range(2)]
    assert first == second


async def test_a_draft_that_is_behind_drafts_nothing_after_a_bounded_wait(both: Following) -> None:
    token = await both.start("behind", [1, 2, 3])
    began = time.monotonic()
    late, mate = await both.ask(item("behind", 9, token), item("a-mate", 1, 0))
    assert time.monotonic() - began < WAIT_SECONDS + 3
    assert {late.sequence_id, mate.sequence_id} == {"behind", "a-mate"}
    assert not late.tokens
    assert not mate.tokens
    assert late.status.code == tensor_pb2.CODE_FAILED_PRECONDITION
    assert mate.status.code == tensor_pb2.CODE_NOT_FOUND


async def test_nobody_waits_for_a_sequence_that_has_ended(both: Following) -> None:
    """As of a round that was asked for before the gateway knew that its text was whole."""
    token = await both.start("over", [1, 2, 3])
    await both.client.release("over")

    async def forgotten() -> bool:
        return (await both.ask(item("over", 3, token)))[0].status.code == tensor_pb2.CODE_NOT_FOUND

    assert await eventually(forgotten)
    began = time.monotonic()
    (ended,) = await both.ask(item("over", 9, token))
    assert ended.status.code == tensor_pb2.CODE_NOT_FOUND
    assert time.monotonic() - began < WAIT_SECONDS / 2, "an unknown one is waited for"


@pytest.mark.parametrize("rounds", [3, 12])
async def test_a_paused_sequence_is_drafted_as_if_the_draft_heard_every_round(both: Following, rounds: int) -> None:
    """The window holds four positions: more than that comes as a replay."""
    names = {"paused": True, "heard": False}
    newest = {name: await both.start(name, [1, 2, 3], GREEDY) for name in names}
    for number in range(1, rounds + 1):
        blocks = [
            verifier_pb2.VerifyItem(sequence_id=name, round=number, base=2 + number, paused=paused and number < rounds)
            for name, paused in names.items()
        ]
        results = await both.client.verify(*blocks)
        newest = {result.sequence_id: result.tokens[-1] for result in results}
    paused, heard = await both.ask(*(item(name, 3 + rounds, newest[name]) for name in names))
    assert len(paused.tokens) == 4
    assert (paused.tokens, paused.q) == (heard.tokens, heard.q)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 99}, "k is 99"),
        ({"newest_token": 16}, "vocabulary"),
        ({"sampling": tensor_pb2.Sampling(temperature=float("nan"), top_p=1)}, "temperature"),
        ({"sampling": tensor_pb2.Sampling(temperature=1, top_p=7)}, "top_p"),
    ],
)
async def test_a_bad_item_is_refused_and_its_mate_is_served(both: Following, change: dict, says: str) -> None:
    token = await both.start("good", [1, 2, 3])
    bad = item("bad", 3, 1)
    bad.MergeFrom(pb.DraftRequestItem(**change))
    replies = {d.sequence_id: d for d in await both.ask(bad, item("good", 3, token))}
    assert replies["bad"].status.code == tensor_pb2.CODE_INVALID_ARGUMENT
    assert says in replies["bad"].status.message
    assert len(replies["good"].tokens) == 4


def test_state_bytes_are_the_same_at_context_100_and_200(services: Services) -> None:
    seen = []
    for context in (100, 200):
        complete(services.url, {"prompt": [1] * context, "max_tokens": 4})
        seen.append(sample(services.url, "spire_draft_state_bytes_per_sequence"))
    assert seen[0] == seen[1] > 0


@pytest.mark.fault(1)
def test_a_restarted_draft_takes_up_running_sequences(pair: tuple[Path, Path]) -> None:
    with (
        running(*pair) as services,
        httpx.stream(
            "POST",
            f"{services.url}/v1/completions",
            json={"prompt": [1], "max_tokens": 240, "stream": True, "ignore_eos": True},
            timeout=60,
        ) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert services.draft is not None
        services.draft.kill()
        services.restart_draft()
        assert [line for line in lines if line][-1] == "data: [DONE]"


async def same_after_restart(both: Following, tokens: list[int]) -> bool:
    token = await both.start("running", tokens)
    (before,) = await both.ask(item("running", len(tokens), token))
    assert len(before.tokens) == 4
    await both.stop_draft()
    await both.start_draft()

    async def same_again() -> bool:
        (after,) = await both.ask(item("running", len(tokens), token))
        return after == before

    return await eventually(same_again)


async def test_a_restarted_draft_drafts_the_same_for_sequences_that_were_running(both: Following) -> None:
    assert await same_after_restart(both, [1, 2, 3, 4, 5, 6, 7])


def test_requests_are_served_while_the_draft_is_dead_and_drafted_once_back(pair: tuple[Path, Path]) -> None:
    with running(*pair) as services:
        assert services.draft is not None
        services.draft.kill()
        answer = complete(services.url, {"prompt": [1], "max_tokens": 30})
        assert answer["usage"]["completion_tokens"] == 30
        services.restart_draft()
        body = {"prompt": [1], "max_tokens": 30}
        assert wait_until(lambda: accepted_tokens(complete(services.url, body)) > 0)


@pytest.fixture(scope="module")
def twin(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself as a draft that is sent tokens and remembers its own past: greedy, it is never wrong."""
    target, fingerprint = load_target(pair[0])
    config = DraftConfig(target_fingerprint=fingerprint, tapped_layers=(), feedback=False, window=256)
    out = tmp_path_factory.mktemp("twin")
    save_draft(out, prune(target, config, (0, 1, 2)), torch.float32)
    return out


def test_a_draft_that_is_sent_tokens_knows_all_that_the_target_knows(pair: tuple[Path, Path], twin: Path) -> None:
    """Also after it was killed in the middle of a text, and for prompts of several lengths at once."""
    with running(pair[0], twin) as services:
        for prompt in ([1], [3, 1, 4, 1, 5], [2] * 60):
            answer = complete(services.url, {"prompt": prompt, "max_tokens": 41, "temperature": 0})
            details = answer["usage"]["completion_tokens_details"]
            assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (32, 0)
        assert services.draft is not None
        services.draft.kill()
        services.restart_draft()
        body = {"prompt": [5, 6], "max_tokens": 41, "temperature": 0}
        assert wait_until(lambda: accepted_tokens(complete(services.url, body)) == 32)


async def test_a_restarted_draft_is_sent_the_whole_text_again(pair: tuple[Path, Path], twin: Path) -> None:
    async with following((pair[0], twin), top_m=6) as both:
        assert await same_after_restart(both, [*range(1, 12)] * 9)


@pytest.mark.fault(21)
def test_a_draft_of_another_target_refuses_to_start_and_names_both(
    services: Services, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    draft = load_draft(pair[1])
    theirs = draft.draft.target_fingerprint
    draft.draft = draft.draft.model_copy(update={"target_fingerprint": "0123456789abcdef"})
    save_draft(tmp_path / "stranger", draft, torch.float32)
    options = ["--draft", str(tmp_path / "stranger"), "--verifier", services.verifier.address, "--port", "0"]
    with pytest.raises(RuntimeError, match="0123456789abcdef") as failure:
        start(["-m", "draft_service", *options], tmp_path)
    assert theirs in str(failure.value)
    assert "Traceback" not in str(failure.value)


@pytest.mark.fault(21)
def test_a_draft_with_another_tokenizer_refuses_to_start_and_names_both(
    services: Services, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    stranger = shutil.copytree(pair[1], tmp_path / "stranger")
    (stranger / "tokenizer.json").write_text("{}")
    options = ["--draft", str(stranger), "--verifier", services.verifier.address, "--port", "0"]
    with pytest.raises(RuntimeError, match="tokenizer: this draft was made for ") as failure:
        start(["-m", "draft_service", *options], tmp_path)
    assert all(hash_of(text) in str(failure.value) for text in (b"{}", (pair[0] / "tokenizer.json").read_bytes()))


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"protocol_version": 99},
            f"protocol version: this draft was made for {PROTOCOL_VERSION}, the verifier has 99",
        ),
        ({"tokenizer_hash": "theirs"}, "tokenizer: this draft was made for .*, the verifier has theirs"),
        ({"target_fingerprint": "theirs"}, "target fingerprint: this draft was made for .*, the verifier has theirs"),
    ],
)
def test_a_draft_meets_only_a_verifier_of_its_own(
    pair: tuple[Path, Path], tmp_path: Path, change: dict, says: str
) -> None:
    draft, directory = load_draft(pair[1]), shutil.copytree(pair[1], tmp_path / "draft")
    shutil.copy(pair[0] / "tokenizer.json", directory)
    right = verifier_pb2.GetInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        target_fingerprint=draft.draft.target_fingerprint,
        tokenizer_hash=hash_of((pair[0] / "tokenizer.json").read_bytes()),
        vocab_size=draft.config.vocab_size,
        hidden_size=draft.config.hidden_size,
    )
    check_handshake(directory, right)
    right.MergeFrom(verifier_pb2.GetInfoResponse(**change))
    with pytest.raises(MismatchError, match=says):
        check_handshake(directory, right)


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def complete(url: str, body: dict) -> dict:
    response = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def accepted_tokens(answer: dict) -> int:
    return answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def sample(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return False
