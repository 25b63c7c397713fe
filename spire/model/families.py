"""The model families that can be served, by `model_type`: their known keys of `config.json` and their layers' options.

A known key is in one of three sets. `read`: determines the model. `harmless`: does not change inference. `neutral`:
would change inference and is not supported, so that only values that leave the model unchanged are accepted, or lists
of such values. Other keys are unknown: they are ignored, and their names are reported to the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
    """One `model_type`: its known `config.json` keys, and how its layer differs from Llama's.

    `ropes` maps each supported rope type to its required keys. `defaults` holds values of read keys that `config.json`
    may leave out. `qkv_bias`: the projections to queries, keys and values have biases, the output projection has none.
    `qk_norm`: the queries and the keys of each head pass an RMSNorm before they are rotated.
    """

    architectures: tuple[str, ...]
    read: frozenset[str]
    harmless: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]
    ropes: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, Any]
    qkv_bias: bool
    qk_norm: bool


def is_neutral(value: Any, taken: tuple[Any, ...]) -> bool:
    """True if `value`, or every element of a list, is in `taken`, the values that leave the model unchanged."""
    return all(is_neutral(one, taken) for one in value) if isinstance(value, list) else value in taken


# Keys that determine a model of any family.
_READ = frozenset[str]().union(
    ["architectures", "dtype", "model_type", "spire_draft", "spire_random_weights", "torch_dtype"],
    ["hidden_size", "intermediate_size", "max_position_embeddings", "num_hidden_layers", "rms_norm_eps"],
    ["head_dim", "num_attention_heads", "num_key_value_heads"],
    ["bos_token_id", "eos_token_id", "tie_word_embeddings", "vocab_size"],
    ["rope_parameters", "rope_scaling", "rope_theta"],
)
# Keys of transformers' base class about the file itself, training, and outputs that are not used.
_HARMLESS = frozenset[str]().union(
    ["_commit_hash", "_from_model_config", "_name_or_path", "transformers_version", "unsloth_fixed", "unsloth_version"],
    ["_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "chunk_size_feed_forward"],
    ["attention_dropout", "gradient_checkpointing", "hidden_dropout", "initializer_range", "torchscript"],
    ["finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params"],
    ["keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict"],
    ["decoder_start_token_id", "pad_token_id", "prefix", "sep_token_id", "tokenizer_class", "unk_token_id"],
    ["is_decoder", "use_cache"],
)
# Keys of generation, which older files hold instead of generation_config.json.
_GENERATION = frozenset[str]().union(
    ["do_sample", "repetition_penalty", "temperature", "top_k", "top_p", "typical_p"],
    ["exponential_decay_length_penalty", "length_penalty", "max_length", "max_sequence_length", "min_length"],
    ["diversity_penalty", "early_stopping", "num_beam_groups", "num_beams", "num_return_sequences"],
    ["bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"],
    ["encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "remove_invalid_values"],
    ["output_scores", "return_dict_in_generate"],
)
_QK_NORMS = ("qk_layernorm", "qk_norm", "use_qk_norm")
# Keys of other decoders, and of decoders derived from Llama, with the values that leave the model unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["add_cross_attention", "is_encoder_decoder", "use_sliding_window"], (None, False)),
    **dict.fromkeys(["alibi", "attention_bias", "mlp_bias", "parallel_attn", *_QK_NORMS], (None, False)),
    **dict.fromkeys(["rope_interleave", "rope_interleaved", "use_mrope"], (None, False)),
    **dict.fromkeys(["no_rope_layers", "partial_rotary_factor", "rotary_pct"], (None, 1)),
    **dict.fromkeys(["embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"], (None, 1)),
    **dict.fromkeys(["attention_multiplier", "clip_qkv", "query_pre_attn_scalar", "sliding_window"], (None,)),
    **dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping", "no_rope_layer_interval"], (None,)),
    **dict.fromkeys(["cross_attention_hidden_size", "cross_attention_layers", "moe_intermediate_size"], (None,)),
    **dict.fromkeys(["compression_config", "quantization", "quantization_config"], (None,)),
    **dict.fromkeys(["auto_map", "per_layer_config", "pruned_heads"], (None, {})),
    **dict.fromkeys(["num_experts", "num_local_experts"], (None, 0, 1)),
    "hidden_act": ("silu", "swish"),
    "layer_types": (None, "full_attention"),
    "tie_last_hidden_states": (None, True),
}

_ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Neutral and harmless keys of a rope section of any type.
NEUTRAL_ROPE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ["attention_factor", "factor", "partial_rotary_factor"], (None, 1)
)
HARMLESS_ROPE = frozenset({"original_max_position_embeddings"})


def _family(
    architecture: str,
    read: Iterable[str] = (),
    harmless: Iterable[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] = {},
    defaults: Mapping[str, Any] = {},
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> Family:
    """Build a family from what it has beyond the keys of all families."""
    known, ignored = _READ.union(read), (_HARMLESS | _GENERATION).union(harmless)
    others = {key: values for key, values in {**_NEUTRAL, **neutral}.items() if key not in known | ignored}
    return Family((architecture,), known, ignored, others, _ROPES, defaults, qkv_bias, qk_norm)


_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}

FAMILIES: dict[str, Family] = {
    # pretraining_tp splits products for tensor parallelism, which does not change their results.
    "llama": _family("LlamaForCausalLM", read=["attention_bias", "mlp_bias"], harmless=["pretraining_tp"]),
    "mistral": _family(
        "MistralForCausalLM",
        read=["sliding_window"],
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    # The window and its layers count only with use_sliding_window, which is not supported. Qwen2's code has biases
    # whatever attention_bias says.
    "qwen2": _family(
        "Qwen2ForCausalLM",
        harmless=["attention_bias", "max_window_layers", "sliding_window"],
        defaults=_QWEN_DEFAULTS,
        qkv_bias=True,
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM",
        read=["attention_bias"],
        harmless=["max_window_layers", "sliding_window"],
        neutral=dict.fromkeys(_QK_NORMS, (None, True)),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        qk_norm=True,
    ),
}
