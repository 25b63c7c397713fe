"""The time of the target's attention beside the two matrix products that it needs in any case.

    python experiments/attention.py --model models/target --batch 16 --context 1900

In the dtype that services choose here, or another. Both read the same number of keys and values, all layers of them, so
that no cache holds them: the service's attention through its paged cache (storing the new positions, mask and softmax
included), and the bare products over contiguous keys and values. They alternate, so that a noisy machine is noisy to
both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import spire.service.process  # noqa: F401  # isort: skip  # before torch: the OpenMP settings of the services

import torch
import typer
from rich.console import Console
from rich.table import Table

from spire.model.cache.placed import cache_for
from spire.model.config import load_model_config
from spire.model.placement import choose_dtype

ROOT = Path(__file__).resolve().parents[1]


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint whose shape is used.")] = ROOT / "models" / "target",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    context: Annotated[int, typer.Option(min=1)] = 1900,
    queries: Annotated[str, typer.Option(help="New positions per sequence; several with commas.")] = "1,5",
    repeats: Annotated[int, typer.Option(min=3)] = 15,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare them."""
    chosen = choose_dtype(dtype, torch.device("cpu"))
    cells = [measure(model, batch, context, int(count), repeats, chosen) for count in queries.split(",")]
    if as_json:
        print(json.dumps({"dtype": str(chosen), "attention": cells}))
        return
    table = Table("queries", "attention ms", "bare products ms", "ratio", title=f"{batch} sequences of {context}")
    for cell in cells:
        numbers = (cell["attention_ms"], cell["products_ms"], cell["ratio"])
        table.add_row(str(cell["queries"]), *(f"{number:.2f}" for number in numbers))
    Console().print(table)


@torch.inference_mode()
def measure(model: Path, batch: int, context: int, queries: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Medians over alternating runs, milliseconds for all layers."""
    config = load_model_config(model)
    G, H, K, layers = config.num_key_value_heads, config.num_attention_heads, config.head_dim, config.num_hidden_layers
    cache = cache_for(config, batch, context + queries, dtype, "cpu")
    slots = [cache.allocate() for _ in range(batch)]
    for keys_RK, values_RK in cache.pools:  # untouched zeros would all be one page of memory
        keys_RK.normal_()
        values_RK.normal_()
    assert cache.reserve(slots, context + queries)
    cache.commit(slots, [context] * batch)
    query, new = (torch.randn(batch, heads, queries, K, dtype=dtype) for heads in (H, G))
    columns = context + queries
    pairs = [[torch.randn(batch, G, columns, K, dtype=dtype) for _ in range(2)] for _ in range(layers)]
    grouped, weights = query.reshape(batch, G, H // G * queries, K), torch.rand(batch, G, H // G * queries, columns)
    weights = weights.to(dtype)

    def attention() -> None:
        view = cache.view(slots, queries, decoding=True)
        for layer in range(layers):
            view.attend(layer, query, new, new)

    def products() -> None:
        for keys, values in pairs:
            grouped @ keys.transpose(-1, -2)
            weights @ values

    both = [(_seconds(attention), _seconds(products)) for _ in range(repeats)]
    mine, bare = (1000 * statistics.median(times) for times in zip(*both, strict=True))
    return {"queries": queries, "attention_ms": mine, "products_ms": bare, "ratio": mine / bare}


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
