"""Memory for the cache runs out: what is parked goes first, then the youngest; the oldest always gets through."""

from __future__ import annotations

import pytest

from spire.errors import SpireError
from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes
from spire.v1 import verifier_pb2 as pb
from tests.verifier.conftest import Running
from tests.verifier.harness import plain_greedy, prompt_of

# Of 16 positions: three layers, keys and values, two heads of width 8, in float32.
PAGE_BYTES = 3 * 2 * 2 * 16 * 8 * 4


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spire.model.paging.PAGE", 16)


def gigabytes(pages: int) -> float:
    return pages * PAGE_BYTES / 1e9


@pytest.mark.fault(19)
async def test_the_youngest_is_preempted_and_starts_again_where_it_stood(running: Running, target: Target) -> None:
    async with running(cache_gb=gigabytes(13), max_depth=1) as verifier:
        client = verifier.client()
        prompts = {"old": prompt_of(90), "young": prompt_of(60)}
        for name, prompt in prompts.items():
            assert (await client.start(name, prompt)).status.code == codes.CODE_OK
        preempted = None
        tokens = {name: plain_greedy(target, prompt, 40) for name, prompt in prompts.items()}
        for round_ in range(1, 31):
            names = ["old"] if preempted else ["old", "young"]
            items = [pb.VerifyItem(sequence_id=n, round=round_, base=len(prompts[n]) + round_ - 1) for n in names]
            results = {result.sequence_id: result for result in await client.verify(*items)}
            assert list(results["old"].tokens) == tokens["old"][round_ : round_ + 1]
            if not preempted and results["young"].status.code != codes.CODE_OK:
                assert results["young"].status.code == codes.CODE_NOT_FOUND
                preempted = round_
        assert preempted is not None
        again = [*prompts["young"], *tokens["young"][:preempted]]
        assert (await client.start("again", again)).status.code == codes.CODE_RESOURCE_EXHAUSTED
        await client.release("old")
        assert (await client.start("again", again)).token == tokens["young"][preempted]


async def test_what_is_parked_makes_room_for_who_is_alive(running: Running, target: Target) -> None:
    async with running(cache_gb=gigabytes(14), max_depth=1) as verifier:
        client = verifier.client()
        for index in range(6):
            prompt = prompt_of(100, seed=index)
            assert [(await client.start(str(index), prompt)).token] == plain_greedy(target, prompt, 1)
            await client.release(str(index))
        assert verifier.engine.steps.cache.held_bytes <= 14 * PAGE_BYTES


@pytest.mark.fault(16)
async def test_prompts_that_do_not_fit_together_are_sent_away_one_by_one(running: Running) -> None:
    async with running(cache_gb=gigabytes(14), max_depth=1) as verifier:
        client = verifier.client()
        assert (await client.start("a", prompt_of(150))).status.code == codes.CODE_OK
        refused = await client.start("b", prompt_of(150, seed=1))
        assert refused.status.code == codes.CODE_RESOURCE_EXHAUSTED
        assert "no memory is left" in refused.status.message
        assert (await client.start("c", prompt_of(20))).status.code == codes.CODE_OK


@pytest.mark.fault(16)
async def test_a_cache_too_small_for_one_sequence_is_refused_at_the_start(running: Running) -> None:
    with pytest.raises(SpireError, match="too little for one sequence of 200 positions"):
        async with running(cache_gb=gigabytes(3)):
            pass
