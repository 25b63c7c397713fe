"""What waits for a target waits as long as it computes: steps of seconds, prompts that are read for half a minute."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from spire.bench.capacity import Arriving, Trial, find
from spire.bench.client import Request
from spire.bench.exchange import Exchange, connect, request_to
from spire.bench.load import Batch
from spire.bench.prompts import PromptSource
from spire.bench.system import System
from spire.bench.throughput import measure
from spire.cli import app
from spire.cli.service import Service
from tests.paths import ROOT
from tests.services import Services, running, start, wait_until_connected
from tests.spire.model.test_large_vocabulary import VOCABULARY, with_vocabulary

SLOW = ["-m", "tests.slow_verifier"]


@pytest.fixture(scope="module")
def slow(stories_dir: Path) -> Iterator[Services]:
    """A gateway that waits less for a head than its target takes for a prompt."""
    with running(stories_dir, verifier=[*SLOW, "0.05", "2.5"], gateway_options=["--head-deadline", "2.2"]) as services:
        yield services


@pytest.mark.thorough
def test_a_cell_may_take_longer_than_the_gateway_waits_for_a_head(slow: Services, source: PromptSource) -> None:
    load = Batch(source, batch=2, context=30, generate=12, temperature=1.0)
    figures = asyncio.run(measure(System(slow.url), load.requests(k=0, seed=1)))
    assert figures.time_to_first_token_ms_p50 > 2200
    assert figures.round_ms, "what was asked while all decoded was answered"


@pytest.mark.thorough
def test_capacity_is_sought_around_what_a_request_takes_alone(slow: Services, source: PromptSource) -> None:
    class Tried(Exception):
        pass

    def stop(trial: Trial) -> None:
        raise Tried(trial.rate)

    with pytest.raises(Tried) as tried:
        find(slow.url, Arriving(source, 16, Request(2, 1.0, 0), 1.0), 60_000, seed=1, tell=stop)
    (rate,) = tried.value.args
    assert rate < 1 / 2.5


@pytest.mark.thorough
def test_no_rate_is_tried_where_a_request_alone_waits_too_long(slow: Services, source: PromptSource) -> None:
    arriving = Arriving(source, 16, Request(2, 1.0, 0), 1.0)
    found = find(slow.url, arriving, 500, seed=1, tell=lambda trial: pytest.fail(f"tried {trial}"))
    assert found.alone_ms > 2500
    assert (found.trials, found.best, found.overload) == ([], None, None)


# -- an answer that comes slowly, and one that does not come -----------------------------------------------------------

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def seconds_until_finished(answer: Answer, silence: float) -> float:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        exchange = await connect(url, Exchange)
        exchange.send(request_to(url, {}))
        try:
            await exchange.finish(silence)
        finally:
            exchange.close()
        return exchange.pieces[-1][0] - exchange.sent


async def test_an_answer_that_shows_life_is_waited_for() -> None:
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(16):
            writer.write(b": still here\n\n")
            await asyncio.sleep(0.25)
        writer.close()

    assert await seconds_until_finished(drip, silence=3.0) > 3.0


async def test_an_answer_that_falls_silent_is_given_up() -> None:
    over = asyncio.Event()

    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b": still here\n\n")
        await over.wait()
        writer.close()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await seconds_until_finished(begin, silence=0.5)
    over.set()
    assert time.monotonic() - began >= 0.5


# -- services that wait for a slow target -----------------------------------------------------------------------------


def ask_two(services: Services) -> list[httpx.Response]:
    """The answers to two requests at once, one of them streamed."""
    body = {"prompt": "The old man looked at the sea and", "max_tokens": 3, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(httpx.post, f"{services.url}/v1/completions", json=body | {"stream": stream}, timeout=None)
            for stream in (False, True)
        ]
        return [each.result() for each in asked]


def nothing_was_lost(services: Services) -> bool:
    log = services.gateway.log.read_text()
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    lost = {"round lost", "release failed", "not serving", "unreachable", "no prompt is read"}
    return events.count("connected") == 1 and not lost & set(events)


@pytest.mark.fault(33)
def test_limits_of_any_length_follow_a_slower_target(stories_dir: Path) -> None:
    floors = ["--verify-deadline", "0.3", "--start-deadline", "0.3"]
    with running(
        stories_dir, verifier=[*SLOW, "0.4", "1.5"], verifier_options=["--stuck-seconds", "0.3"], gateway_options=floors
    ) as services:
        answers = ask_two(services)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "error" not in answers[1].text
        assert nothing_was_lost(services)


@pytest.mark.fault(33)
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("step", "prefill"), [("5", "0"), ("0.1", "40")])
def test_5_s_steps_and_40_s_chunks_finish_with_default_options(
    stories_dir: Path, tmp_path: Path, step: str, prefill: str
) -> None:
    """The verifier is a child of a supervisor that looks after it as `spire up` does."""
    said: list[str] = []
    slow = Service("tests.slow_verifier", [step, prefill, "--model", str(stories_dir)], tmp_path)
    slow.start()
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(0.1):
            slow.keep_alive(said.append)

    try:
        while not slow.serves():
            slow.must_be_alive()
            time.sleep(0.1)
        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        gateway = start(["-m", "gateway", "--verifier", slow.reached_at, "--port", "0"], tmp_path)
        services = Services(f"http://{gateway.address}", gateway, gateway)
        wait_until_connected(gateway, {"verifier"})
        answers = ask_two(services)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "error" not in answers[1].text
        assert nothing_was_lost(services)
        assert (slow.restarts, said) == (0, [])
        gateway.stop()
    finally:
        over.set()
        slow.ask_to_stop()
        slow.stop()


# -- at full length ---------------------------------------------------------------------------------------------------

# A prompt is four chunks: steps of 0.1 s and 30 s of prefill, or steps of 5 s; and a bound for the first token that one
# request keeps and two at once do not.
AT_FULL_LENGTH = pytest.mark.parametrize(("step", "prefill", "bound"), [("0.1", "7.5", "45"), ("5", "0.1", "30")])
CHUNKS = ["--token-budget", "16"]


@pytest.fixture(scope="module")
def large_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with the vocabulary of a real one."""
    return with_vocabulary(stories_dir, VOCABULARY, tmp_path_factory.mktemp("large") / "target")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@AT_FULL_LENGTH
