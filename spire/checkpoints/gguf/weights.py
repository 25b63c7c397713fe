"""Write a GGUF file's tensors to safetensors under Hugging Face's names, dequantised in chunks of rows.

llama.cpp rotates neighbouring pairs of a head, Hugging Face rotates its two halves: query and key rows are permuted.
"""

from __future__ import annotations

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
from spire.checkpoints.weights import stored_name, write_tensors
from spire.files import write_json
from spire.model.config import ModelConfig
from spire.model.layers import pairs_to_halves
from spire.model.target import Target

if TYPE_CHECKING:
    from gguf import ReaderTensor

_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_AT_ONCE = 1 << 24  # elements that are dequantised at a time
_SHARD = 2 << 30  # bytes of one safetensors file, which is in memory as a whole


class Weight(NamedTuple):
    """One parameter under Hugging Face's name. `source` is its name in the GGUF file, or None for a bias of zeros."""

    name: str
    source: str | None
    shape: tuple[int, ...]


def plan(file: GgufFile, config: ModelConfig) -> list[Weight]:
    """Map each parameter to its tensor in the file. Raises CheckpointError for missing, unknown or invalid tensors."""
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in Target(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    sources = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = []
    for name, shape in wanted.items():
        source = sources.get_name(stored_name(name), try_suffixes=(".weight", ".bias"))
        # In Hugging Face's layout all projections of a layer have biases or none; in GGUF single ones may be absent.
        absent = name.endswith(".bias") and source not in file.tensors
        weights.append(Weight(stored_name(name), None if absent else source, shape))
    known = {weight.source for weight in weights} | {"rope_freqs.weight"}  # its factors are in the config
    if unknown := sorted(file.tensors.keys() - known):
        raise file.error(f"{len(unknown)} tensors are not Llama's, the first is {unknown[0]!r}")
    for weight in weights:
        if weight.source is None:
            continue
        if weight.source not in file.tensors:
            raise file.error(f"tensor {weight.source} is missing: the file is incomplete")
        tensor, asked = file.tensors[weight.source], list(weight.shape)
        if (found := [int(size) for size in reversed(tensor.shape)]) != asked:
            raise file.error(f"tensor {weight.source} has shape {found}, its metadata asks for {asked}")
        try:
            dequantize(_rows(tensor, weight, 0, 1), tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise file.error(f"tensor {weight.source} is of type {kind}, which cannot be dequantised here") from error
    return weights


def write_weights(file: GgufFile, weights: list[Weight], config: ModelConfig, out: Path, dtype: torch.dtype) -> None:
    """Write `model.safetensors`, or 2 GiB shards and an index. Only one shard is in memory at a time."""
    shards = list(_shards(weights, dtype))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    progress = iter(track(range(len(weights)), description="dequantising", console=Console(stderr=True)))
    for name, shard in zip(names, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for weight in shard:
            next(progress)
            tensors[weight.name] = _tensor(file, weight, config, dtype)
        write_tensors(out / name, tensors)
    next(progress, None)
    if len(shards) > 1:
        places = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(math.prod(weight.shape) for weight in weights) * dtype.itemsize
        write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


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
    """Return a copy of a tensor's stored, perhaps quantised rows `start` to `stop` - 1. A norm is one row."""
    return np.array(tensor.data.reshape(math.prod(weight.shape[:-1]), -1)[start:stop])
