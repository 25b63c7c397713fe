"""`spire convert llama2c`: convert a checkpoint in llama2.c's binary format to a directory in Hugging Face layout.

    spire convert llama2c stories260K.bin --tokenizer tok512.model --out stories260K

A .bin file: seven int32 (width, SwiGLU width, layers, heads, key/value heads, vocabulary, longest sequence; a negative
vocabulary size means that the classifier has its own weights), then float32 weights, kind by kind, all layers of each.
llama2.c rotates neighbouring pairs of a head, Hugging Face rotates its two halves, so rows of wq and wk are permuted.

Does not know: llama2.c's later versioned and quantised exports, which begin with the magic "ak42" and are refused.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spire.checkpoints.sentencepiece import END, START, read_vocabulary, to_tokenizer
from spire.checkpoints.weights import save_target
from spire.errors import CheckpointError
from spire.model.config import ModelConfig
from spire.model.directory import refuse_stand_in
from spire.model.layers import pairs_to_halves
from spire.model.target import Target

_HEADER = struct.Struct("<7i")
_VERSIONED_MAGIC = 0x616B3432


class Llama2cHeader(NamedTuple):
    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_seq_len: int


def convert_llama2c(weights: Path, tokenizer: Path, out: Path) -> ModelConfig:
    """Convert a llama2.c model: write `config.json`, `model.safetensors` (float32) and `tokenizer.json` into `out`.

    Raises CheckpointError naming a file that is missing, truncated, in another format, or not made for the other file.
    """
    vocabulary = read_vocabulary(tokenizer)
    header, values = _read(weights)
    config = ModelConfig(
        vocab_size=abs(header.vocab_size),
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.kv_heads,
        head_dim=header.dim // header.heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=header.max_seq_len,
        tie_word_embeddings=header.vocab_size >= 0,
        bos_token_id=START,
        eos_token_ids=(START, END),  # in llama2.c's training data `<s>` separates texts
    )
    if len(vocabulary.pieces) != config.vocab_size:
        raise CheckpointError(
            f"{tokenizer} holds {len(vocabulary.pieces)} pieces, {weights} was trained with {config.vocab_size}"
        )
    target = Target(config)
    target.load_state_dict(_parameters(header, values))
    save_target(out, target, torch.float32)
    to_tokenizer(vocabulary).save(str(out / "tokenizer.json"))
    return config


def _read(weights: Path) -> tuple[Llama2cHeader, Tensor]:
    if not weights.is_file():
        raise CheckpointError(f"{weights} does not exist: convert llama2c takes a .bin file of llama2.c")
    refuse_stand_in(weights)
    raw = weights.read_bytes()
    if len(raw) < _HEADER.size:
        raise CheckpointError(f"{weights} has {len(raw)} bytes, shorter than a llama2.c header")
    header = Llama2cHeader(*_HEADER.unpack_from(raw))
    if header.dim == _VERSIONED_MAGIC:
        raise CheckpointError(f"{weights} is a versioned llama2.c export: only the first format (version 0) is read")
    if min(header.dim, header.hidden_dim, header.layers, header.heads, header.kv_heads, header.max_seq_len) < 1:
        raise CheckpointError(f"{weights} is not in llama2.c's format: its header reads {header}")
    expected = _HEADER.size + 4 * sum(math.prod(shape) for shape in _shapes(header).values())
    if len(raw) != expected:
        raise CheckpointError(
            f"{weights} has {len(raw)} bytes, its header asks for {expected}: truncated or another format"
        )
    return header, torch.frombuffer(bytearray(raw[_HEADER.size :]), dtype=torch.float32)


def _shapes(header: Llama2cHeader) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors after the header, in file order, by parameter name; * stands for each layer."""
    dim, hidden, layers, heads, kv_heads, vocab_size, length = header
    head_dim = dim // heads
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (abs(vocab_size), dim),
        "layers.*.input_layernorm.weight": (layers, dim),
        "layers.*.self_attn.q_proj.weight": (layers, dim, dim),
        "layers.*.self_attn.k_proj.weight": (layers, kv_heads * head_dim, dim),
        "layers.*.self_attn.v_proj.weight": (layers, kv_heads * head_dim, dim),
        "layers.*.self_attn.o_proj.weight": (layers, dim, dim),
        "layers.*.post_attention_layernorm.weight": (layers, dim),
        "layers.*.mlp.gate_proj.weight": (layers, hidden, dim),
        "layers.*.mlp.down_proj.weight": (layers, dim, hidden),
        "layers.*.mlp.up_proj.weight": (layers, hidden, dim),
        "norm.weight": (dim,),
        "rotation": (2, length, head_dim // 2),  # cosines and sines, unused
    }
    if vocab_size < 0:
        shapes["lm_head.weight"] = (abs(vocab_size), dim)
    return shapes


def _parameters(header: Llama2cHeader, values: Tensor) -> dict[str, Tensor]:
    """Split the values of a llama2.c file into weights, by the target's parameter names."""
    parameters: dict[str, Tensor] = {}
    for name, shape in _shapes(header).items():
        size = math.prod(shape)
        found, values = values[:size].view(shape), values[size:]
        for layer, weight in enumerate(found.unbind() if "*" in name else (found,)):
            paired = name.endswith(("q_proj.weight", "k_proj.weight"))
            weight = pairs_to_halves(weight, header.dim // header.heads) if paired else weight
            parameters[name.replace("*", str(layer))] = weight
    del parameters["rotation"]
    return {"lm_head.weight": parameters["embed_tokens.weight"]} | parameters