def test_every_measurement_finishes_on_a_slow_target(
    large_dir: Path, prose: list[Path], step: str, prefill: str, bound: str
) -> None:
    def measured(*arguments: str) -> dict[str, Any]:
        common = ["--model", str(large_dir), "--data", str(prose[0]), "--context", "60", "--generate", "8", "--json"]
        done = CliRunner().invoke(app, [*arguments, "--url", services.url, *common], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    slowly = [*SLOW, step, prefill]
    with running(large_dir, "magicdec", verifier=slowly, verifier_options=CHUNKS, k=None) as services:
        cells = measured("bench", "--batch", "2", "--k", "0,2", "--repeats", "1")["bench"]
        assert [cell["generated"] for cell in cells] == [16, 16]
        (cell,) = measured("eval", "acceptance", "--contexts", "3", "--k", "2")["acceptance"]
        assert cell["generated"] == 3 * 9
        assert measured("capacity", "--first-token", bound, "--seconds", "1")["trials"]
        log = services.gateway.log.read_text()
    assert "round lost" not in log
    assert "release failed" not in log


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("step", "prefill"), [(0.1, 30), (5, 0)])
def test_the_soak_finishes_on_a_slow_target(large_dir: Path, tmp_path: Path, step: float, prefill: float) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "soak.json"
    rows = [f"2026-01-01 00:{at // 2:02}:{30 * (at % 2):02}.0,{20 + at % 9},{3 + at % 4}" for at in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    slow = ["--slow", str(step), str(prefill), "--rate", "0.1"]
    command = [sys.executable, "-m", "tests.faults.soak", "--model", str(large_dir), "--trace", str(trace), *slow]
    done = subprocess.run([*command, "--minutes", "8", "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["requests"] > 5
    assert figures["kills"]
    assert (figures["failed"], figures["mismatches"]) == (0, 0)
