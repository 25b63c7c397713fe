"""Memory for the cache runs out: what is parked goes first, then the youngest; the oldest always gets through."""

from __future__ import annotations

import asyncio

import pytest

from spire.errors import SpireError
from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import GREEDY, plain_greedy, prompt_of
from tests.verifier_service.serve.test_lifetimes import until
from verifier_service.engine.sequence import LEAST_RUN

pytestmark = pytest.mark.usefixtures("each_backend")

# Of 16 positions: three layers, keys and values, two heads of width 8, in float32.
PAGE_BYTES = 3 * 2 * 2 * 16 * 8 * 4


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "GPU_PAGE"):
        monkeypatch.setattr(f"spire.model.cache.paging.{name}", 16)


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
                assert results["young"].status.code == codes.CODE_RESOURCE_EXHAUSTED
                preempted = round_
        assert preempted is not None
        again = [*prompts["young"], *tokens["young"][:preempted]]
        await client.send_start("again", again)
        await until(lambda: bool(verifier.engine.slots.waiting))
        await client.release("old")
        started = (await client.read()).started
        assert (started.sequence_id, started.token) == ("again", tokens["young"][preempted])
        assert client.stages["again"] == [pb.STAGE_WAITING, pb.STAGE_ADMITTED, pb.STAGE_COMPUTED]


async def test_what_is_parked_makes_room_for_who_is_alive(running: Running, target: Target) -> None:
    async with running(cache_gb=gigabytes(14), max_depth=1) as verifier:
        client = verifier.client()
        for index in range(6):
            prompt = prompt_of(100, seed=index)
            assert [(await client.start(str(index), prompt)).token] == plain_greedy(target, prompt, 1)
            await client.release(str(index))
        assert verifier.engine.steps.cache.held_bytes <= 14 * PAGE_BYTES


@pytest.mark.fault(16)
@pytest.mark.fault(29)
async def test_prompts_that_do_not_fit_together_wait_and_never_overtake(
    running: Running,
) -> None:
    async with running(cache_gb=gigabytes(14), max_depth=1) as verifier:
        client = verifier.client()
        assert (await client.start("a", prompt_of(150))).status.code == codes.CODE_OK
        await client.send_start("b", prompt_of(150, seed=1))
        await client.send_start("c", prompt_of(20))  # there is memory for it
        await until(lambda: len([*verifier.engine.slots.waiting]) == 2)
        await client.release("a")
        assert [(await client.read()).started.sequence_id for _ in "bc"] == ["b", "c"]


async def test_a_start_that_waits_for_room_can_be_withdrawn(running: Running) -> None:
    async with running(max_sequences=1) as verifier:
        client = verifier.client()
        assert (await client.start("a", prompt_of(20))).status.code == codes.CODE_OK
        await client.send_start("b", prompt_of(20))
        await until(lambda: bool(verifier.engine.slots.waiting))
        assert await client.release("b") == 1
        withdrawn = (await client.read()).started
        assert (withdrawn.sequence_id, withdrawn.status.code) == ("b", codes.CODE_NOT_FOUND)
        assert not verifier.engine.slots.waiting


@pytest.mark.fault(19)
async def test_a_sequence_just_back_is_preempted_only_if_no_other_can_be(running: Running, target: Target) -> None:
    """Else it would do nothing but start again. The oldest goes on whatever happens."""
    async with running(max_depth=1, max_sequences=4) as verifier:
        client, prompt = verifier.client(), prompt_of(40)
        generated, slots = plain_greedy(target, prompt, 20), verifier.engine.slots
        for name in ("old", "middle"):
            assert (await client.start(name, prompt_of(20, seed=1))).status.code == codes.CODE_OK
        back = pb.Start(
            sequence_id="back", tokens=[*prompt, *generated[:2]], prompt_tokens=40, sampling=GREEDY, came_back=True
        )
        await client.send(pb.RoundsRequest(start=back))
        assert (await client.read()).started.token == generated[2]
        first = await asyncio.wrap_future(verifier.engine.call(slots.preempt_youngest))
        assert first.id == "middle"
        for round_ in range(1, LEAST_RUN):
            item = pb.VerifyItem(sequence_id="back", round=round_)
            assert [list(one.tokens) for one in await client.verify(item)] == [[generated[round_ + 2]]]
        assert (await asyncio.wrap_future(verifier.engine.call(slots.preempt_youngest))).id == "back"


@pytest.mark.fault(16)
async def test_a_cache_too_small_for_one_sequence_is_refused_at_the_start(running: Running) -> None:
    with pytest.raises(SpireError, match="too little for one sequence of 200 positions"):
        async with running(cache_gb=gigabytes(3)):
            pass
