"""`spire bench`: what it says of a load is what came over the wire, on a real small pair."""

from __future__ import annotations

import asyncio
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.metrics import ROUND_PARTS
from spire.bench.cell import AUTO, Cell, Depth, chosen_depths
from spire.bench.client import BenchError, Request
from spire.bench.load import Batch, read_trace
from spire.bench.prediction import PairModel, recorded_acceptance
from spire.bench.prompts import PromptSource
from spire.bench.stream import Streamed, Timed, stream_all
from spire.bench.system import System
from spire.bench.throughput import Figures, decoding_together, figures_of_steps, inter_token_ms, measure
from spire.cli import app
from spire.cli.bench import report as bench_report
from spire.errors import DataError, SpireError
from spire.perf import calibration
from tests.marks import thoroughly
from tests.paths import ROOT
from tests.services import Services


def bench(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False, env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout


# --- arithmetic -------------------------------------------------------------------------------------------------------


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


# --- the command ------------------------------------------------------------------------------------------------------


def test_an_interval_of_the_gain_needs_five_turns_and_holds_their_spread() -> None:
    ours, plain = (
        [figures_cell(0, rate).runs[0] for rate in rates] for rates in ((180, 190, 200, 210, 220), [100] * 5)
    )
    cell = Cell("spire", "spire", 4, 1, 512, ours, plain)
    low, high = cell.multiplier_ci95 or (0.0, 0.0)
    assert 1.79 < low < 1.95 < cell.multiplier_measured < 2.05 < high < 2.21
    assert cell.to_json()["multiplier_ci95"] == (low, high)
    assert Cell("spire", "spire", 4, 1, 512, ours[:4], plain[:4]).multiplier_ci95 is None


def test_a_chosen_depth_is_compared_with_the_best_fixed_one_of_its_load(capsys: pytest.CaptureFixture[str]) -> None:
    def cell(k: Depth, rates: tuple[int, ...], context: int = 512) -> Cell:
        return Cell("spire", "spire", k, 1, context, [figures_cell(0, rate).runs[0] for rate in rates])

    fixed = [cell(k, rates) for k, rates in ((0, (100,) * 5), (2, (150, 140, 160, 155, 145)), (4, (130,) * 5))]
    auto = cell(AUTO, (165, 154, 176, 170, 160))
    (choice,) = chosen_depths([*fixed, cell(8, (900,) * 5, context=128), auto])
    assert (choice.draft, choice.batch, choice.context, choice.best_k) == ("spire", 1, 512, 2)
    assert choice.ratio == pytest.approx(1.1)
    low, high = choice.ci95 or (0.0, 0.0)
    assert 1.09 < low <= 1.1 <= high < 1.11
    assert chosen_depths([fixed[0], auto]) == []
    bench_report.show([*fixed, auto], "a target")
    assert "best fixed k = 2: 1.10 × (1.10–1.10)" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.thorough
def test_every_draft_is_compared_with_plain_decoding_in_its_own_services(
    stories_dir: Path, stories_draft_dir: Path, prose: list[Path]
) -> None:
    drafts = f"off,mine={stories_draft_dir},magicdec"
    shape = ["--dtype", "float32", "--batch", "2", "--context", "20", "--generate", "128", "--repeats", "2"]
    pair = ["--model", str(stories_dir), "--drafts", drafts, "--data", str(prose[0]), "--k", "2,auto"]
    cells = json.loads(bench(*pair, *shape, "--json", OMP_NUM_THREADS="1"))["bench"]
    depths = (0, 2, "auto")
    assert [(c["draft"], c["batch"], c["k"]) for c in cells] == [
        (draft, 2, k) for draft in ("mine", "magicdec") for k in depths
    ]
    for cell in cells:
        assert cell["system"] == "spire"
        assert cell["synthetic"] is False
        assert cell["generated"] == 128 * cell["batch"]
        assert len(cell["decode_tokens_per_second_runs"]) == 2
        assert cell["multiplier_measured"] > 0
        assert cell["multiplier_modelled"] is None  # nobody has calibrated this machine
        assert (cell["multiplier_measured"] == 1) == (cell["k"] == 0)
        assert cell["mean_k"] == 0 if cell["k"] == 0 else cell["mean_k"] >= 0
        assert 0 < cell["busy"]["verifier"] < 1.5
        assert set(cell["busy"]) == ({"verifier", "draft"} if cell["draft"] == "mine" else {"verifier"})
        if sys.platform.startswith("linux"):
            assert 100e6 < cell["peak_memory_bytes"] < 20e9


def test_tables_are_whole_at_80_columns(services: Services, stories_dir: Path, prose: list[Path]) -> None:
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--generate", "16"]
    printed = bench(*common, "--batch", "2", "--context", "20", "--repeats", "1", COLUMNS="80", TERM="dumb")
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert re.search(r"^ *20 +2 +0 .* 1\.00 ", printed, re.MULTILINE)
    assert "modelled" in printed


def test_progress_is_told_from_the_start_and_line_by_line_off_a_terminal(
    services: Services, stories_dir: Path, prose: list[Path]
) -> None:
    shape = ["--generate", "8", "--batch", "2", "--context", "20", "--repeats", "1", "--k", "2", "--json"]
    common = ["bench", "--url", services.url, "--model", str(stories_dir), "--data", str(prose[0])]
    done = CliRunner().invoke(app, [*common, *shape], catch_exceptions=False)
    assert json.loads(done.stdout)["complete"]
    told = [line for line in done.stderr.splitlines() if line.startswith("as served")]
    assert told[0] == f"as served: asking {services.url}"
    assert told[1] == "as served: warming"
    assert told[-1] == "as served: 2 × 20 tokens, 4 of 4"


def test_measured_multipliers_are_drawn_beside_modelled_ones(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [figures_cell(k, rate) for k, rate in ((0, 100.0), (4, 180.0))]
    assert bench_report.plot(tmp_path / "plots", cells).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpireError, match="no depth above 0 was measured"):
        bench_report.plot(tmp_path, cells[:1])


def figures_cell(k: int, rate: float) -> Cell:
    """A cell with all decoding at this rate."""

    def runs(tokens_per_second: float) -> list[Figures]:
        arrivals = [(at / tokens_per_second, 1) for at in range(40)]
        return [figures_of_steps([Streamed(0, arrivals)], peak=None)]

    return Cell("spire", "spire", k, 1, 512, runs(rate), runs(100.0), {"multiplier_modelled": 2.0} if k else {})


@pytest.mark.thorough
def test_what_was_measured_is_told_even_if_the_rest_fails(
    services: Services, stories_dir: Path, prose: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire.bench.peers.servers._message", lambda task: {"model": "nowhere"})
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--json"]
    shape = ["--batch", "1", "--context", "20", "--generate", "8", "--repeats", "1", "--peers", "transformers"]
    result = CliRunner().invoke(app, ["bench", *common, *shape])
    assert isinstance(result.exception, SpireError)
    told = json.loads(result.stdout)
    assert told["complete"] is False
    assert [cell["k"] for cell in told["bench"]] == [0, 4]


def test_a_trace_arrives_as_recorded_and_its_lengths_fit_the_model(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.xz"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,1800,200", "2023-11-16 18:17:00,10,1"]
    with lzma.open(file, "wt") as out:
        out.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arrivals = read_trace(file, max_context=1000, seconds=30, rate=2)
    assert [round(one.at, 3) for one in arrivals] == [0, 2.157]
    assert [(one.context, one.generated) for one in arrivals] == [(187, 22), (900, 100)]
    assert len(read_trace(file, max_context=1000, seconds=80, rate=1)) == 3


@pytest.mark.thorough
def test_a_trace_is_replayed_at_every_depth(
    services: Services, stories_dir: Path, prose: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:4{at}.5,100,12" for at in range(3)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--json"]
    load = ["--trace", str(file), "--rate", "4", "--k", "2", "--repeats", "1"]
    plain, drafted = json.loads(bench(*common, *load))["bench"]
    for cell in (plain, drafted):
        assert cell["trace"] == "trace.csv"
        assert (cell["requests"], cell["generated"]) == (3, 36)
        # The last one arrives after half a second, so nothing can be quicker than that.
        assert cell["end_to_end_tokens_per_second"] < 36 / 0.5
        assert cell["inter_token_ms_p50"] > 0
    assert drafted["multiplier_end_to_end"] > 0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"a,b\n1,2\n", r"t\.csv, line 2: no TIMESTAMP. A trace is a CSV with the columns .*ContextTokens"),
        ("t.csv", b"%s2023-11-16 18:15:46,374\n", r"t\.csv, line 2: no GeneratedTokens"),
        ("t.csv", b"%s2023-11-16 18:15:46,many,44\n", r"t\.csv, line 2: .*'many'"),
        ("t.csv", b"%syesterday,1,44\n", r"t\.csv, line 2: .*'yesterday'"),
        ("t.csv", b"%s2023-11-16 18:15:46,-3,44\n", r"t\.csv, line 2: -3 tokens of context"),
        ("t.csv", b"%s2023-11-16\xe9", r"t\.csv, line 2: byte 11 is 0xe9"),
        ("t.csv", b"%s", r"t\.csv holds no request"),
        ("T.CSV.XZ", lzma.compress(b"2023-11-16" * 9)[:40], r"T\.CSV\.XZ is cut off"),
        ("absent.csv", None, r"absent\.csv cannot be read: No such file"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_and_line(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        heading = b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n"
        (tmp_path / name).write_bytes(content.replace(b"%s", heading))
    with pytest.raises(DataError, match=says):
        read_trace(tmp_path / name, 1000, 10, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafts", "vanilla"], "no vanilla draft is bundled.*vanilla=DIR"),
        (["--drafts", "medusa"], "--drafts medusa is no directory"),
        (["--drafts", "spire"], "the bundled draft is not .*stories260K's"),
        (["--context", "500", "--generate", "128"], "500 prompt tokens and 128 more do not fit the target's 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    stories_dir: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["bench", "--model", str(stories_dir), "--context", "100", *arguments])
    assert isinstance(result.exception, SpireError)
    assert re.search(message, str(result.exception))


# --- beside the performance model -------------------------------------------------------------------------------------

CALIBRATION = ROOT / "experiments" / "results" / "calibration.json"


def test_what_is_modelled_does_not_depend_on_the_run() -> None:
    target, draft = ROOT / "models" / "target", ROOT / "models" / "draft"
    model = PairModel(target, draft, calibration.load(CALIBRATION).hardware)
    prediction = model.predict(batch=16, context=1900, k=4, tau=1.5)
    options = ["--target", "tiny", "--hardware", str(CALIBRATION), "--batch", "16", "--context", "1900", "--json"]
    told = CliRunner().invoke(app, ["perf-model", *options], catch_exceptions=False)
    assert prediction["multiplier_modelled"] == json.loads(told.stdout)["drafts"][0]["multiplier"]
    assert prediction["tau_modelled_from"] == "record"
    assert model.predict(16, 1900, 4, tau=4.9) == prediction


def test_what_is_modelled_is_of_the_temperature_that_is_measured() -> None:
    """SmolLM2's draft has records at temperatures 0 and 1; more of what it drafts is accepted at 0."""
    greedy, sampled = (recorded_acceptance(ROOT / "models" / "smollm2-draft", 300, t) for t in (0.0, 0.8))
    assert greedy is not None
    assert sampled is not None
    assert greedy.tau(4) > sampled.tau(4) + 0.1


def test_an_unmeasured_draft_is_modelled_at_the_runs_tau_and_says_so() -> None:
    model = PairModel(ROOT / "models" / "target", None, calibration.load(CALIBRATION).hardware)
    slow, fast = (model.predict(16, 1900, 4, tau)["multiplier_modelled"] for tau in (2.0, 4.0))
    assert fast == pytest.approx(2 * slow, rel=0.01)
    assert model.predict(16, 1900, 4, 2.0)["tau_modelled_from"] == "this run"
    assert model.predict(16, 1900, None, 2.0)["multiplier_modelled"] is None


def test_automatic_depth_is_modelled_at_the_models_own_best() -> None:
    model = PairModel(ROOT / "models" / "target", ROOT / "models" / "draft", calibration.load(CALIBRATION).hardware)
    best = model.predict(16, 1900, None, None)
    assert best["k_modelled"] >= 1
    assert best["multiplier_modelled"] >= model.predict(16, 1900, 4, None)["multiplier_modelled"] > 1


# --- against another server -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("as_text", [[], thoroughly(["--as-text"])])
def test_the_same_load_goes_to_any_server_with_standard_fields_only(
    services: Services, stories_dir: Path, prose: list[Path], as_text: list[str]
) -> None:
    common = ["--model", str(stories_dir), "--data", str(prose[0]), "--generate", "16", "--repeats", "2", "--json"]
    load = ["--batch", "2", "--context", "20", "--against", f"{services.url}/v1/", *as_text]
    (cell,) = json.loads(bench(*common, *load))["bench"]
    assert (cell["system"], cell["draft"], cell["k"]) == (services.url, None, None)
    assert (cell["batch"], cell["context"], cell["runs"]) == (2, 20, 2)
    assert 2 <= cell["generated"] <= 32
    assert cell["multiplier_measured"] is None  # nothing of ours was measured beside it
    assert cell["end_to_end_tokens_per_second"] > 0


def test_a_server_that_does_not_say_what_it_serves_is_named() -> None:
    result = CliRunner().invoke(app, ["bench", "--against", "http://127.0.0.1:9"])
    assert isinstance(result.exception, BenchError)
    assert "http://127.0.0.1:9/v1/models does not say what is served there" in str(result.exception)
