"""What is said of a load is what came over the wire, on a real small pair."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.metrics import ROUND_PARTS
from spire.bench.client import BenchError, Request
from spire.bench.load import Batch
from spire.bench.prompts import PromptSource
from spire.bench.stream import Streamed, Timed, stream_all
from spire.bench.system import System
from spire.bench.throughput import Figures, decoding_together, inter_token_ms, measure
from tests.services import Services


def test_the_decode_rate_counts_only_while_all_decode() -> None:
    alone = [(at / 10, 1) for at in range(20)]  # 10 tokens a second, by itself for the first second
    late = [(0.8, 1), (1.0, 5), (1.2, 5), (1.4, 5), (2.5, 1)]  # in a round from 1.0; the other one ends at 1.9
    answers = [Streamed(0, alone), Streamed(0.5, late)]
    stretches = decoding_together(answers)
    assert stretches is not None
    assert [(stretch[0][0], stretch[-1][0]) for stretch in stretches] == [(1.0, 1.9), (1.0, 1.4)]


def test_every_request_is_counted_over_the_same_rounds() -> None:
    early, late = ([(0.1 * at + after, 1) for at in range(10)] for after in (0.0, 0.003))
    stretches = decoding_together([Streamed(0, early), Streamed(0, late)])
    assert stretches is not None
    assert [len(stretch) for stretch in stretches] == [9, 9]


def test_the_rate_leaves_out_the_round_in_which_counters_are_read() -> None:
    answers = [Streamed(0, [(0.1 * at + after, 1) for at in range(10)]) for after in (0.0, 0.003)]
    for inside, first in ((0.15, 2), (0.201, 3)):  # between two rounds, and while the chunks of one come in
        stretches = decoding_together(answers, since=inside)
        assert stretches is not None
        assert [stretch[0] for stretch in stretches] == [answer.arrivals[first] for answer in answers]
    assert decoding_together(answers, since=0.95) is None


def test_no_rate_is_invented_where_requests_never_decoded_together() -> None:
    assert decoding_together([Streamed(0, [(1.0, 1), (2.0, 4)]), Streamed(0, [(1.5, 1), (2.5, 4)])]) is None


def test_the_tokens_of_a_chunk_share_the_time_since_the_one_before() -> None:
    assert inter_token_ms([Streamed(0, [(0.0, 1), (0.3, 3), (0.4, 1)])]) == pytest.approx([100, 100, 100, 100])


# --- through the services ---------------------------------------------------------------------------------------------


def test_chunks_tell_every_token_of_an_answer(services: Services, source: PromptSource) -> None:
    load = Batch(source, batch=3, context=40, generate=30, temperature=1.0)
    answers = asyncio.run(stream_all(services.url, load.requests(k=3, seed=1)))
    for answer in answers:
        assert answer.exact
        assert answer.tokens == answer.usage["completion_tokens"] == 30
        assert answer.sent < answer.first < answer.last
        rounds = answer.metrics["speculative_decoding"]["num_spec_steps"]
        assert len(answer.arrivals) <= rounds + 1


def test_depths_are_compared_on_the_same_prompts_that_none_left_in_a_cache(
    services: Services, source: PromptSource
) -> None:
    load = Batch(source, batch=2, context=100, generate=4, temperature=1.0)
    plain, drafted, automatic = (load.requests(k, seed=7) for k in (0, 3, None))
    for one, *others in zip(plain, drafted, automatic, strict=True):
        assert all(
            (other.body["prompt"], other.body["seed"]) == (one.body["prompt"], one.body["seed"]) for other in others
        )
    for requests in (plain, drafted, automatic):
        first, second = (asyncio.run(stream_all(services.url, requests)) for _ in range(2))
        assert all(answer.usage["prompt_tokens_details"]["cached_tokens"] == 0 for answer in first)
        assert all(answer.usage["prompt_tokens_details"]["cached_tokens"] > 0 for answer in second)


def test_without_token_ids_the_total_is_spread_over_the_chunks(services: Services, source: PromptSource) -> None:
    def standard(request: Request, prompt: list[int], seed: int) -> dict[str, Any]:
        return request.standard(prompt, seed, "stories260K")

    load = Batch(source, batch=1, context=40, generate=30, temperature=0.0)
    (answer,) = asyncio.run(stream_all(services.url, load.requests(k=3, seed=1, body=standard)))
    assert answer.tokens == answer.usage["completion_tokens"]
    assert not answer.exact


def test_a_refusal_is_told_with_its_message(services: Services, source: PromptSource) -> None:
    body = Request(max_tokens=8, temperature=9.0).streamed([1, 2], seed=0)
    with pytest.raises(BenchError, match=r"answered 400.*temperature"):
        asyncio.run(stream_all(services.url, [Timed(body)]))


@pytest.fixture(scope="module")
def measured(services: Services, source: PromptSource) -> dict[int, Figures]:
    """Three requests at once, by context."""

    def run(context: int) -> Figures:
        load = Batch(source, batch=3, context=context, generate=40, temperature=1.0)
        return asyncio.run(measure(System(services.url), load.requests(k=3, seed=context)))

    return {context: run(context) for context in (30, 300)}


def test_the_parts_of_a_round_add_up_to_what_clients_see(measured: dict[int, Figures]) -> None:
    figures = measured[30]
    assert figures.round_ms is not None
    assert set(figures.round_ms) >= set(ROUND_PARTS)
    assert all(ms >= 0 for ms in figures.round_ms.values())
    assert figures.split_covers == pytest.approx(1, abs=0.2)
    assert figures.fallbacks is not None
    assert "draft_timeout" in figures.fallbacks
    assert figures.overhead is not None
    assert 0 < figures.overhead < 1


def test_rate_round_and_tau_tell_the_same_story(measured: dict[int, Figures]) -> None:
    figures = measured[30]
    assert figures.tau is not None
    assert figures.round_ms_seen is not None
    assert figures.decode_tokens_per_second == pytest.approx(3000 * figures.tau / figures.round_ms_seen, rel=0.1)


def test_a_service_that_tells_no_metrics_is_named() -> None:
    async def scraped() -> None:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            await System(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").scrape()

    with pytest.raises(BenchError, match=r"/metrics ended the connection without an answer"):
        asyncio.run(scraped())


def test_draft_bytes_do_not_grow_with_context(measured: dict[int, Figures]) -> None:
    assert measured[30].draft_state_bytes_per_sequence == measured[300].draft_state_bytes_per_sequence
    assert measured[30].draft_state_bytes_per_sequence
