"""The time of a step that verifies blocks of different depths, beside steps whose blocks are alike.

    python -m experiments.ragged_step --model models/target --batches 4,16 --contexts 128,1900

The model has the shape of a checkpoint and random weights, in the dtype that services choose here. Half of the blocks
have `--short` draft tokens, the others `--long`; each carries its q over the whole vocabulary, as at temperature 1. A
step is what the verifier does between two batches: padding, the checks of q, forward, verdict, commit. The
three kinds of steps alternate, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import spire.service.process  # noqa: F401  # isort: skip  # before torch: the OpenMP settings of the services

import torch
import typer
from rich.console import Console
from rich.table import Table

from experiments.filled_cache import filled_cache
from spire.checkpoints.random_weights import draw_weights
from spire.model.backends.placed import backend_for
from spire.model.backends.reference import Reference
from spire.model.config import load_model_config
from spire.model.placement import choose_device, choose_dtype
from spire.model.self_speculation import SparseAttention
from spire.model.target import Target
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import SERVED_SINK, SERVED_WINDOW
from spire.service.heap import keep_freed_memory
from spire.v1 import verifier_pb2 as pb
from spire.v1.tensor_pb2 import RULE_BLOCK, Sampling
from verifier_service.engine.batch import Block, Item, Q, VerifyTask, pad, q_problems
from verifier_service.engine.sequence import HeldSequence
from verifier_service.engine.step import ModelSteps
from verifier_service.sampling.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[1]


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint whose shape is used.")] = ROOT / "models" / "target",
    batches: Annotated[str, typer.Option(help="Numbers of sequences, with commas.")] = "4,16,64",
    contexts: Annotated[str, typer.Option(help="Positions of each sequence, with commas.")] = "128,512,1900",
    short: Annotated[int, typer.Option(min=0, max=16, help="Draft tokens of one half.")] = 1,
    long: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens of the other half.")] = 8,
    seconds: Annotated[float, typer.Option(min=0, help="Measure each kind of step of a cell so long.")] = 3.0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare them. *Share* is where the mixed step lies between the two others: 0 at the short one, 1 at the long."""
    keep_freed_memory()
    device = choose_device("auto")
    bench, config = Bench(device, choose_dtype(dtype, device), seconds), load_model_config(model)
    backend = backend_for(device)
    target = backend.pack(draw_weights(lambda: Target(config), bench.dtype, device))
    sizes = [(int(batch), int(context)) for batch in batches.split(",") for context in contexts.split(",")]
    cells = [measure(target, backend, batch, context, short, long, bench) for batch, context in sizes]
    if as_json:
        about = {"model": model.name, "dtype": str(bench.dtype), "kernels": backend.kernels, "depths": [short, long]}
        print(json.dumps(about | {"cells": cells}))
        return
    title = f"{model.name}: ms of a step"
    table = Table(
        "sequences", "context", f"k = {short}", f"half {short}, half {long}", f"k = {long}", "share", title=title
    )
    for cell in cells:
        times = (f"{cell[name]:.2f}" for name in ("short_ms", "mixed_ms", "long_ms", "share"))
        table.add_row(f"{cell['batch']}", f"{cell['context']:,}", *times)
    Console().print(table)


@torch.inference_mode()
def measure(
    target: Target, backend: Reference, batch: int, context: int, short: int, long: int, bench: Bench
) -> dict[str, Any]:
    """Return the median milliseconds of the three kinds of steps over `batch` sequences."""
    config, device = target.config, bench.device
    cache, slots = filled_cache(config, batch, context, long + 1, bench.dtype, device)
    pipeline = Pipeline(batch, config.vocab_size, device)
    steps = ModelSteps(target, cache, pipeline, SparseAttention(SERVED_SINK, SERVED_WINDOW), 0, backend)
    sequences = [_sequence(slot, context) for slot in slots]
    for sequence in sequences:
        pipeline.assign(sequence.slot, sequence.start, None)
    q_KV = torch.rand(long, config.vocab_size, device=device)
    q_KV = (q_KV / q_KV.sum(dim=-1, keepdim=True)).bfloat16()

    def step(depths: list[int]) -> Callable[[], None]:
        drafted = [torch.randint(config.vocab_size, (k,)).tolist() for k in depths]

        def run() -> None:
            blocks = [
                _block(sequence, tokens, q_KV[: len(tokens)])
                for sequence, tokens in zip(sequences, drafted, strict=True)
            ]
            padded = pad(sorted(blocks, key=lambda block: block.k), device)
            assert not any(q_problems(padded, config.vocab_size))
            steps.run(padded, None)
            cache.rewind(slots, [context] * batch)

        return run

    mixed = [short if at % 2 else long for at in range(batch)]
    times = bench.by_turns(step([short] * batch), step(mixed), step([long] * batch))
    of_short, of_mixed, of_long = (1000 * one for one in times)
    share = (of_mixed - of_short) / (of_long - of_short)
    figures = {"short_ms": of_short, "mixed_ms": of_mixed, "long_ms": of_long, "share": share}
    return {"batch": batch, "context": context, **figures}


def _sequence(slot: int, context: int) -> HeldSequence:
    sampling = Sampling(temperature=1, top_p=1, seed=slot, rule=RULE_BLOCK)
    start = pb.Start(sequence_id=str(slot), tokens=[0] * (context + 1), sampling=sampling)
    return HeldSequence(start, slot, "", lambda _: None, lambda _: None, torch.zeros(context, dtype=torch.int64), 0.0)


def _block(sequence: HeldSequence, tokens: list[int], q_KV: torch.Tensor) -> Block:
    item = Item(sequence.id, 1, len(sequence.tokens) - 1, len(tokens), False, tokens, None)
    task = VerifyTask(pb.VerifyBatch(), "", lambda _: None)
    return Block(sequence, item.base, task, item, tokens, Q(q_KV, q_KV.shape[-1]) if tokens else None)


if __name__ == "__main__":
    typer.run(main)
