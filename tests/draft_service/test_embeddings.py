"""A draft without embeddings of its own, and without its target's directory, asks the verifier for them once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import torch

from draft_service.embeddings import ask_embeddings
from spire.checkpoints.weights import load_draft, load_embeddings, load_target, sampled_hash, save_draft, save_target
from spire.files import user_cache
from spire.model.target import Target
from spire.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from tests.services import Service, running, start
from tests.untrained import untrained_draft
from verifier_service.serve.embeddings import embedding_messages

EVERY_FIFTH = torch.arange(0, 320, 5)


@pytest.fixture(scope="module", params=["tied", "untied"])
def target(request: pytest.FixtureRequest, stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tied":
        return stories_dir
    out = tmp_path_factory.mktemp("untied")
    tied = load_target(stories_dir)[0]
    untied = Target(tied.config.model_copy(update={"tie_word_embeddings": False}))
    untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.lm_head.weight.flip(0)})
    save_target(out, untied, torch.bfloat16)
    (out / "tokenizer.json").write_bytes((stories_dir / "tokenizer.json").read_bytes())
    return out


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_draft(target, tmp_path_factory.mktemp("draft"), layers=(3, 4), own=EVERY_FIFTH)


def started(draft: Path, verifier: str, directory: Path) -> Service:
    return start(["-m", "draft_service", "--draft", str(draft), "--verifier", verifier, "--port", "0"], directory)


def kept_by(service: Service) -> list[dict]:
    lines = (json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == "kept the target's embeddings"]


def test_they_are_asked_once_kept_and_equal_the_targets(target: Path, draft: Path, tmp_path: Path) -> None:
    with running(target) as services:
        first = started(draft, services.verifier.address, tmp_path)
        assert first.stop() == 0
        second = started(draft, services.verifier.address, tmp_path)
        assert second.stop() == 0
    (kept,), asked_again = kept_by(first), kept_by(second)
    assert not asked_again
    own, of_target = load_draft(draft, target=Path(kept["directory"])), load_draft(draft, target=target)
    for name, tensor in of_target.state_dict().items():
        assert torch.equal(own.state_dict()[name], tensor), name


def test_those_of_another_target_are_refused_and_not_kept(stories_dir: Path, tmp_path: Path) -> None:
    """A draft whose target has the verifier's fingerprint and other embeddings: made by hand, and told all the same."""
    made = load_draft(untrained_draft(stories_dir, tmp_path / "made", own=EVERY_FIFTH), target=stories_dir)
    assert made.draft.embeddings
    lied = made.draft.embeddings.model_copy(update={"fingerprint": "0123456789abcdef"})
    made.draft = made.draft.model_copy(update={"embeddings": lied})
    save_draft(tmp_path / "lying", made, torch.float32)
    theirs = sampled_hash(load_embeddings(stories_dir))
    with running(stories_dir) as services, pytest.raises(RuntimeError, match="0123456789abcdef") as failure:
        started(tmp_path / "lying", services.verifier.address, tmp_path)
    assert f"the verifier's target has {theirs}" in str(failure.value)
    assert not (user_cache() / "embeddings" / "0123456789abcdef").exists()


class Sends:
    """A verifier's stub that sends the embeddings of a target; another draft keeps them while they are sent."""

    def __init__(self, target: Path, kept: Path):
        self._target, self._kept = target, kept

    async def GetEmbeddings(self, request: object) -> AsyncIterator[pb.GetEmbeddingsResponse]:
        self._kept.mkdir(parents=True)
        (self._kept / "in use").touch()
        for message in embedding_messages(self._target):
            yield message


def test_what_another_draft_has_kept_meanwhile_stays(stories_dir: Path, tmp_path: Path) -> None:
    kept = tmp_path / sampled_hash(load_embeddings(stories_dir))
    asyncio.run(ask_embeddings(cast(rpc.VerifierStub, Sends(stories_dir, kept)), kept))
    assert [file.name for file in tmp_path.rglob("*")] == [kept.name, "in use"]
