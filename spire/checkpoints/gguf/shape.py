"""Build a ModelConfig from the metadata keys of a GGUF file. An unknown key is refused with an error that names it."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from spire.checkpoints.gguf.file import ARCHITECTURE, GgufFile
from spire.model.config import ModelConfig, RopeConfig, in_words

# Ignored keys: the embedding determines the vocabulary size, and the other keys concern training only.
_IDLE = {"vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
# Keys that are accepted with only this value, which leaves the model unchanged.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
}
_ROPE_FACTORS = "rope_freqs.weight"


def model_config(file: GgufFile) -> ModelConfig:
    """Return the model config, without start and end tokens. Raises CheckpointError for unsupported metadata."""
    try:
        config = _shape(file)
    except ValidationError as error:
        raise file.error(in_words(error)) from error
    for key in file.fields:
        kind, _, name = key.partition(".")
        if kind != ARCHITECTURE or name in _IDLE or key in file.read:
            continue
        value = file.value(key)
        if name not in _NEUTRAL:
            raise file.error(f"{key} is {value!r}, which is not understood: what it changes would be lost")
        if value != _NEUTRAL[name]:
            raise file.error(f"{key} is {value!r}; only {_NEUTRAL[name]!r} is served")
    return config


def _shape(file: GgufFile) -> ModelConfig:
    width, heads, context = (_key(file, key) for key in ("embedding_length", "attention.head_count", "context_length"))
    head_dim = _key(file, "attention.key_length", width // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := _key(file, name, head_dim)) != head_dim:
            raise file.error(f"{ARCHITECTURE}.{name} is {found}; only {head_dim}, a head's width, is served")
    attention_bias, mlp_bias = (
        any(f".{part}_" in name and name.endswith(".bias") for name in file.tensors) for part in ("attn", "ffn")
    )
    # GGUF counts Mistral, which has a sliding window and no biases, among its Llamas.
    window = _key(file, "attention.sliding_window", 0)
    slides = 0 < window < context
    if slides and (attention_bias or mlp_bias):
        raise file.error(f"attention sees {window} of {context} positions: with biases, sliding windows are not served")
    layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if (claimed := _key(file, "block_count")) != layers:
        raise file.error(f"{ARCHITECTURE}.block_count is {claimed}, and the file holds {layers} layers")
    if "token_embd.weight" not in file.tensors:
        raise file.error("tensor token_embd.weight is missing: the file is incomplete")
    return ModelConfig(
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=width,
        intermediate_size=_key(file, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_key(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_number(file, "attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        model_type="mistral" if slides else "llama",
        sliding_window=window if slides else None,
        rope=_rope(file, head_dim),
    )


def _rope(file: GgufFile, head_dim: int) -> RopeConfig:
    theta = _number(file, "rope.freq_base", 10000.0)
    kind = file.text(f"{ARCHITECTURE}.rope.scaling.type", "linear")
    factor = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise file.error(f"{ARCHITECTURE}.rope.scaling.type is {kind!r}; only 'linear' is read")
    linear = kind == "linear" and factor != 1.0
    if _ROPE_FACTORS not in file.tensors:
        return RopeConfig(rope_type="linear" if linear else "default", rope_theta=theta, factor=factor)
    if linear:
        raise file.error(f"{_ROPE_FACTORS} and {ARCHITECTURE}.rope.scaling.factor together are not served")
    return _llama3(file, theta, head_dim)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Return the Llama 3 RoPE parameters that reproduce the file's frequency factors, one per pair of a head.

    Factors are 1 for high frequencies and maximal for low frequencies; in between, the inverse factor is linear in the
    number of rotations over the original context. Raises CheckpointError if no parameters reproduce the factors.
    """
    factors = [float(value) for value in file.tensors[_ROPE_FACTORS].data.reshape(-1)]
    largest = max(factors, default=0.0)
    low, high = 1.0, 4.0  # Llama 3's own
    frequencies = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    contexts = [
        2 * math.pi / frequency * (low + (high - low) * (1 / factor - 1 / largest) / (1 - 1 / largest))
        for frequency, factor in zip(frequencies, factors, strict=False)
        if 1.0 < factor < largest
    ]
    original = round(sum(contexts) / len(contexts)) if contexts else 0
    shares = [min(max((original * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0) for f in frequencies]
    given = [1 / (share + (1 - share) / largest) for share in shares] if contexts else []
    if len(given) != len(factors) or any(abs(a - b) > 1e-5 * b for a, b in zip(given, factors, strict=True)):
        raise file.error(f"{_ROPE_FACTORS} is not Llama 3's stretching, the only one with factors that is served")
    return RopeConfig(
        rope_type="llama3",
        rope_theta=theta,
        factor=largest,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _key(file: GgufFile, name: str, *default: int) -> int:
    return file.whole(f"{ARCHITECTURE}.{name}", *default)


def _number(file: GgufFile, name: str, *default: float) -> float:
    return file.number(f"{ARCHITECTURE}.{name}", *default)
