"""GGUF files of small models, written by the gguf library the way llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from spire.model.config import ModelConfig
from tests.conftest import FIXTURES

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def shape_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "A model of a test",
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope.rope_theta,
        "llama.vocab_size": config.vocab_size,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """The vocabulary of stories260K, as llama.cpp's converter reads it out of a SentencePiece model."""
    processor = SentencePieceProcessor(model_file=str(FIXTURES / "stories260K" / "tok512.model"))
    ids = range(processor.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(number) for number in ids],
        "tokenizer.ggml.scores": [processor.get_score(number) for number in ids],
        "tokenizer.ggml.token_type": [_kind(processor, number) for number in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def byte_level_metadata(vocabulary: dict[str, int], merges: list[tuple[str, str]], pre: str | None) -> dict[str, Any]:
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * len(pieces),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write `metadata` without the keys whose value is None, and `tensors`, matrices as `kind` where that fits them."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        stored = stored_kind(values, kind)
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_kind(values: np.ndarray, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Vectors stay float32; rows that no whole blocks fill become float16."""
    if values.ndim < 2:
        return GGMLQuantizationType.F32
    whole_rows = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
    return kind if kind in whole_rows or values.shape[-1] % 32 == 0 else GGMLQuantizationType.F16


def as_stored(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """What is left of `values` in a file of that kind, float32."""
    stored = stored_kind(values, kind)
    return dequantize(quantize(values, stored), stored)


def gguf_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, np.ndarray]:
    """Hugging Face's tensors under llama.cpp's names, queries and keys in its order."""
    return {
        gguf_name(name): llama_cpp_order(name, tensor.float().numpy(), config.head_dim)
        for name, tensor in tensors.items()
    }


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def llama_cpp_order(name: str, values: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp keeps the two halves of each head of queries and keys interleaved."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))


def _kind(processor: SentencePieceProcessor, number: int) -> int:
    if processor.is_unknown(number):
        return int(TokenType.UNKNOWN)
    if processor.is_control(number):
        return int(TokenType.CONTROL)
    if processor.is_byte(number):
        return int(TokenType.BYTE)
    return int(TokenType.UNUSED if processor.is_unused(number) else TokenType.NORMAL)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
