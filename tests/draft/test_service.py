"""The draft service as a process: it drafts for sequences that the verifier holds, and says no to everything else."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import torch

from draft_service.identity import check_handshake
from spire.errors import MismatchError
from spire.model.checkpoint import load_draft, load_target, save_draft
from spire.model.config import DraftConfig
from spire.model.draft import prune
from spire.rpc.channel import GATEWAY_METADATA_KEY, PROTOCOL_VERSION, connect
from spire.rpc.tensors import from_wire
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc, tensor_pb2, verifier_pb2, verifier_pb2_grpc
from tests.draft.conftest import INLINE
from tests.services import Services, running, start
from tests.verifier.harness import answer_on

NAME = (GATEWAY_METADATA_KEY, "test")
SAMPLED = tensor_pb2.Sampling(temperature=1, top_p=1, seed=5)
GREEDY = tensor_pb2.Sampling(temperature=0, top_p=1)


class Peers:
    """Both model services, talked to as a gateway would."""

    def __init__(self, channels: list[grpc.aio.Channel]):
        self.verifier = verifier_pb2_grpc.VerifierStub(channels[0])
        self.draft = draft_pb2_grpc.DraftStub(channels[1])

    async def start(self, sequence_id: str, tokens: list[int], sampling: tensor_pb2.Sampling = SAMPLED) -> int:
        """The first token of a new sequence."""
        info = await self.draft.GetInfo(pb.DraftGetInfoRequest())
        message = verifier_pb2.Start(sequence_id=sequence_id, tokens=tokens, sampling=sampling, draft_id=info.draft_id)
        return (await self._round(verifier_pb2.RoundsRequest(start=message))).started.token

    async def verify(self, *items: verifier_pb2.VerifyItem) -> list[verifier_pb2.VerifyResult]:
        batch = verifier_pb2.VerifyBatch(batch_id=1, items=items)
        return list((await self._round(verifier_pb2.RoundsRequest(verify=batch))).verified.results)

    async def _round(self, request: verifier_pb2.RoundsRequest) -> verifier_pb2.RoundsResponse:
        call = self.verifier.Rounds(metadata=[NAME])
        try:
            await call.write(request)
            return await answer_on(call)
        finally:
            call.cancel()

    async def propose(self, *items: pb.ProposeItem) -> list[pb.Proposal]:
        call = self.draft.Rounds()
        try:
            await call.write(pb.ProposeBatch(batch_id=1, items=items))
            return list((await call.read()).proposals)
        finally:
            call.cancel()


@asynccontextmanager
async def connected(services: Services) -> AsyncIterator[Peers]:
    assert services.draft is not None
    async with connect(services.verifier.address) as verifier, connect(services.draft.address) as draft:
        yield Peers([verifier, draft])


@pytest.fixture
async def peers(services: Services) -> AsyncIterator[Peers]:
    async with connected(services) as peers:
        yield peers


def item(
    sequence_id: str, base: int, token: int, k: int = 4, sampling: tensor_pb2.Sampling = SAMPLED
) -> pb.ProposeItem:
    return pb.ProposeItem(sequence_id=sequence_id, base=base, newest_token=token, k=k, sampling=sampling)


async def test_each_sequence_of_a_batch_gets_its_own_depth(peers: Peers) -> None:
    tokens = {"a": await peers.start("a", [1, 2, 3]), "b": await peers.start("b", [4])}
    proposals = await peers.propose(item("a", 3, tokens["a"], k=4), item("b", 1, tokens["b"], k=1))
    assert [(p.sequence_id, len(p.tokens)) for p in proposals] == [("a", 4), ("b", 1)]


async def test_q_holds_what_was_drawn_and_sums_to_one(peers: Peers) -> None:
    token = await peers.start("q", [1, 2, 3])
    (proposal,) = await peers.propose(item("q", 3, token))
    ids, probabilities = from_wire(proposal.q.ids), from_wire(proposal.q.probabilities)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(4))
    assert all(drawn in row for drawn, row in zip(proposal.tokens, ids.tolist(), strict=True))


async def test_a_greedy_sequence_carries_no_q(peers: Peers) -> None:
    token = await peers.start("greedy", [1, 2, 3], GREEDY)
    (proposal,) = await peers.propose(item("greedy", 3, token, sampling=GREEDY))
    assert len(proposal.tokens) == 4
    assert not proposal.HasField("q")


async def test_a_proposal_that_is_asked_again_is_the_same(peers: Peers) -> None:
    token = await peers.start("again", [7, 2, 9])
    first, second = [await peers.propose(item("again", 3, token)) for _ in range(2)]
    assert first == second


async def test_a_draft_that_is_behind_proposes_nothing_after_a_bounded_wait(peers: Peers) -> None:
    token = await peers.start("behind", [1, 2, 3])
    began = time.monotonic()
    late, mate = await peers.propose(item("behind", 9, token), item("a-mate", 1, 0))
    assert time.monotonic() - began < 5
    assert {late.sequence_id, mate.sequence_id} == {"behind", "a-mate"}
    assert not late.tokens
    assert not mate.tokens
    assert late.status.code == tensor_pb2.CODE_FAILED_PRECONDITION
    assert mate.status.code == tensor_pb2.CODE_NOT_FOUND


async def test_nobody_waits_for_a_sequence_that_has_ended(peers: Peers) -> None:
    """As of a round that was ordered before the gateway knew that its text was whole."""
    token = await peers.start("over", [1, 2, 3])
    await peers.verifier.Release(verifier_pb2.ReleaseRequest(sequence_ids=["over"]), metadata=[NAME])

    async def heard() -> bool:
        return (await peers.propose(item("over", 3, token)))[0].status.code == tensor_pb2.CODE_NOT_FOUND

    assert await eventually(heard)
    began = time.monotonic()
    (ended,) = await peers.propose(item("over", 9, token))
    assert ended.status.code == tensor_pb2.CODE_NOT_FOUND
    assert time.monotonic() - began < 1, "an unknown one is waited for, for two seconds here"


@pytest.mark.parametrize("rounds", [3, 12])
async def test_who_was_quiet_is_drafted_as_if_the_draft_had_heard_of_every_round(peers: Peers, rounds: int) -> None:
    """The window holds four positions: more than that comes as a replay."""
    names = {f"quiet-{rounds}": True, f"loud-{rounds}": False}
    newest = {name: await peers.start(name, [1, 2, 3], GREEDY) for name in names}
    for number in range(1, rounds + 1):
        blocks = [
            verifier_pb2.VerifyItem(sequence_id=name, round=number, base=2 + number, quiet=quiet and number < rounds)
            for name, quiet in names.items()
        ]
        results = await peers.verify(*blocks)
        newest = {result.sequence_id: result.tokens[-1] for result in results}
    quiet, loud = await peers.propose(*(item(name, 3 + rounds, newest[name]) for name in names))
    assert len(quiet.tokens) == 4
    assert (quiet.tokens, quiet.q) == (loud.tokens, loud.q)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 99}, "k is 99"),
        ({"newest_token": 16}, "vocabulary"),
        ({"sampling": tensor_pb2.Sampling(temperature=float("nan"), top_p=1)}, "temperature"),
        ({"sampling": tensor_pb2.Sampling(temperature=1, top_p=7)}, "top_p"),
    ],
)
async def test_a_bad_item_is_refused_and_its_mate_is_served(peers: Peers, change: dict, says: str) -> None:
    good = f"beside a bad {says}"  # an id that has ended is never used again
    token = await peers.start(good, [1, 2, 3])
    bad = item("bad", 3, 1)
    bad.MergeFrom(pb.ProposeItem(**change))
    proposals = {p.sequence_id: p for p in await peers.propose(bad, item(good, 3, token))}
    assert proposals["bad"].status.code == tensor_pb2.CODE_INVALID_ARGUMENT
    assert says in proposals["bad"].status.message
    assert len(proposals[good].tokens) == 4
    await peers.verifier.Release(verifier_pb2.ReleaseRequest(sequence_ids=[good]), metadata=[NAME])


async def test_memory_of_a_sequence_ends_with_it_at_the_verifier(peers: Peers) -> None:
    token = await peers.start("ends", [1, 2, 3])
    await peers.verifier.Release(verifier_pb2.ReleaseRequest(sequence_ids=["ends"]), metadata=[NAME])

    async def forgotten() -> bool:
        (proposal,) = await peers.propose(item("ends", 3, token))
        return proposal.status.code == tensor_pb2.CODE_NOT_FOUND

    assert await eventually(forgotten)


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


async def test_a_restarted_draft_drafts_the_same_for_sequences_that_were_running(pair: tuple[Path, Path]) -> None:
    with running(*pair, draft_options=INLINE) as services:
        async with connected(services) as peers:
            token = await peers.start("running", [1, 2, 3, 4, 5, 6, 7])
            (before,) = await peers.propose(item("running", 7, token))
        assert services.draft is not None
        services.draft.kill()
        services.restart_draft()
        async with connected(services) as peers:

            async def same_again() -> bool:
                (after,) = await peers.propose(item("running", 7, token))
                return after == before

            assert len(before.tokens) == 4
            assert await eventually(same_again)


def test_requests_are_served_while_the_draft_is_dead_and_faster_when_it_is_back(pair: tuple[Path, Path]) -> None:
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
    with running(pair[0], twin, draft_options=INLINE) as services:
        async with connected(services) as peers:
            token = await peers.start("running", [*range(1, 12)] * 9)
            (before,) = await peers.propose(item("running", 99, token))
        assert services.draft is not None
        services.draft.kill()
        services.restart_draft()
        async with connected(services) as peers:

            async def same_again() -> bool:
                (after,) = await peers.propose(item("running", 99, token))
                return after == before

            assert len(before.tokens) == 4
            assert await eventually(same_again)


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
    check_handshake(draft, directory, right)
    right.MergeFrom(verifier_pb2.GetInfoResponse(**change))
    with pytest.raises(MismatchError, match=says):
        check_handshake(draft, directory, right)


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


async def eventually(true: Callable, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await true():
            return True
        await asyncio.sleep(0.05)
    return False


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return False
