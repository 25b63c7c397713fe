"""What a checkpoint's `config.json` says, as frozen values. No torch here: the gateway and the CLI read it too.

A target is any Llama-architecture directory in Hugging Face layout. A draft is a directory of the same kind whose
`config.json` carries a `spire_draft` section. Unknown keys are ignored, unsupported values are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from spire.errors import CheckpointError

# The target drafts for itself: no draft directory, no training. What a verifier is as a draft: its kind, and the id
# that Start names; no activations are published to it.
MAGICDEC = "magicdec"

_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class RopeConfig(BaseModel):
    """Rotary embedding parameters: base frequency and, for `llama3` and `linear`, how it is stretched."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ModelConfig(BaseModel):
    """Shape of a Llama-architecture model, under Hugging Face's names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = RopeConfig()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"

    @model_validator(mode="before")
    @classmethod
    def _from_hugging_face(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        values = dict(raw)
        heads = values.get("num_attention_heads")
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        if values.get("head_dim") is None and heads:
            values["head_dim"] = values.get("hidden_size", 0) // heads
        if "rope" not in values:
            values["rope"] = _rope_section(values)
        if "eos_token_ids" not in values:
            end = values.get("eos_token_id")
            values["eos_token_ids"] = () if end is None else tuple(end) if isinstance(end, list) else (end,)
        values["torch_dtype"] = values.get("dtype") or values.get("torch_dtype") or "float32"
        return values

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that one position costs in a 2-byte type, all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2

    def to_hugging_face(self) -> dict[str, Any]:
        """The `config.json` that `transformers` and this loader both open."""
        rope = self.rope.model_dump(include={"rope_type", "rope_theta", *_ROPE_PARAMETERS[self.rope.rope_type]})
        ends = list(self.eos_token_ids)
        return self.model_dump(exclude={"rope", "eos_token_ids", "torch_dtype"}) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rope_theta": self.rope.rope_theta,
            "rope_parameters": rope,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": self.torch_dtype,
        }


class DraftConfig(BaseModel):
    """What makes a directory a draft: which target it belongs to, and what its layers remember.

    `tapped_layers[i]` is the number of target layers passed before the activation that draft layer i remembers of
    verified positions: for a target of 8 layers and a SPIRe draft of 2 it is (6, 7). Without any, each layer remembers
    its own input, as a vanilla draft does, and the draft is sent tokens instead of activations.
    `feedback`: whether positions drafted in this round are remembered as a mixture of the layers' outputs (paper
    section 3.3) or as each layer's own input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["spire", "vanilla"] = "spire"
    target_fingerprint: str
    tapped_layers: tuple[int, ...]
    window: int = 64
    sink: int = 1
    attends_self: bool = True
    feedback: bool = True

    @model_validator(mode="after")
    def _feedback_needs_activations(self) -> DraftConfig:
        if self.feedback and not self.tapped_layers:
            raise ValueError("feedback memory without the target's activations is not supported")
        return self


def _rope_section(values: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` + `rope_scaling` before it."""
    section = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    section.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    if "type" in section:
        section.setdefault("rope_type", section.pop("type"))
    return section


def read_config(directory: Path) -> dict[str, Any]:
    """The raw `config.json` of a checkpoint directory. Raises CheckpointError that names the file."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: --model and --draft take a directory in Hugging Face layout")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError that names the file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return raw


def load_model_config(directory: Path) -> ModelConfig:
    """Shape of the checkpoint in `directory`. Raises CheckpointError for another architecture or a missing key."""
    raw = read_config(directory)
    kind = raw.get("model_type", "llama")
    if kind != "llama":
        raise CheckpointError(f"{directory / 'config.json'}: model_type is {kind!r}; only 'llama' can be served")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{directory / 'config.json'}: hidden_act is {raw['hidden_act']!r}; only 'silu' is Llama's"
        )
    try:
        return ModelConfig.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{directory / 'config.json'}: {problems}") from error


def load_draft_config(directory: Path) -> DraftConfig:
    """The `spire_draft` section of a draft's `config.json`. Raises CheckpointError when it is no draft."""
    raw = read_config(directory)
    section = raw.get("spire_draft")
    if section is None:
        raise CheckpointError(f"{directory / 'config.json'} has no 'spire_draft' section: this directory is no draft")
    try:
        return DraftConfig.model_validate(section)
    except ValidationError as error:
        raise CheckpointError(f"{directory / 'config.json'}: spire_draft: {error}") from error
