"""Measure what fp8 costs a draft in τ: its products round weights as a CPU or a GPU does, in float32 on this CPU.

On a GPU, inputs of products are rounded too; only that of the unembedding is not rounded here.

    python -m experiments.fp8_tau [--target DIR --draft DIR --data FILE --device cpu]

τ is teacher-forced: 1 + Σ_i E[α_1 · … · α_i] over blocks of k on windows of text. Both drafts see the same windows, so
their difference is given with a 95 % interval over windows.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor, nn

from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.checkpoints.weights import load_draft, load_target
from spire.cli.paths import TINY, own_draft, target_directory
from spire.model.backends.cpu.weights import fp8_of, of_fp8
from spire.model.backends.gpu.fp8 import rows8
from spire.model.draft import Draft, RolloutBlocks
from spire.model.target import Target
from spire.training.conversations import TrainingBatch
from spire.training.rollouts import acceptance
from spire.training.teacher import teach


def main(
    target: Annotated[Path, typer.Option(help="Target, as for spire up.")] = TINY,
    draft: Annotated[Path | None, typer.Option(help="Directory of its draft.")] = None,
    data: Annotated[Path, typer.Option(help="Text to take windows from.")] = BUNDLED_TEXT,
    windows: Annotated[int, typer.Option(help="How many windows.", min=2)] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a window.", min=64)] = 512,
    k: Annotated[int, typer.Option(help="Depth.", min=1)] = 4,
    device: Annotated[str, typer.Option(help="Whose rounding: cpu or cuda.")] = "cuda",
) -> None:
    """Print τ of a draft as it is and in fp8."""
    directory = target_directory(target)
    of_target = load_target(directory)[0]
    found = draft or own_draft(directory)
    assert found, "name the draft"
    plain, rounded = (load_draft(found, target=directory) for _ in range(2))
    (round_weights if device == "cpu" else round_to_fp8)(rounded)
    taus: list[tuple[float, float]] = []
    for window in track(PromptSource(directory, [data]).cut(windows, length, seed=0), description="windows"):
        taus.append((tau(of_target, plain, window, k), tau(of_target, rounded, window, k)))
    differences = [after - before for before, after in taus]
    half = 1.96 * statistics.stdev(differences) / math.sqrt(windows)
    before, after = (statistics.mean(column) for column in zip(*taus, strict=True))
    typer.echo(f"τ {before:.3f}, in fp8 {after:.3f}: {after - before:+.4f} ± {half:.4f} (k = {k}, {windows} windows)")


def round_weights(draft: Draft) -> None:
    """Round the weight of every product of the draft, as the CPU kernels read it in fp8."""
    for linear in (module for module in draft.modules() if isinstance(module, nn.Linear)):
        linear.weight = nn.Parameter(of_fp8(*fp8_of(linear.weight.detach())), requires_grad=False)


def round_to_fp8(draft: Draft) -> None:
    """Have every product of the draft take weights and inputs that are rounded to fp8, with a scale for each row."""
    for linear in (module for module in draft.modules() if isinstance(module, nn.Linear)):
        linear.weight = nn.Parameter(_rounded(linear.weight.detach()), requires_grad=False)
        linear.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0]),))


def _rounded(x_D: Tensor) -> Tensor:
    values_D, scale_1 = rows8(x_D)
    return values_D.float() * scale_1


def tau(target: Target, draft: Draft, window: list[int], k: int) -> float:
    """Return the mean number of tokens per round on one window, with teacher forcing."""
    batch = TrainingBatch(torch.tensor([window]))
    taught = teach(target, batch.tokens_BL, draft.draft.tapped_layers)
    found = acceptance(draft, target, taught, batch, RolloutBlocks.of(len(window), k, 1, "cpu"))
    return 1 + found.accepted / found.blocks


if __name__ == "__main__":
    typer.run(main)
