"""The keys of a `config.json` that count, for each `model_type` that can be served. Pure data: one entry per family.

A known key is in one of three sets. `read`: shapes the model. `harmless`: does not change inference. `neutral`: would
change inference and is not supported, so that only values that leave the model unchanged are accepted, or lists of
them. Other keys are unknown: they are ignored, and the operator is told their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """The keys of one `model_type`. `ropes` maps each supported rope type to the keys that it requires."""

    architectures: tuple[str, ...]
    read: frozenset[str]
    harmless: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]
    ropes: Mapping[str, tuple[str, ...]]


def is_neutral(value: Any, taken: tuple[Any, ...]) -> bool:
    """True if a value, or every value of a list, is among the `taken` ones, which leave the model unchanged."""
    return all(is_neutral(one, taken) for one in value) if isinstance(value, list) else value in taken


# Keys of transformers' base class about the file itself, training, and outputs that are not used.
_HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_from_model_config",
        "_name_or_path",
        "attention_dropout",
        "attn_implementation",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    }
)
# Keys of generation, which older files hold instead of generation_config.json.
_GENERATION = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
_OFF = (None, False)
# Keys of other decoders, and of decoders derived from Llama.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": _OFF,
    "alibi": _OFF,
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "auto_map": (None, {}),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "cross_attention_layers": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": _OFF,
    "layer_types": (None, "full_attention"),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "moe_intermediate_size": (None,),
    "no_rope_layer_interval": (None,),
    "no_rope_layers": (None, 1),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "parallel_attn": _OFF,
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "qk_layernorm": _OFF,
    "qk_norm": _OFF,
    "quantization": (None,),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "rotary_pct": (None, 1),
    "sliding_window": (None,),
    "tie_last_hidden_states": (None, True),
    "use_qk_norm": _OFF,
    "use_sliding_window": _OFF,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architectures=("LlamaForCausalLM",),
        read=frozenset(
            {
                "architectures",
                "attention_bias",
                "bos_token_id",
                "dtype",
                "eos_token_id",
                "head_dim",
                "hidden_size",
                "intermediate_size",
                "max_position_embeddings",
                "mlp_bias",
                "model_type",
                "num_attention_heads",
                "num_hidden_layers",
                "num_key_value_heads",
                "rms_norm_eps",
                "rope_parameters",
                "rope_scaling",
                "rope_theta",
                "spire_draft",
                "spire_random_weights",
                "tie_word_embeddings",
                "torch_dtype",
                "vocab_size",
            }
        ),
        # pretraining_tp splits products for tensor parallelism, which does not change their results.
        harmless=_HARMLESS | _GENERATION | {"pretraining_tp"},
        neutral=_NEUTRAL,
        ropes={
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        },
    )
}
# Neutral and harmless keys of a rope section of any type.
NEUTRAL_ROPE: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None, 1),
    "factor": (None, 1),
    "partial_rotary_factor": (None, 1),
}
HARMLESS_ROPE = frozenset({"original_max_position_embeddings"})
