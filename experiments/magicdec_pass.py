"""The time of a pass of MagicDec beside a plain step of the same batch.

    python -m experiments.magicdec_pass --model models/target --batches 1,4,16 --contexts 128,512,1900

The model has the shape of a checkpoint and random weights, in the dtype that services choose here. A plain step is what
the verifier does without a draft: forward, sampling, commit. The time of a pass is that of a round of k passes, divided
by k: the copy of sink and window, the forwards, and the draws. Steps and rounds alternate, so that a noisy machine is
noisy to both. Does not measure: verification, and what goes between the services.
"""

from __future__ import annotations

import json
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
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.step import ModelSteps
from verifier_service.sampling.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[1]


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint whose shape is used.")] = ROOT / "models" / "target",
    batches: Annotated[str, typer.Option(help="Numbers of sequences, with commas.")] = "1,4,16",
    contexts: Annotated[str, typer.Option(help="Positions of each sequence, with commas.")] = "128,512,1900",
    k: Annotated[int, typer.Option(min=1, max=16, help="Passes of a round.")] = 4,
    window: Annotated[int, typer.Option(min=1)] = SERVED_WINDOW,
    seconds: Annotated[float, typer.Option(min=0, help="Measure steps, and rounds, of a cell at least so long.")] = 3.0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare them."""
    keep_freed_memory()
    device = choose_device("auto")
    bench, config = Bench(device, choose_dtype(dtype, device), seconds), load_model_config(model)
    backend, sparse = backend_for(device), SparseAttention(SERVED_SINK, window)
    target = backend.pack(draw_weights(lambda: Target(config), bench.dtype, device))
    sizes = [(int(batch), int(context)) for batch in batches.split(",") for context in contexts.split(",")]
    cells = [measure(target, backend, sparse, batch, context, k, bench) for batch, context in sizes]
    if as_json:
        about = {"model": model.name, "dtype": str(bench.dtype), "kernels": backend.kernels, "k": k, "window": window}
        print(json.dumps(about | {"cells": cells}))
        return
    table = Table("sequences", "context", "plain step ms", "pass ms", "pass / step", title=f"{model.name}, k = {k}")
    for cell in cells:
        times = (f"{cell[name]:.2f}" for name in ("step_ms", "pass_ms"))
        table.add_row(f"{cell['batch']}", f"{cell['context']:,}", *times, f"{cell['ratio']:.3f}")
    Console().print(table)


@torch.inference_mode()
def measure(
    target: Target, backend: Reference, sparse: SparseAttention, batch: int, context: int, k: int, bench: Bench
) -> dict[str, Any]:
    """Return the median milliseconds of a plain step and of a pass over `batch` sequences, and their ratio."""
    config, device = target.config, bench.device
    cache, slots = filled_cache(config, batch, context, 1, bench.dtype, device)
    pipeline = Pipeline(batch, config.vocab_size, device)
    for slot in slots:
        sampling = Sampling(temperature=1, top_p=1, seed=slot, rule=RULE_BLOCK)
        pipeline.assign(slot, pb.Start(tokens=[0], sampling=sampling), None)
    steps = ModelSteps(target, cache, pipeline, sparse, 0, backend)
    zeros_B = torch.zeros(batch, dtype=torch.int64, device=device)
    blocks = RaggedBatch(slots, [0] * batch, zeros_B[:, None], zeros_B, zeros_B + context, None, zeros_B, [batch])

    def step() -> None:
        steps.run(blocks, None)
        cache.rewind(slots, [context] * batch)

    def drafting() -> None:
        drafted = steps.draft(slots, [0] * batch, k, pipeline.of(slots), lambda: None)
        drafted.tokens_BK.tolist()

    plain, round_ = bench.by_turns(step, drafting)
    figures = {"step_ms": 1000 * plain, "pass_ms": 1000 * round_ / k, "ratio": round_ / k / plain}
    return {"batch": batch, "context": context, **figures}


if __name__ == "__main__":
    typer.run(main)
