"""Part 3: a whole step of an 8B shape as it is served today: forward, verdict, commit. Weights are random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from experiments.filled_cache import filled_cache
from experiments.gpu.expectation import floor_seconds, step_seconds
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.launches import in_words, launches
from experiments.gpu.machine_rates import copy_rate
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.bench.synthetic import config_of
from spire.checkpoints.random_weights import draw_weights
from spire.model.backends.placed import backend_for
from spire.model.backends.reference import Reference
from spire.model.cache.placed import cache_for
from spire.model.draft import last_layers
from spire.model.self_speculation import SparseAttention
from spire.model.target import Target
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import SERVED_SINK, SERVED_WINDOW, trained_draft
from spire.v1 import verifier_pb2 as pb
from spire.v1.tensor_pb2 import Sampling
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.step import ModelSteps, PromptChunk
from verifier_service.sampling.pipeline import Pipeline

_DEPTH = 4
_PROMPT, _TINY_PROMPT = 2048, 40
# Sequences and positions of each, the one that matters most first.
_CELLS = ((32, 8192), (32, 1024), (1, 1024), (1, 8192))
_TINY_CELLS = ((2, 130), (1, 40))


@dataclass(frozen=True)
class Cell:
    """`batch` sequences of `context` positions, each of which gains a token and `k` drafted ones are verified."""

    batch: int
    context: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.batch} × {self.context:,}, {f'verify k = {self.k}' if self.k else 'plain'}"


@torch.inference_mode()
def measure(setting: Setting, findings: Findings) -> None:
    rate, shape = copy_rate(setting), shape_of(setting)
    cells = _TINY_CELLS if setting.tiny else _CELLS
    config = config_of(shape, max(context for _, context in cells) + 2 * _DEPTH)
    backend = backend_for(setting.device)
    target = backend.pack(draw_weights(lambda: Target(config), torch.bfloat16, setting.device))
    with findings.attempt("a prompt"):
        findings.add(_prompt(setting, target, backend))
    for batch, context in cells:
        for k in (0, _DEPTH):
            cell = Cell(batch, context, k)
            with findings.attempt(cell.name):
                findings.add(_found(setting, target, backend, cell, rate))


def _prompt(setting: Setting, target: Target, backend: Reference) -> Finding:
    """Time a prompt from its tokens to its first token, expected at the rate of products of so many rows."""
    config, device, length = target.config, setting.device, _TINY_PROMPT if setting.tiny else _PROMPT
    cache = cache_for(config, 1, length + 1, torch.bfloat16, device)
    slot = cache.allocate()
    cache.reserve([slot], length)
    pipeline = Pipeline(1, config.vocab_size, device)
    pipeline.assign(slot, pb.Start(tokens=[0] * length, sampling=Sampling(temperature=1, top_p=1)), None)
    sparse = SparseAttention(SERVED_SINK, SERVED_WINDOW)
    steps = ModelSteps(target, cache, pipeline, sparse, config.vocab_size, backend)
    chunk = PromptChunk([slot], [torch.randint(config.vocab_size, (length,))], [True], [[]], [1])

    def prefill() -> None:
        steps.run(None, chunk)
        cache.rewind([slot], [0])

    bench = Bench(device, torch.bfloat16, setting.least_seconds)
    shape = shape_of(setting)
    inputs_RD, weight_ED = bench.randn(length, shape.hidden_size), bench.randn(4096, shape.hidden_size)
    product = bench.seconds(lambda: torch.nn.functional.linear(inputs_RD, weight_ED)) / weight_ED.numel()
    seconds = bench.seconds(prefill)
    return Finding(f"prompt of {length:,} tokens", 1000 * seconds, "ms", 1000 * product * shape.body_parameters)


def _found(setting: Setting, target: Target, backend: Reference, cell: Cell, rate: float) -> Finding:
    """Measure one cell. A lack of memory is a finding too."""
    shape = shape_of(setting)
    predicted = step_seconds(shape, cell.batch, cell.context, rate)
    floor = floor_seconds(shape, cell.batch, cell.context, rate)
    setting.forget_peak()
    try:
        seconds, counted = _measured(setting, target, backend, cell)
    except torch.OutOfMemoryError as error:
        return Finding(cell.name, None, "ms", 1000 * predicted, note=f"out of memory: {str(error)[:80]}")
    more = {"floor_ms": 1000 * floor, "peak_gb": setting.peak_gb(), **counted}
    note = f"{seconds / floor:.1f} × the floor of {1000 * floor:.3g} ms; peak {more['peak_gb']:.1f} GB"
    note += in_words(counted)
    return Finding(cell.name, 1000 * seconds, "ms", 1000 * predicted, note, more)


def _measured(setting: Setting, target: Target, backend: Reference, cell: Cell) -> tuple[float, dict[str, Any]]:
    """Seconds of a step, and what it asks of the GPU."""
    config, device = target.config, setting.device
    cache, slots = filled_cache(config, cell.batch, cell.context, cell.k + 1, torch.bfloat16, device)
    sparse = SparseAttention(SERVED_SINK, SERVED_WINDOW)
    pipeline = Pipeline(cell.batch, config.vocab_size, device)
    steps = ModelSteps(target, cache, pipeline, sparse, config.vocab_size, backend)
    if cell.k:
        steps.tapped_layers = last_layers(config, trained_draft("spire", shape_of(setting)).shape.layers)
    batch = _batch(cell, slots, config.vocab_size, device)

    def step() -> None:
        steps.run(batch, None)
        cache.rewind(slots, [cell.context] * cell.batch)

    return Bench(device, torch.bfloat16, setting.least_seconds).seconds(step), launches(step, device)


def _batch(cell: Cell, slots: list[int], vocabulary: int, device: torch.device) -> RaggedBatch:
    """Greedy blocks, whose drafted tokens are random."""
    counts = [cell.k] * cell.batch
    return RaggedBatch(
        slots=slots,
        counts=counts,
        tokens_BT=torch.randint(vocabulary, (cell.batch, cell.k + 1), device=device),
        counts_B=torch.tensor(counts, device=device),
        base_B=torch.full((cell.batch,), cell.context, device=device),
        q=None,
        widths_B=torch.zeros(cell.batch, dtype=torch.int64, device=device),
        parts=[cell.batch],
    )
