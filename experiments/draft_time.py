"""The time of drafting behind short and long contexts, and what a stop head adds, with nothing else running.

    python experiments/draft_time.py --draft models/draft --contexts 128,1900
    python experiments/draft_time.py --draft models/smollm2-draft --target DIR

The draft service's own memory and passes, in the dtype and with the threads that it chooses here: activations of the
verified positions are absorbed, then rounds of k passes are drafted for both contexts by turns, so that a noisy machine
is noisy to both. A draft with a stop head drafts each round again with every token judged and nobody stopped. Beside a
working verifier the same is in every cell of `spire bench`: `propose`.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import spire.service.process  # noqa: F401  # isort: skip  # before torch: the OpenMP settings of the services

import structlog
import torch
import typer
from rich.console import Console
from rich.table import Table

from draft_service.drafter import Drafter, Span, Verified
from spire.checkpoints.weights import load_draft
from spire.decoding.drafting import DraftItem
from spire.model.backends.placed import draft_backend_for
from spire.model.placement import choose_dtype, draft_threads, set_threads
from spire.rpc.sampling import from_protos
from spire.service.heap import keep_freed_memory
from spire.v1 import tensor_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
# A probability that no block falls below.
_NEVER = 1e-30
_MORE_THAN_CACHES = 2**26


def main(
    draft: Annotated[Path, typer.Option(help="Checkpoint of a SPIRe draft.")] = ROOT / "models" / "draft",
    target: Annotated[Path | None, typer.Option(help="Target whose embeddings the draft uses.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 16,
    contexts: Annotated[str, typer.Option(help="Verified positions of each sequence; two with a comma.")] = "128,1900",
    k: Annotated[int, typer.Option(min=1, max=16)] = 4,
    repeats: Annotated[int, typer.Option(min=3)] = 200,
    quantization: Annotated[str, typer.Option(help="auto, none or fp8.")] = "auto",
    cold: Annotated[bool, typer.Option(help="Let a round read its weights from memory, as beside a target.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    short, long = (int(context) for context in contexts.split(","))
    figures = measure(draft, target, batch, short, long, k, repeats, quantization, cold)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(*figures, title=f"{batch} sequences, {k} passes")
    table.add_row(*(f"{figure:,.3f}" if isinstance(figure, float) else f"{figure:,}" for figure in figures.values()))
    Console().print(table)


@torch.inference_mode()
def measure(
    path: Path,
    target: Path | None,
    batch: int,
    short: int,
    long: int,
    k: int,
    repeats: int,
    quantization: str = "auto",
    cold: bool = False,
) -> dict[str, float | int]:
    """Medians of a round's milliseconds at both contexts, their ratio, what a sequence takes of memory, and the share
    of a round that the stop head adds."""
    keep_freed_memory()
    device = torch.device("cpu")
    model = load_draft(path, choose_dtype("auto", device), target=target)
    set_threads(draft_threads(model))
    backend = draft_backend_for(device, next(model.parameters()).dtype, quantization)
    others = torch.ones(_MORE_THAN_CACHES if cold else 0)
    drafter = Drafter(backend.pack(model), 2 * batch, model.config.vocab_size, long + k, backend)
    rows = from_protos([pb.Sampling(temperature=1.0, top_p=1.0, seed=seed) for seed in range(batch)])
    asked = {context: _absorbed(drafter, batch, context) for context in (short, long)}
    kinds = [(context, 0.0) for context in asked]
    if model.stop_head is not None:
        kinds += [(context, _NEVER) for context in asked]
    seconds = {kind: list[float]() for kind in kinds}
    for _ in range(repeats):
        for context, least in kinds:
            items = [replace(item, least_standing=least) for item in asked[context]]
            others.sum()
            began = time.perf_counter()
            drafter.propose(items, k, rows)
            seconds[context, least].append(time.perf_counter() - began)
    ms = {kind: 1000 * statistics.median(times[repeats // 10 :]) for kind, times in seconds.items()}
    figures: dict[str, float | int] = {
        f"ms at {short}": ms[short, 0.0],
        f"ms at {long}": ms[long, 0.0],
        "ratio": ms[long, 0.0] / ms[short, 0.0],
        "bytes per sequence": drafter.memory.bytes_per_sequence(),
    }
    if model.stop_head is not None:
        figures |= {f"head at {context}": ms[context, _NEVER] / ms[context, 0.0] - 1 for context in asked}
    return figures


def _absorbed(drafter: Drafter, batch: int, context: int) -> list[DraftItem]:
    """Sequences of so many verified positions: the sink and the window that a replay would bring."""
    draft = drafter.draft
    sink, window = draft.draft.sink, draft.draft.window
    guesses = []
    for number in range(batch):
        name = f"{number} of {context}"
        spans = [Span(name, 0, sink, True), Span(name, context - window, window, False)]
        taps_RND = torch.randn(sink + window, len(draft.draft.tapped_layers), draft.config.hidden_size)
        drafter.absorb(Verified(spans, taps_RND, []))
        guesses.append(DraftItem(name, context, number))
    return guesses


if __name__ == "__main__":
    typer.run(main)
