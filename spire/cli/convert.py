"""`spire convert`: checkpoints of other formats as directories that `spire up --model` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Convert a checkpoint of another format.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Keeps `llama2c` a command of its own while it is the only format."""


@app.command("llama2c")
def llama2c(
    weights: Annotated[Path, typer.Argument(help="Weights in llama2.c's binary format (.bin).")],
    tokenizer: Annotated[Path, typer.Option(help="Its vocabulary: SentencePiece .model, or llama2.c .bin.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
) -> None:
    """Convert a llama2.c model, in float32, with its tokenizer."""
    from spire.model.convert import convert_llama2c

    config = convert_llama2c(weights, tokenizer, out)
    typer.echo(
        f"{out}: {config.num_hidden_layers} layers of width {config.hidden_size}, vocabulary {config.vocab_size}, "
        f"context {config.max_position_embeddings}"
    )
    typer.echo(f"serve it with: spire up --model {out}")
