"""`spire train`: train a target on text, or a draft for a target. Both resume an unfinished run found in --out.

    spire train target --data books/ --out runs/target
    spire train draft --target runs/target --data books/ --out runs/draft
    spire train draft --target runs/target --data books/ --out runs/vanilla --kind vanilla

Options that are not given have the values of the bundled pair's recipe.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spire.cli.options import Json, listed
from spire.cli.paths import TINY, target_directory
from spire.errors import SpireError

if TYPE_CHECKING:
    from spire.training.run import Execution

app = typer.Typer(help="Train a target from text, or a draft from a target.", no_args_is_help=True)

Data = Annotated[
    list[Path],
    typer.Option(help="Training text or chats: .txt, .jsonl, compressed, an archive, a directory; repeatable."),
]
Valid = Annotated[list[Path] | None, typer.Option(help="Held-out text for validation, in the same forms; repeatable.")]
Out = Annotated[Path, typer.Option(help="Directory of the checkpoint; the run's state lies in its run/.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_COMPILE = "Compile the loss: slow start, fast steps."
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help=_COMPILE)]
Minutes = Annotated[float | None, typer.Option(help="Stop after so many minutes; the same command continues.", min=0)]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps.", min=1)]
Seed = Annotated[int | None, typer.Option(help="Seed of the initial weights and of the order of the data.", min=0)]
TokensPerStep = Annotated[int | None, typer.Option(help="Tokens of one batch.", min=1)]
ShortLength = Annotated[int | None, typer.Option(help="Tokens of most training sequences.", min=2)]
LongLength = Annotated[int | None, typer.Option(help="Tokens of the long training sequences.", min=2)]
DecayShare = Annotated[float | None, typer.Option(help="Share of steps in which the rate falls to 0.", min=0.01, max=1)]


@app.command("target")
def target(
    data: Data,
    out: Out,
    valid: Valid = None,
    device: Device = "auto",
    compiled: Compiled = True,
    minutes: Minutes = None,
    steps: Steps = None,
    seed: Seed = None,
    tokens_per_step: TokensPerStep = None,
    short_length: ShortLength = None,
    long_length: LongLength = None,
    decay_share: DecayShare = None,
    muon_rate: Annotated[float | None, typer.Option(help="Learning rate of the layers' matrices.", min=0)] = None,
    muon_weight_decay: Annotated[float | None, typer.Option(help="Decay of the layers' matrices.", min=0)] = None,
    adamw_rate: Annotated[float | None, typer.Option(help="Learning rate of everything else.", min=0)] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the byte-level BPE.", min=258)] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width.", min=1)] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of SwiGLU.", min=1)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.", min=1)] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head. Default: width / heads.", min=2)] = None,
) -> None:
    """Train a Llama-architecture target and its tokenizer from text."""
    given = _given(locals())
    from spire.training.target import TargetRecipe, train_target

    done = train_target(data, valid or [], out, TargetRecipe(**given), _execution(device, compiled, minutes))
    typer.echo(f"wrote {out}; serve it with: spire up --model {out} --draft off" if done else _STOPPED)


@app.command("draft")
def draft(
    data: Data,
    out: Out,
    target: Annotated[Path, typer.Option(help="Target that the draft will guess for, as for `spire up`.")] = TINY,
    valid: Valid = None,
    device: Device = "auto",
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help=f"{_COMPILE} Default: not on a CPU for a large vocabulary."),
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    seed: Seed = None,
    tokens_per_step: TokensPerStep = None,
    short_length: ShortLength = None,
    long_length: LongLength = None,
    decay_share: DecayShare = None,
    muon_rate: Annotated[float | None, typer.Option(help="Learning rate of the layers' matrices.", min=0)] = None,
    adamw_rate: Annotated[float | None, typer.Option(help="Learning rate of everything else.", min=0)] = None,
    kind: Annotated[str, typer.Option(help="spire, or vanilla: independent, half the layers and widths.")] = "spire",
    layers: Annotated[
        int | None, typer.Option(help="Layers, copied from the target. Default: a quarter.", min=1)
    ] = None,
    copied_layers: Annotated[
        str | None,
        typer.Option(help="Copy these, e.g. 3,7 (0: first). Default: the last; spread for large vocabularies."),
    ] = None,
    init: Annotated[str | None, typer.Option(help="pruned (from the target) or random.")] = None,
    start_from: Annotated[str | None, typer.Option(help="Directory of a draft to train further instead.")] = None,
    scale_input: Annotated[
        bool | None, typer.Option(help="Scale the embedding to the input of the first copied layer in the target.")
    ] = None,
    activations: Annotated[
        bool | None, typer.Option(help="Attend to the target's activations, or to each layer's own input.")
    ] = None,
    feedback: Annotated[bool | None, typer.Option(help="Feedback memory at drafted positions, or layer input.")] = None,
    self_key: Annotated[bool | None, typer.Option(help="Whether a position attends to itself.")] = None,
    window: Annotated[int | None, typer.Option(help="Window: earlier positions that attention keeps.", min=1)] = None,
    sink: Annotated[int | None, typer.Option(help="Sinks: first positions that attention keeps.", min=0)] = None,
    k: Annotated[int | None, typer.Option(help="Depth to train for: draft passes after each prefix.", min=1)] = None,
    loss: Annotated[
        str | None, typer.Option(help="mixed (the paper's), mixed-log (log α instead of α) or data (hard targets).")
    ] = None,
    omega: Annotated[float | None, typer.Option(help="MixedLoss: share of cross-entropy.", min=0, max=1)] = None,
    omega_final: Annotated[float | None, typer.Option(help="ω at the end. Default: --omega.", min=0, max=1)] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="Tokens that it can propose: the text's most frequent. Default: all, up to 8192.", min=32),
    ] = None,
    freeze_embeddings: Annotated[
        bool | None, typer.Option(help="Leave both embeddings as the target's, and do not store them.")
    ] = None,
    on_policy: Annotated[
        float | None,
        typer.Option(help="Share of the short sequences whose second half the target wrote.", min=0, max=1),
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="muon (with AdamW for the rest) or adamw.")] = None,
) -> None:
    """Train a draft for a frozen target: SPIRe by block rollouts, an ablation of it, or the vanilla baseline."""
    given = _given(locals())
    if copied_layers is not None:
        given["copied_layers"] = tuple(listed(copied_layers, int, "layers like 3,7"))
    from spire.training.draft import recipe_for, train_draft

    directory = target_directory(target)
    recipe = recipe_for(directory, given)
    execution = _execution(device, compiled, minutes, large=recipe.vocabulary is not None)
    done = train_draft(directory, data, valid or [], out, recipe, execution)
    typer.echo(f"wrote {out}; serve it with: spire up --model {target} --draft {out}" if done else _STOPPED)


@app.command("stop-head")
def stop_head(
    data: Data,
    draft: Annotated[Path, typer.Option(help="Draft that gets the head.")],
    target: Annotated[Path, typer.Option(help="Target that the draft guesses for, as for `spire up`.")] = TINY,
    out: Annotated[
        Path | None, typer.Option(help="Where the draft is written with its head. Default: --draft.")
    ] = None,
    valid: Valid = None,
    device: Device = "auto",
    samples: Annotated[int | None, typer.Option(help="Drafted tokens to learn from.", min=1000)] = None,
    k: Annotated[int | None, typer.Option(help="Depth of the blocks that are drafted.", min=1, max=16)] = None,
    depth: Annotated[int | None, typer.Option(help="Residual layers of the head.", min=0, max=64)] = None,
    width: Annotated[int | None, typer.Option(help="Width of the head's layers.", min=1)] = None,
    rejected_weight: Annotated[
        float | None, typer.Option(help="What a rejected token counts in the loss; an accepted one counts 1.", min=0.01)
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try the paper's depths and weights, and keep the best.")
    ] = False,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train the head that tells a frozen draft when to stop (SpecDec++), on the target's own text."""
    given: dict[str, Any] = {
        "samples": samples,
        "k": k,
        "depth": depth,
        "width": width,
        "rejected_weight": rejected_weight,
        "seed": seed,
    }
    from spire.model.placement import choose_device
    from spire.training.stopping.head import StopHeadRecipe, train_stop_head

    recipe = StopHeadRecipe(**{name: value for name, value in given.items() if value is not None})
    recipes = [recipe]
    if sweep:
        recipes = [replace(recipe, depth=d, rejected_weight=w) for d in range(5) for w in (1.0, 3.0, 6.0, 12.0)]
    directory, written = target_directory(target), out or draft
    found = train_stop_head(directory, draft, data, valid or [], written, recipes, choose_device(device).type)
    if as_json:
        return typer.echo(json.dumps([asdict(recipe) | asdict(figures) for recipe, figures in found]))
    table = Table(
        "depth", "w_rej", "AUC", "of entropy", "of q", "log loss", "over entropy (95 %)", box=None, padding=(0, 2, 0, 0)
    )
    for one, figures in found:
        numbers = (figures.auc, figures.auc_of_entropy, figures.auc_of_q, figures.log_loss)
        more, low, high = (f"{gain:+.3f}" for gain in figures.over_entropy)
        shown = (*(f"{number:.3f}" for number in numbers), f"{more} ({low} to {high})")
        table.add_row(str(one.depth), f"{one.rejected_weight:g}", *shown)
    Console().print(table)
    typer.echo(f"wrote {written}, with the head of least log loss")


_STOPPED = "the time is up, nothing is lost: the same command goes on"
_NOT_RECIPE = {"data", "out", "valid", "device", "compiled", "minutes", "target"}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the recipe that were set on the command line."""
    return {name: value for name, value in options.items() if name not in _NOT_RECIPE and value is not None}


def _execution(device: str, compiled: bool | None, minutes: float | None, large: bool = False) -> Execution:
    """Return the settings of a run. For a `large` vocabulary on a CPU, compiling takes longer than it saves."""
    from spire.model.placement import choose_device
    from spire.training.run import Execution

    if device not in ("auto", "cpu", "cuda"):
        raise SpireError(f"--device {device!r}: it is auto, cpu or cuda")
    placed = choose_device(device).type
    return Execution(placed, (placed != "cpu" or not large) if compiled is None else compiled, minutes)
