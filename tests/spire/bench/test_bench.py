"""The measurements measure: figures agree with what the services answered, on a real small pair."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spire.bench.acceptance import acceptance, ratio_with_interval
from spire.bench.client import BenchError, Client, Request
from spire.bench.peers.divergence import divergence
from spire.bench.prompts import PromptSource
from spire.cli import app
from spire.errors import DataError
from tests.services import Services


def test_prompts_begin_with_the_start_token_and_are_as_long_as_asked(source: PromptSource) -> None:
    prompts = source.cut(count=7, length=40, seed=1)
    assert [len(prompt) for prompt in prompts] == [40] * 7
    assert {prompt[0] for prompt in prompts} == {source.start}
    assert source.cut(count=7, length=40, seed=1) == prompts


def test_text_that_is_too_short_is_refused_with_its_length(source: PromptSource) -> None:
    with pytest.raises(DataError, match="no text is 1000000 tokens long"):
        source.cut(count=1, length=1_000_000, seed=0)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        rounds = rng.integers(5, 20, size=50)
        tokens = [float(rng.binomial(4, 0.5, size=n).sum() + n) for n in rounds]
        tau, half_width = ratio_with_interval(tokens, rounds.tolist())
        covered += abs(tau - 3.0) < half_width
    # 95 % of 400 with a standard error of 4.4.
    assert 360 <= covered <= 397


def test_tau_is_what_the_answers_say(services: Services, source: PromptSource) -> None:
    async def run() -> list:
        async with Client(services.url, concurrency=4) as client:
            return await client.complete_all(request, source.cut(8, 50, seed=2))

    request = Request(max_tokens=33, k=3)
    completions = asyncio.run(run())
    cell = acceptance(completions, 50, request)
    rounds = sum(c.metrics["speculative_decoding"]["num_spec_steps"] for c in completions)
    assert cell.rounds + cell.short_rounds == rounds
    assert cell.short_rounds < rounds / 4
    assert cell.tau == pytest.approx(1 + sum(cell.prefix_acceptance))
    assert 1 < cell.tau < 4
    assert 0 < cell.tau_ci95 < 1
    assert cell.generated == 8 * 33


def test_acceptance_is_printed_as_json_for_machines(services: Services, stories_dir: Path, prose: list[Path]) -> None:
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--generate", "8", "--json"]
    evaluated = CliRunner().invoke(app, ["eval", "acceptance", "--contexts", "4", "--context", "20,30", *common])
    assert evaluated.exit_code == 0, evaluated.output
    assert [cell["context"] for cell in json.loads(evaluated.stdout)["acceptance"]] == [20, 30]


def test_rules_are_measured_on_the_same_prompts(services: Services, stories_dir: Path, prose: list[Path]) -> None:
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--generate", "8", "--json"]
    options = ["--contexts", "4", "--context", "20", "--rule", "rejection,block,invariant"]
    evaluated = CliRunner().invoke(app, ["eval", "acceptance", *options, *common])
    assert evaluated.exit_code == 0, evaluated.output
    cells = json.loads(evaluated.stdout)["acceptance"]
    assert [cell["rule"] for cell in cells] == ["rejection", "block", "invariant"]
    assert all(cell["tokens_per_second"] > 0 for cell in cells)


def test_in_float32_texts_of_a_seed_never_part(services: Services, stories_dir: Path, prose: list[Path]) -> None:
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--generate", "24", "--json"]
    evaluated = CliRunner().invoke(app, ["eval", "divergence", "--contexts", "6", "--context", "20", *common])
    assert evaluated.exit_code == 0, evaluated.output
    for cell in json.loads(evaluated.stdout)["divergence"]:
        assert (cell["texts"], cell["tokens"], cell["partings"]) == (6, 6 * 24, 0)


def test_partings_are_counted_at_the_first_token_that_differs() -> None:
    cell = divergence("two texts", [[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 9, 9], [1, 2, 3, 4]])
    assert (cell.partings, cell.tokens) == (1, 3 + 4)


def test_a_gateway_that_is_not_there_is_named(stories_dir: Path, prose: list[Path]) -> None:
    options = ["--url", "http://127.0.0.1:9", "--model", str(stories_dir), "--data", str(prose[0]), "--context", "20"]
    result = CliRunner().invoke(app, ["eval", "acceptance", "--contexts", "2", *options])
    assert isinstance(result.exception, BenchError)
    assert "spire up" in str(result.exception)


@pytest.mark.thorough
def test_tau_of_any_pair_is_measured_by_starting_a_service_if_none_runs(
    stories_dir: Path, stories_draft_dir: Path
) -> None:
    pair = ["--model", str(stories_dir), "--draft", str(stories_draft_dir), "--dtype", "float32"]
    options = ["--contexts", "4", "--context", "20", "--generate", "8", "--json"]
    result = CliRunner().invoke(app, ["eval", "acceptance", *pair, *options])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["acceptance"]
    assert (cell["contexts"], cell["generated"]) == (4, 4 * 9)


def test_another_server_s_answer_is_told_from_a_gateway_s() -> None:
    answer = b'{"choices": [{"text": " Paris."}], "usage": {"completion_tokens": 2}}'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + answer)
        await writer.drain()

    async def completed() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Client(url, 1) as client:
                await client.complete_all(Request(8), [[1, 2]])

    with pytest.raises(BenchError, match="no Spire gateway"):
        asyncio.run(completed())
