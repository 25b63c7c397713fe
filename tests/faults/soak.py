"""`make soak`: hours in minutes. Mixed load with kills, clients that leave and requests that are wrong.

In the first half services are killed; then nothing dies any more and memory may grow no further. Every answer is
compared with that of the undisturbed run, so the invariant rule and float32 serve. Exit status 1 when a bound breaks.
Waits follow the target: kills come no faster than requests end, who is waited for may take as long as there are rounds.
What it does not know: whether memory that grows within minutes of a service's start would stop growing.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import httpx
import matplotlib.pyplot as plt
import typer
from rich.console import Console

from spire.bench.load import read_trace
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.model.config import ModelConfig, load_model_config
from tests.faults.arrivals import arrivals, poisson, pool
from tests.faults.history import SILENCE, Body, Load, Record, in_order, stream_into
from tests.faults.system import System, system
from tests.gateway.conftest import eventually
from tests.paths import ROOT
from tests.untrained import untrained_draft

MODELS = ROOT / "models"
# Tokens of the longest request, where the target has so many: its prompt is three quarters of them, 1,900.
LONGEST = 2534
MOST_AT_ONCE = 32
SAMPLE_SECONDS = 2.0
# Shares of all requests.
LEAVES_EARLY, IS_WRONG = 0.1, 0.1
# Of the time: until then services die, and from then on memory counts.
KILLS_UNTIL, WARM_FROM = 0.5, 0.6
MOST_GROWTH = 0.02
# Little, so that the cache has come to its bound before memory counts: what is kept of prompts fills it by and by.
LONGEST_IN_CACHE = 7
# Seconds between two kills, at least. A large target is given the time that it took for a batch of requests: killed
# before it has read a prompt, again and again, it would never come to an end.
KILL_EVERY = 15.0
WRONG: list[tuple[Body | bytes, int]] = [
    (b"{", 400),
    (b"[" * 100_000, 400),
    ({"prompt": "x", "max_tokens": -1}, 400),
    ({"prompt": "x", "n": 10**9}, 400),
    ({"prompt": "x", "temperature": "hot"}, 400),
    ({"prompt": "x", "model": "another"}, 404),
    ({"prompt": "x", "guided_regex": "("}, 400),
    (b" " * 3_000_000, 413),
]

console = Console(stderr=True)


@dataclass
class Sample:
    """What the system holds `at` seconds after the beginning; bytes by process, figures by name."""

    at: float
    tokens: int
    resident: dict[str, int]
    held: dict[str, float]
    cache_bytes: float


@dataclass
class Soak:
    """What is asked, what came, what was done to the system."""

    whole: System
    rng: random.Random
    expected: list[Record]
    wrong: list[tuple[Body | bytes, int]]
    began: float = field(default_factory=time.monotonic)
    records: list[Record] = field(default_factory=list)
    refusals: int = 0
    left: int = 0
    wrong_answers: list[str] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    clients: list[threading.Thread] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    # -- clients -------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """One more client, unless there are too many."""
        self.clients = [client for client in self.clients if client.is_alive()]
        if len(self.clients) < MOST_AT_ONCE:
            kind = self.rng.random()
            what = self._leave if kind < LEAVES_EARLY else self._err if kind < LEAVES_EARLY + IS_WRONG else self._ask
            self.clients.append(threading.Thread(target=what, args=(self.rng.randrange(1 << 30),), daemon=True))
            self.clients[-1].start()

    def _ask(self, chosen: int) -> None:
        while True:
            record = Record(self.expected[chosen % len(self.expected)].body)
            stream_into(record, self.whole.url)
            if not record.refused:
                break
            self.refusals += 1  # no verifier is there: asked again, as any client does that is told to come back
            time.sleep(0.2)
        self.records.append(record)

    def _leave(self, chosen: int) -> None:
        body = self.expected[chosen % len(self.expected)].body | {"stream": True}
        try:
            with httpx.stream("POST", f"{self.whole.url}/v1/completions", json=body, timeout=SILENCE) as response:
                for line, _ in zip(response.iter_lines(), range(1 + chosen % 20), strict=False):
                    assert line is not None
        except httpx.HTTPError:
            pass  # whoever leaves does not mind
        self.left += 1

    def _err(self, chosen: int) -> None:
        body, status = self.wrong[chosen % len(self.wrong)]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{self.whole.url}/v1/completions", content=content, headers=headers, timeout=SILENCE)
        # While no verifier is there nobody can say what its model is.
        if answer.status_code not in (status, 503):
            self.wrong_answers.append(f"{answer.status_code} instead of {status}: {answer.text[:200]}")

    # -- what happens to it --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        self.kills.append((self.now, name))
        service = getattr(self.whole, name)
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        self.whole.revive(name)

    def sample(self) -> None:
        services = {"gateway": self.whole.gateway, "verifier": self.whole.verifier, "draft": self.whole.draft}
        tokens = sum(count for record in list(self.records) for _, count in record.arrivals)
        self.samples.append(
            Sample(
                self.now,
                tokens,
                {name: _resident(service.process.pid) for name, service in services.items()},
                self.whole.held(),
                self.whole.metric("verifier", "spire_verifier_cache_held_bytes"),
            )
        )

    def let_end(self) -> None:
        """Wait for the clients, for as long as there are rounds; who has not ended by then is still held."""
        told = -1.0
        while alive := [client for client in self.clients if client.is_alive()]:
            if (now := self.whole.metric("gateway", "spire_rounds_total")) == told:
                return
            told = now
            alive[0].join(SILENCE)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def verdict(self, minutes: float, load: str) -> dict[str, Any]:
        """The figures, and in `broken` every bound that did not hold."""
        expected = {repr(record.body): record for record in self.expected}
        failed = [record.error for record in self.records if record.error]
        answered = [record for record in self.records if not record.error]
        mismatches = [found for record in answered if (found := record.problems(expected[repr(record.body)]))]
        growth = {name: grown([s.resident[name] for s in self._warm(minutes)]) for name in self.samples[-1].resident}
        broken = {
            "failed requests": failed,
            "mismatches": mismatches,
            "wrong answers": self.wrong_answers,
            "growth": [f"{name} {share:.1%}" for name, share in growth.items() if share >= MOST_GROWTH],
            "still held": self.whole.leaks(),
        }
        return {
            "minutes": minutes,
            "load": load,
            "requests": len(self.records),
            "told to come back": self.refusals,
            "left early": self.left,
            "kills": self.kills,
            "tokens per second": sum(len(record.tokens) for record in answered) / (60 * minutes),
            "failed": len(failed),
            "mismatches": len(mismatches),
            "memory growth after warm-up": growth,
            "broken": {what: found for what, found in broken.items() if found},
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _warm(self, minutes: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.at >= WARM_FROM * 60 * minutes]


def _resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def grown(series: list[int]) -> float:
    """Twice what a series grew by in the half in which it grew less.

    A leak lifts both; what a service takes once and keeps, at its first large batch for one, lifts one of them.
    """
    middle = len(series) // 2
    return 2 * min(_risen(series[:middle]), _risen(series[middle:]))


def _risen(series: list[int]) -> float:
    """From the first to the last fifth of a series, by the quartile that grew least.

    A leak lifts each of them; what comes and goes with the load does not.
    """
    fifth = max(2, len(series) // 5)
    early, late = quantiles(series[:fifth], n=4), quantiles(series[-fifth:], n=4)
    return min(after / before for before, after in zip(early, late, strict=True)) - 1


def undisturbed(whole: System, bodies: list[Body]) -> tuple[list[Record], float]:
    """The right answers, which are what plain decoding says while nothing happens, and the seconds that eight of them
    took at most."""
    plainly = [body | {"speculation": {"draft": "off"}} for body in bodies]
    records: list[Record] = []
    longest = 0.0
    for at in range(0, len(plainly), 8):
        console.print(f"while nothing happens: {at} of {len(plainly)} answered")
        began = time.monotonic()
        with Load(whole.url, plainly[at : at + 8]) as load:
            pass
        longest = max(longest, time.monotonic() - began)
        records += in_order(load.records, plainly[at : at + 8])
    failed = [record.error for record in records if record.error]
    assert not failed, failed
    expected = zip(bodies, records, strict=True)
    return [Record(body, one.tokens, one.text, usage=one.usage) for body, one in expected], longest


@contextmanager
def served(model: Path | None, draft: Path | None) -> Iterator[tuple[Path, Path]]:
    """Directories of a target and its draft: the bundled ones, or for another target one that nobody trained."""
    if model is None or draft is not None:
        yield model or MODELS / "target", draft or MODELS / "draft"
        return
    with tempfile.TemporaryDirectory() as directory:
        console.print(f"cutting a draft out of {model}")
        yield model, untrained_draft(model, Path(directory) / "draft")


def cache_gb(target: ModelConfig, context: int) -> float:
    """Memory for a few of the longest sequences, in float32."""
    position = 2 * 4 * target.num_hidden_layers * target.num_key_value_heads * target.head_dim
    return LONGEST_IN_CACHE * context * position / 1e9


def soak(
    model: Annotated[Path | None, typer.Option(help="Target to serve. Default: the bundled pair.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Its draft. Default: one cut out of it, untrained.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV of arrivals and lengths, like the Azure LLM inference traces; else a Poisson process."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long.", min=1)] = 30,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.", min=0.1)] = 1.0,
    kill_every: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds between two kills; every third is the verifier's. Default: {KILL_EVERY:g} or more."
        ),
    ] = None,
    slow: Annotated[
        tuple[float, float],
        typer.Option(help="Seconds that a step takes longer than it does, and a chunk of prompts: of a larger target."),
    ] = (0, 0),
    seed: Annotated[int, typer.Option(help="Decides who asks what.")] = 1,
    out: Annotated[Path, typer.Option(help="Figures, as JSON; the plot goes beside them.")] = Path("build/soak.json"),
) -> None:
    """Load the system for a while with everything at once, and say what it cost."""
    rng = random.Random(seed)
    with served(model, draft) as (target, follower):
        config = load_model_config(target)
        context = min(LONGEST, config.longest)
        rows = read_trace(trace, context, float("inf"), 1.0) if trace else poisson(context, rng)
        times = list(arrivals(rows, rng.randrange(len(rows)), rate, 60 * minutes))
        console.print("starting the services")
        with system(target, follower, verifier_options=["--cache-gb", str(cache_gb(config, context))]) as whole:
            (whole.directory / "slow").write_text("{} {}".format(*slow))
            expected, longest = undisturbed(whole, pool(PromptSource(target, [BUNDLED_TEXT]), rows, rng))
            too_long: Body = {"prompt": "x " * 2 * config.max_position_embeddings}
            _prime(whole, too_long)
            time.sleep(1)
            whole.baseline = whole.held()
            run = Soak(whole, rng, expected, [*WRONG, (too_long, 400)])
            load_and_kill(run, times, 60 * minutes, kill_every or max(KILL_EVERY, longest), longest)
            verdict = run.verdict(minutes, trace.name if trace else f"Poisson process, seed {seed}")
    verdict["model"] = target.name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(verdict, indent=1))
    _plot(verdict, out.with_suffix(".png"))
    console.print_json(json.dumps({name: value for name, value in verdict.items() if name != "samples"}))
    raise typer.Exit(1 if verdict["broken"] else 0)


def load_and_kill(run: Soak, times: list[float], seconds: float, kill_every: float, longest: float) -> None:
    """Clients come at these times; services die every so many seconds of the first part; all that has begun may end.

    What clients have left ends within the time that the `longest` undisturbed request took, and a minute.
    """
    console.print(
        f"for {seconds / 60:g} minutes; in the first {KILLS_UNTIL * seconds:.0f} s a kill every {kill_every:.0f} s"
    )
    stop = threading.Event()
    beside = [
        threading.Thread(target=_every, args=(SAMPLE_SECONDS, stop, run.sample)),
        threading.Thread(target=_kills, args=(run, kill_every, KILLS_UNTIL * seconds, stop)),
    ]
    for thread in beside:
        thread.start()
    minute = 0
    for at in times:
        time.sleep(max(0.0, at - run.now))
        run.arrive()
        if run.now > 60 * (minute + 1):
            minute += 1
            console.print(f"{minute} of {seconds / 60:g} minutes: {len(run.records)} answered, {len(run.kills)} kills")
    console.print("letting end what has begun")
    run.let_end()
    stop.set()
    for thread in beside:
        thread.join()
    eventually(lambda: run.whole.metric("gateway", "spire_sequences_now") == 0, within=60 + longest)


def _prime(whole: System, too_long: Body) -> None:
    """Do at once what leaves something behind for good: a grammar, and as many long prompts as there are threads."""
    whole.prime()
    with ThreadPoolExecutor(MOST_AT_ONCE) as clients:
        for _ in range(4 * MOST_AT_ONCE):
            clients.submit(httpx.post, f"{whole.url}/v1/completions", json=too_long, timeout=SILENCE)


def _every(seconds: float, stop: threading.Event, what: Any) -> None:
    while not stop.wait(seconds):
        try:
            what()
        except (httpx.HTTPError, OSError):
            continue  # whoever is asked is dead just now


def _kills(run: Soak, every: float, until: float, stop: threading.Event) -> None:
    count = 0
    while not stop.wait(every) and run.now < until:
        count += 1
        run.kill("draft" if count % 3 else "verifier")


def _plot(verdict: dict[str, Any], file: Path) -> None:
    samples = verdict["samples"]
    at = [sample["at"] / 60 for sample in samples]
    figure, (tokens, memory, held, cache) = plt.subplots(4, sharex=True, figsize=(9, 11), layout="constrained")
    pairs = list(pairwise(samples))
    tokens.plot(at[1:], [(b["tokens"] - a["tokens"]) / (b["at"] - a["at"]) for a, b in pairs])
    tokens.set_ylabel("tokens a second\nof requests that ended")
    for name in samples[-1]["resident"]:
        memory.plot(at, [sample["resident"][name] / 2**20 for sample in samples], label=name)
    memory.set_ylabel("resident MiB")
    for name in samples[-1]["held"]:
        held.plot(at, [sample["held"].get(name) for sample in samples], label=name)
    held.set_ylabel("descriptors, threads,\ntasks, sequences")
    cache.plot(at, [sample["cache_bytes"] / 2**20 for sample in samples])
    cache.set_ylabel("cache, MiB")
    cache.set_xlabel("minutes")
    for axis in (tokens, memory, held, cache):
        for moment, name in verdict["kills"]:
            axis.axvline(moment / 60, color="C3" if name == "verifier" else "C1", linewidth=0.6, alpha=0.6)
    for axis in (memory, held):
        axis.legend(fontsize=7)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    typer.run(soak)
