"""The paper's sizes on a GPU: train a 67 M target and its drafts, measure τ at three token budgets. Resumable.

    python experiments/paper_size.py --data TRAINING_TEXT [--data ...] --held-out TEXT_DIR --minutes 10

Run it again until it says that it is done: each call goes on where the last one stopped, and a slice of 10 minutes is
enough to get somewhere. Target: 8 layers, width 512, 8 heads × 128, SwiGLU 4,096 (67 M in the body), BPE of 32,768,
sequences of 1,024. Drafts: SPIRe (last 2 layers) at a quarter, half and all of its budget, vanilla (4 layers, half
width) on as many tokens as the target, MagicDec. τ is by the rejection rule, as the paper's. JSON with the device's
name goes to experiments/results/.

What it does not know: the paper's corpus. The target sees its corpus several times over; the JSON says how often.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from paper import ROOT, run_spire
from rich.console import Console

from spire.checkpoints.tokenizer import load_tokenizer
from spire.files import write_whole
from spire.text.documents import Chats
from spire.training.corpus import END, START, TokenStream

RESULTS = ROOT / "experiments" / "results" / "paper_size.json"
RUNS = ROOT / "runs" / "paper_size"
CONTEXTS = (256, 512, 960)

console = Console(stderr=True)


@dataclass(frozen=True)
class Size:
    """Sizes of models, data and training; a step has `tokens_per_step` tokens."""

    vocab_size: int = 32768
    hidden_size: int = 512
    intermediate_size: int = 4096
    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    length: int = 1024
    tokens_per_step: int = 65536
    target_steps: int = 12000
    draft_steps: int = 3000
    contexts: int = 1024
    context_lengths: tuple[int, ...] = CONTEXTS
    generate: int = 64
    # SPIRe's budgets: this part of `draft_steps` each.
    shares: tuple[int, ...] = (4, 2, 1)

    def drafts(self) -> dict[str, dict[str, Any]]:
        """Name, kind and steps of each draft that is trained."""
        spire = {f"spire-{share}": {"kind": "spire", "steps": self.draft_steps // share} for share in self.shares}
        return spire | {"vanilla": {"kind": "vanilla", "steps": self.target_steps}}


TINY = Size(300, 16, 24, 4, 2, 8, 32, 64, 3, 4, 2, (16,), 8, (2,))


class Clock:
    """The rest of the slice."""

    def __init__(self, minutes: float | None):
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def options(self) -> list[str]:
        return [] if self._end is None else ["--minutes", f"{max(0.0, self._end - time.monotonic()) / 60:.2f}"]

    @property
    def up(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


def main(
    data: Annotated[list[Path], typer.Option(help="Training text, as for spire train.")],
    held_out: Annotated[Path, typer.Option(help="Directory of held-out text that contexts are cut from.")],
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; the same command goes on.")] = None,
    runs: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = RUNS,
    results: Annotated[Path, typer.Option(help="The JSON that is written.")] = RESULTS,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few steps of toy models, to see that it runs.")] = False,
) -> None:
    """Go on until everything is trained and measured, or the time is up."""
    size, clock = TINY if tiny else Size(), Clock(minutes)
    for name in ("target", *size.drafts()):
        if not (runs / name / "model.safetensors").exists():
            run_spire(_training(name, size, data, runs, tiny) + clock.options())
        if not (runs / name / "model.safetensors").exists():
            console.print(f"time is up while training {name}: run it again")
            return
    for name in (*size.drafts(), "magicdec"):
        for context in size.context_lengths:
            if clock.up:
                console.print(f"time is up before measuring {name} at {context}: run it again")
                return
            _measure(name, context, size, held_out, runs)
    _write(size, data, runs, results)
    console.print(f"done: {results}")


def _training(name: str, size: Size, data: list[Path], runs: Path, tiny: bool) -> list[str]:
    """The command that trains the target or a draft, without its time."""
    shape = ["--short-length", str(size.length), "--long-length", str(size.length)]
    shape += ["--tokens-per-step", str(size.tokens_per_step), "--out", str(runs / name)]
    shape += [part for path in data for part in ("--data", str(path))]
    shape += ["--no-compile", "--device", "cpu"] if tiny else []
    if name != "target":
        draft = size.drafts()[name]
        window = ["--window", "8"] if tiny and draft["kind"] == "spire" else []
        named = ["--target", str(runs / "target"), "--kind", draft["kind"], "--steps", str(draft["steps"])]
        return ["train", "draft", *named, *window, *shape]
    for option in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "head_dim"):
        shape += [f"--{option.replace('_', '-')}", str(getattr(size, option))]
    return ["train", "target", "--steps", str(size.target_steps), *shape]


def _measured(runs: Path, name: str, context: int) -> Path:
    return runs / "measured" / f"{name}-{context}.json"


def _measure(name: str, context: int, size: Size, held_out: Path, runs: Path) -> None:
    """One cell, kept in a file of its own so that a slice never loses one."""
    file = _measured(runs, name, context)
    if file.exists():
        return
    draft = name if name == "magicdec" else str(runs / name)
    command = ["eval", "acceptance", "--model", str(runs / "target"), "--draft", draft, "--data", str(held_out)]
    command += ["--contexts", str(size.contexts), "--context", str(context), "--generate", str(size.generate), "--json"]
    command += ["--rule", "rejection"]  # the paper's; what is served judges by blocks if nothing is said
    figures = run_spire(command)
    write_whole(file, lambda unfinished: unfinished.write_text(figures))


def _write(size: Size, data: list[Path], runs: Path, results: Path) -> None:
    drafts: dict[str, dict[str, Any]] = {**size.drafts(), "magicdec": {"kind": "magicdec", "steps": 0}}
    target_tokens = size.target_steps * size.tokens_per_step
    whole = {
        "device": _device(),
        "target": {
            "tokens": target_tokens,
            "epochs": round(target_tokens / _corpus_tokens(data, runs), 2),
            "config": json.loads((runs / "target" / "config.json").read_text()),
            "last_loss": _last(runs / "target", "loss"),
        },
        "drafts": {
            name: draft
            | {
                "tokens": draft["steps"] * size.tokens_per_step,
                "acceptance": [
                    cell
                    for context in size.context_lengths
                    for cell in json.loads(_measured(runs, name, context).read_text())["acceptance"]
                ],
            }
            for name, draft in drafts.items()
        },
    }
    write_whole(results, lambda unfinished: unfinished.write_text(json.dumps(whole, indent=1) + "\n"))


def _last(run: Path, figure: str) -> float:
    lines = [json.loads(line) for line in (run / "run" / "log.jsonl").read_text().splitlines()]
    last: float = [line[figure] for line in lines if figure in line][-1]
    return last


def _corpus_tokens(data: list[Path], runs: Path) -> int:
    """Tokens of the training text under the target's tokenizer, as the training has cached them."""
    tokenizer = load_tokenizer(runs / "target")
    start, end = tokenizer.encode(START + END, add_special_tokens=False).ids
    return len(TokenStream.build(data, tokenizer, start, end, Chats(runs / "target")).tokens)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    typer.run(main)
