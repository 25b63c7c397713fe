"""Options shared by several commands, and parsers of comma-separated lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Url = Annotated[str | None, typer.Option(help="A gateway that runs already. Default: services are started.")]
ServedModel = Annotated[
    Path | None,
    typer.Option(
        help="Target: a directory in Hugging Face layout, a .gguf file, a name of the Hugging Face hub (ORG/NAME), "
        "smollm2 (SmolLM2-135M-Instruct, downloaded once) or tiny (the bundled toy).",
        envvar="SPIRE_MODEL",
    ),
]
ServedDraft = Annotated[
    str | None,
    typer.Option(
        help="Draft directory, 'magicdec' (the target drafts for itself) or 'off' (plain decoding).",
        envvar="SPIRE_DRAFT",
    ),
]
Model = Annotated[Path | None, typer.Option(help="Target, as for `spire up`. Default: tiny.")]
Draft = Annotated[str | None, typer.Option(help="Directory, magicdec or off. Default: the one of tiny or smollm2.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="Text to cut prompts from, as docs/data.md lists it; repeatable. Default: bundled."),
]
Chats = Annotated[
    list[Path] | None,
    typer.Option(
        help="Chats (.jsonl, as spire write makes them) instead of text: at most --context tokens of earlier exchanges "
        "and a message to answer. Left out: answers shorter than --generate, and such that repeat themselves."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Use only this many layers of the shape.", min=2)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of the places where prompts are cut.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

Value = TypeVar("Value", int, float)


def listed(text: str, kind: Callable[[str], Value], example: str) -> list[Value]:
    """Parse a comma-separated list of values of type `kind`. Raises BadParameter, whose message shows `example`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of {example}") from error


def numbers(text: str, least: int = 1) -> list[int]:
    """Parse a comma-separated list of integers. Raises BadParameter if a number is below `least`."""
    found = listed(text, int, "whole numbers like 1,4,16")
    if min(found) < least:
        raise typer.BadParameter(f"{text!r} has a number below {least}")
    return found
