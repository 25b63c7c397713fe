"""`spire convert`: convert checkpoints of other formats to directories for `spire up --model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from spire.model.config import ModelConfig

app = typer.Typer(help="Convert a checkpoint of another format.", no_args_is_help=True)
_Out = Annotated[Path, typer.Option(help="Directory to write.")]


@app.command("gguf")
def gguf(
    file: Annotated[Path, typer.Argument(help="A Llama or Mistral as one .gguf file, quantised or not.")],
    out: _Out,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Type of the dequantised weights.")
    ] = "bfloat16",
) -> None:
    """Convert a GGUF file: weights dequantised; tokenizer, chat template, end tokens and context length kept."""
    import torch

    from spire.checkpoints.gguf.convert import convert_gguf

    _report(out, convert_gguf(file, out, getattr(torch, dtype)))


@app.command("llama2c")
def llama2c(
    weights: Annotated[Path, typer.Argument(help="Weights in llama2.c's binary format (.bin).")],
    tokenizer: Annotated[Path, typer.Option(help="Its vocabulary: SentencePiece .model, or llama2.c .bin.")],
    out: _Out,
) -> None:
    """Convert a llama2.c model, in float32, with its tokenizer."""
    from spire.checkpoints.convert import convert_llama2c

    _report(out, convert_llama2c(weights, tokenizer, out))


def _report(out: Path, config: ModelConfig) -> None:
    typer.echo(
        f"{out}: {config.num_hidden_layers} layers of width {config.hidden_size}, vocabulary {config.vocab_size}, "
        f"context {config.longest}"
    )
    typer.echo(f"serve it with: spire up --model {out}")
