"""Prompts that begin alike: what was computed for one is copied for the next, and nobody can tell from the answers."""

from __future__ import annotations

import asyncio
import random
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from spire.model.cache.contiguous import ContiguousCache
from spire.model.target import Target
from spire.v1 import verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import GREEDY, TINY, Client, Follower, plain_greedy, prompt_of, whole_taps
from tests.verifier_service.serve.test_lifetimes import until
from verifier_service.engine.prefixes import SHORTEST, Prefixes
from verifier_service.feed.feed import LEAST_COMPUTED

pytestmark = pytest.mark.usefixtures("each_backend")


def assert_window(follower: Follower, target: Target, name: str, tokens: list[int], window: int = 8) -> None:
    """Sink and window hold what a forward over the whole sequence gives."""
    expected = whole_taps(target, tokens, follower.layers)
    for position in (0, *range(len(tokens) - window, len(tokens))):
        assert follower.rows[name][position] == pytest.approx(expected[position], abs=1e-4)


async def test_a_prompt_seen_before_is_copied_and_continues_as_before(running: Running, target: Target) -> None:
    prompt = prompt_of(180)
    async with running() as verifier:
        client = verifier.client()
        first = await client.start("a", prompt)
        second = await client.start("b", prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, 179)
        assert [second.token] == [first.token] == plain_greedy(target, prompt, 1)
        (result,) = await client.verify(pb.VerifyItem(sequence_id="b", round=1, base=180))
        assert list(result.tokens) == plain_greedy(target, prompt, 2)[1:]


async def test_what_a_finished_sequence_held_serves_a_longer_prompt(running: Running, target: Target) -> None:
    """As a chat goes on: the next prompt repeats prompt and answer of the last."""
    prompt = prompt_of(100)
    async with running() as verifier:
        client = verifier.client()
        await client.start("a", prompt)
        for round_ in range(1, 6):
            await client.verify(pb.VerifyItem(sequence_id="a", round=round_, base=99 + round_))
        await client.release("a")
        longer = [*prompt, *plain_greedy(target, prompt, 6), *prompt_of(40, seed=1)]
        started = await client.start("b", longer)
        assert started.cached_tokens == 105
        assert [started.token] == plain_greedy(target, longer, 1)


async def test_a_draft_gets_sink_and_window_of_a_copied_prompt(running: Running, target: Target) -> None:
    prompt = prompt_of(150)
    async with running() as verifier:
        follower, client = await verifier.follower(), verifier.client()
        await client.start("a", prompt, draft_id="draft")
        started = await client.start("b", prompt, draft_id="draft")
        assert started.cached_tokens == 150 - 1 - 8
        while "b" not in follower.rows or 149 not in follower.rows["b"]:
            await follower.read()
        assert_window(follower, target, "b", prompt)


async def test_of_a_copied_prompt_only_the_last_positions_are_computed(running: Running, target: Target) -> None:
    prompt = prompt_of(150)
    async with running() as verifier:
        follower, client = await verifier.follower(window=100), verifier.client()
        await client.start("a", prompt, draft_id="draft")
        started = await client.start("b", prompt, draft_id="draft")
        assert started.cached_tokens == 150 - 1 - LEAST_COMPUTED
        while "b" not in follower.rows or 149 not in follower.rows["b"]:
            await follower.read()
        assert follower.rows["b"].keys() == {0, *range(started.cached_tokens, 150)}
        assert_window(follower, target, "b", prompt, window=1 + LEAST_COMPUTED)
        # Later rounds reach further behind the copy, and a draft that returns gets all of it.
        for round_ in range(1, 6):
            await client.verify(pb.VerifyItem(sequence_id="b", round=round_, base=149 + round_))
        again = await verifier.follower(window=100)
        while "b" not in again.rows or 154 not in again.rows["b"]:
            await again.read()
        assert again.rows["b"].keys() == {0, *range(started.cached_tokens, 155)}
        assert_window(again, target, "b", [*prompt, *plain_greedy(target, prompt, 6)][:155], window=5 + LEAST_COMPUTED)


@pytest.mark.parametrize("first", ["draft", ""])
async def test_the_sinks_of_prompts_that_are_copied_share_steps(running: Running, target: Target, first: str) -> None:
    """Where no prompt was computed for this draft before, its sink is computed once more."""
    prompt, names = prompt_of(150), [f"copy {number}" for number in range(6)]
    async with running() as verifier:
        follower, client = await verifier.follower(), verifier.client()
        await client.start("a", prompt, draft_id=first)
        steps = verifier.engine.metrics.steps.labels("prefill")._value
        before, holds, go_on = steps.get(), threading.Event(), threading.Event()
        verifier.engine.call(lambda: (holds.set(), go_on.wait(30)))
        await asyncio.to_thread(holds.wait)
        for name in names:
            await client.send_start(name, prompt, draft_id="draft")
        await until(lambda: len(verifier.engine._inbox) == len(names))
        go_on.set()
        started = [(await client.read()).started for _ in names]
        assert {one.cached_tokens for one in started} == {150 - 1 - 8}
        # One or two for the windows, and one for the sinks if they are not known.
        assert steps.get() - before <= (2 if first else 3)
        while any(149 not in follower.rows.get(name, {}) for name in names):
            await follower.read()
        for name in names:
            assert_window(follower, target, name, prompt)


