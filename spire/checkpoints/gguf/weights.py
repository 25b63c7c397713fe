"""Write a GGUF file's tensors to safetensors under Hugging Face's names, dequantised in chunks of rows.

llama.cpp rotates neighbouring pairs of a head, Hugging Face rotates its two halves: query and key rows are permuted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from spire.checkpoints.gguf.file import GgufFile
from spire.checkpoints.weights import write_tensors
from spire.files import write_whole
from spire.model.config import ModelConfig
from spire.model.layers import pairs_to_halves
from spire.model.target import Target

if TYPE_CHECKING:
    from gguf import ReaderTensor

_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The RoPE factors are already in the config.
_NOT_WEIGHTS = {"rope_freqs.weight"}
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_AT_ONCE = 1 << 24  # elements that are dequantised at a time
_SHARD = 2 << 30  # bytes of one safetensors file, which is held in memory as a whole


class Weight(NamedTuple):
    """One parameter of the target. `source` is its name in the GGUF file, or None for a bias of zeros."""

    name: str
    source: str | None
    shape: tuple[int, ...]


def plan(file: GgufFile, config: ModelConfig) -> list[Weight]:
    """Return the source of every parameter. Raises CheckpointError for missing, unknown or misshapen tensors."""
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in Target(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    weights = [Weight(name, _source(file, name), shape) for name, shape in wanted.items()]
    known = {weight.source for weight in weights} | _NOT_WEIGHTS
    if unknown := sorted(file.tensors.keys() - known):
        raise file.error(f"{len(unknown)} tensors are not Llama's, the first is {unknown[0]!r}")
    for weight in weights:
        _check(file, weight)
    return weights


def write_weights(file: GgufFile, weights: list[Weight], config: ModelConfig, out: Path, dtype: torch.dtype) -> None:
    """Write `model.safetensors`, or 2 GiB shards and their index. One shard is in memory at a time."""
    shards = list(_shards(weights, dtype))
    names = [_file_name(number, len(shards)) for number in range(len(shards))]
    progress = iter(track(range(len(weights)), description="dequantising", console=Console(stderr=True)))
    for name, shard in zip(names, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for weight in shard:
            next(progress)
            tensors[_stored_name(weight)] = _tensor(file, weight, config, dtype)
        write_tensors(out / name, tensors)
    next(progress, None)
    if len(shards) > 1:
        places = {_stored_name(weight): name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(math.prod(weight.shape) for weight in weights) * dtype.itemsize
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
        write_whole(out / "model.safetensors.index.json", lambda unfinished: unfinished.write_text(index))


def _source(file: GgufFile, name: str) -> str | None:
    source = _TOP.get(name)
    if source is None:
        layer, part = name.removeprefix("layers.").split(".", 1)
        part, _, kind = part.rpartition(".")
        source = f"blk.{layer}.{_LAYER[part]}.{kind}"
    # In Hugging Face's layout all projections of a layer have biases or none; in GGUF single ones may be absent.
    return None if name.endswith(".bias") and source not in file.tensors else source


def _check(file: GgufFile, weight: Weight) -> None:
    from gguf import dequantize

    if weight.source is None:
        return
    if weight.source not in file.tensors:
        raise file.error(f"tensor {weight.source} is missing: the file is incomplete")
    tensor = file.tensors[weight.source]
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if shape != weight.shape:
        raise file.error(f"tensor {weight.source} has shape {list(shape)}, its metadata asks for {list(weight.shape)}")
    try:
        dequantize(_rows(tensor, weight, 0, 1), tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise file.error(f"tensor {weight.source} is of type {kind}, which cannot be dequantised here") from error


def _shards(weights: list[Weight], dtype: torch.dtype) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    held = 0
    for weight in weights:
        size = math.prod(weight.shape) * dtype.itemsize
        if shard and held + size > _SHARD:
            yield shard
            shard, held = [], 0
        shard.append(weight)
        held += size
    yield shard


def _file_name(number: int, of: int) -> str:
    return "model.safetensors" if of == 1 else f"model-{number + 1:05}-of-{of:05}.safetensors"


def _stored_name(weight: Weight) -> str:
    return weight.name if weight.name.startswith("lm_head.") else f"model.{weight.name}"


def _tensor(file: GgufFile, weight: Weight, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    from gguf import dequantize

    values = torch.zeros(weight.shape, dtype=dtype)
    if weight.source is None:
        return values
    tensor = file.tensors[weight.source]
    values_ED = values.view(-1, weight.shape[-1])
    rows = max(1, _AT_ONCE // weight.shape[-1])
    for start in range(0, len(values_ED), rows):
        raw = _rows(tensor, weight, start, start + rows)
        values_ED[start : start + rows] = torch.from_numpy(dequantize(raw, tensor.tensor_type))
    return pairs_to_halves(values, config.head_dim) if weight.name.endswith(_ROTATED) else values


def _rows(tensor: ReaderTensor, weight: Weight, start: int, stop: int) -> np.ndarray:
    """Return a copy of stored (quantised) rows. A norm is one row."""
    return np.array(tensor.data.reshape(math.prod(weight.shape[:-1]), -1)[start:stop])