async def test_without_the_prefix_cache_everything_is_computed(running: Running) -> None:
    async with running(prefix_cache=False) as verifier:
        client = verifier.client()
        await client.start("a", prompt_of(180))
        assert (await client.start("b", prompt_of(180))).cached_tokens == 0


async def started_with_salt(client: Client, sequence_id: str, tokens: list[int], salt: str) -> pb.Started:
    start = pb.Start(sequence_id=sequence_id, tokens=tokens, sampling=GREEDY, cache_salt=salt)
    await client.send(pb.RoundsRequest(start=start))
    return (await client.read()).started


async def test_a_prompt_is_shared_with_those_of_the_same_salt_alone(running: Running, target: Target) -> None:
    prompt = prompt_of(180)
    async with running() as verifier:
        client = verifier.client()
        salts = {"a": "hers", "b": "his", "c": "", "d": "hers", "e": "his"}
        started = {name: await started_with_salt(client, name, prompt, salt) for name, salt in salts.items()}
        assert {name: one.cached_tokens for name, one in started.items()} == {
            "a": 0,
            "b": 0,
            "c": 0,
            "d": 179,
            "e": 179,
        }
        await client.release("a", "b", "d", "e")
        assert (await started_with_salt(client, "f", prompt, "theirs")).cached_tokens == 0
        assert (await started_with_salt(client, "g", prompt, "his")).cached_tokens == 179
        assert {one.token for one in started.values()} == set(plain_greedy(target, prompt, 1))


async def test_another_beginning_is_not_mixed_up(running: Running, target: Target) -> None:
    common = prompt_of(90)
    async with running() as verifier:
        client = verifier.client()
        for index in range(5):
            prompt = [*common, *prompt_of(20 + index, seed=index)]
            started = await client.start(str(index), prompt)
            assert started.cached_tokens == (91 if index else 0)
            assert [started.token] == plain_greedy(target, prompt, 1)


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_longest_beginning_is_found_among_all_that_is_held(random_: random.Random) -> None:
    """Against a comparison by hand, through any history of sequences that begin, grow, end and are shed."""
    cache = ContiguousCache(TINY, slots=4, capacity=300, parking=3)
    prefixes, live, salts = Prefixes(cache), {}, {}
    held: dict[int, list[int]] = {}
    for _ in range(30):
        tokens = [random_.choice([1, 2])] * random_.choice([60, 80, 120]) + [3] * random_.randint(0, 60)
        salt = random_.choice(["", "another"])
        match random_.choice(["begin", "end", "shed"]):
            case "begin" if cache.free_slots:
                slot = cache.allocate()
                assert cache.reserve([slot], len(tokens))
                prefixes.begin(slot, tokens, salt)
                salts[slot] = hash(salt)
                cache.commit([slot], [count := random_.randint(0, len(tokens))])
                live[slot] = tokens[:count]
            case "end" if live:
                slot = random_.choice(list(live))
                prefixes.end(slot, live.pop(slot))
                cache.free(slot)
            case "shed":
                prefixes.shed()
        held = live | {slot: prefixes._tokens_XL[slot, : cache.lengths[slot]].tolist() for slot in prefixes._parked}
        salts |= {slot: int(prefixes._salts_X[slot]) for slot in prefixes._parked}
        slot, length = prefixes.longest(tokens, salt)
        best = max((_common(tokens, other) for at, other in held.items() if salts[at] == hash(salt)), default=0)
        assert length == (best if best >= SHORTEST else 0)
        assert length == 0 or held[slot][:length] == tokens[:length]


def test_what_is_parked_gives_way_the_longest_unused_first() -> None:
    cache = ContiguousCache(TINY, slots=3, capacity=300, parking=2)
    prefixes = Prefixes(cache)
    for kind in (1, 2, 3):
        slot = cache.allocate()
        assert cache.reserve([slot], 80)
        prefixes.begin(slot, [kind] * 80)
        cache.commit([slot], [80])
        prefixes.end(slot, [kind] * 80)
        cache.free(slot)
        assert prefixes.longest([1] * 80)[1] == 80
    assert [prefixes.longest([kind] * 80)[1] for kind in (1, 2, 3)] == [80, 0, 80]
    assert prefixes.shed()
    assert prefixes.longest([1] * 80)[1] == 0
    assert prefixes.shed()
    assert not prefixes.shed()


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_each_turn_of_a_chat_replaces_what_was_parked_of_it() -> None:
    cache = ContiguousCache(TINY, slots=2, capacity=400, parking=2)
    prefixes = Prefixes(cache)
    chat = prompt_of(300)
    for turn in (100, 200, 300):
        slot = cache.allocate()
        assert cache.reserve([slot], turn)
        prefixes.begin(slot, chat[:turn])
        cache.lengths[slot] = turn
        prefixes.end(slot, chat[:turn])
        cache.free(slot)
        assert cache.parked_bytes == cache.page_bytes * -(-turn // cache.page), "one copy, of the last turn"


@pytest.mark.fault(32)
def test_a_parking_place_is_charged_for_its_last_occupant() -> None:
    cache = ContiguousCache(TINY, slots=2, capacity=400, parking=1)
    prefixes = Prefixes(cache)
    for seed, length in enumerate((300, SHORTEST)):
        slot = cache.allocate()
        assert cache.reserve([slot], length)
        prefixes.begin(slot, prompt_of(length, seed=seed))
        cache.lengths[slot] = length
        prefixes.end(slot, prompt_of(length, seed=seed))
        cache.free(slot)
    assert cache.parked_bytes == cache.page_bytes * -(-SHORTEST // cache.page)
