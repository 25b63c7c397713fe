"""Read the `config.json` of a checkpoint. Does not import torch, because the gateway and the CLI read it too.

A target is a directory in Hugging Face layout of a family that `families` lists. A draft is a directory of the same
kind whose `config.json` has a `spire_draft` section. `families` lists the known keys; unsupported values are refused by
name. Sizes beyond any real model are refused before memory is allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spire.errors import CheckpointError
from spire.model.directory import read_object
from spire.model.families import FAMILIES, HARMLESS_ROPE, NEUTRAL_ROPE, Family, is_neutral

# With MagicDec the target drafts for itself, without a draft checkpoint and without training. This is both the draft's
# kind and its id in `Start`. No activations are published to it.
MAGICDEC = "magicdec"

# Limits far above any real model, and far below what exhausts a machine.
Count = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=1_000_000)]
Positions = Annotated[int, Field(ge=1, le=1_000_000_000)]
TokenId = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
_MOST_WEIGHTS = 4_000_000_000_000
_MOST_SHOWN = 60
_ROPE_KEYS = {"rope_type", "rope_theta"}
# Fields that are part of a target's identity only where they are not at their defaults, as of all Llamas.
_OF_OTHER_FAMILIES = ("model_type", "sliding_window")


class RopeConfig(BaseModel):
    """Parameters of rotary position embeddings: base frequency and, for `linear` and `llama3`, frequency scaling."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: Positive = 10000.0
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Positions = 8192

    @model_validator(mode="after")
    def _frequencies_in_order(self) -> RopeConfig:
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} is not above {self.low_freq_factor}")
        return self


class ModelConfig(BaseModel):
    """The family and the shape of a model, under Hugging Face's names."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    vocab_size: Annotated[int, Field(ge=1, le=10_000_000)]
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Annotated[int, Field(ge=1, le=1_000)]
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    max_position_embeddings: Positions = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    model_type: str = "llama"
    sliding_window: Positions | None = None
    rope: RopeConfig = RopeConfig()
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    torch_dtype: str = "float32"

    @model_validator(mode="before")
    @classmethod
    def _heads_by_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        values = {"num_key_value_heads": heads} | values
        if "head_dim" not in values and type(heads) is int and type(width) is int and min(heads, width) > 0:
            if width % heads:
                raise ValueError(f"head_dim is absent, and hidden_size {width} no multiple of {heads} heads")
            values["head_dim"] = width // heads
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")
        if self.weights > _MOST_WEIGHTS:
            raise ValueError(f"these sizes come to {self.weights:.1e} weights: no model has so many")
        for name, tokens in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            if beyond := [token for token in tokens if token is not None and token >= self.vocab_size]:
                raise ValueError(f"{name} {beyond[0]} is not below vocab_size {self.vocab_size}")
        return self

    @property
    def qkv_bias(self) -> bool:
        """True if the projections to queries, keys and values have biases."""
        return self.attention_bias or FAMILIES[self.model_type].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """True if the queries and the keys of each head pass an RMSNorm before they are rotated."""
        return FAMILIES[self.model_type].qk_norm

    @property
    def longest(self) -> int:
        """The most positions of a sequence: those of the model, or of its sliding window if that is shorter.

        Up to the length of the window, attention reaches all positions; beyond, the model is not supported.
        """
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def identity(self) -> str:
        """All that determines the model's numbers, besides its weights, as JSON. Drafts name their target by its hash,
        so it must not change: fields that Llamas do not have are left out of theirs."""
        fields = type(self).model_fields
        absent = {name for name in _OF_OTHER_FAMILIES if getattr(self, name) == fields[name].default}
        return self.model_dump_json(exclude={"torch_dtype", *absent})

    @property
    def weights(self) -> int:
        """The number of elements of all weight matrices, without norms and biases."""
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + (2 - self.tie_word_embeddings) * self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_position(self) -> int:
        """The bytes of all layers' keys and values at one position, in a 2-byte dtype."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the contents of a `config.json` that both `transformers` and `load_model_config` accept."""
        family, ends = FAMILIES[self.model_type], list(self.eos_token_ids)
        rope = self.rope.model_dump(include={"rope_type", "rope_theta", *family.ropes[self.rope.rope_type]})
        return self.model_dump(include=set(family.read - {"torch_dtype"})) | {
            "architectures": list(family.architectures),
            "hidden_act": "silu",
            "rope_theta": self.rope.rope_theta,
            "rope_parameters": rope,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": self.torch_dtype,
        }


class SharedEmbeddings(BaseModel):
    """How a draft uses the embedding and unembedding of its target, instead of storing its own.

    `scale` multiplies the embedding. `fingerprint` identifies the two matrices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: Positive
    fingerprint: str


class StopHeadConfig(BaseModel):
    """The sizes of a draft's stop head (SpecDec++, section 3.2): `depth` residual layers of `width`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: Annotated[int, Field(ge=0, le=64)] = 3
    width: Annotated[int, Field(ge=1, le=65_536)] = 256


class DraftConfig(BaseModel):
    """The `spire_draft` section of a draft's `config.json`: its kind, its target, and what its layers attend to.

    `tapped_layers[i]` is the index of the target layer whose input draft layer i attends to at verified positions:
    (6, 7) for a target of 8 layers and a SPIRe draft of 2. If `tapped_layers` is empty, each layer attends to its own
    input, as in a vanilla draft, and the draft receives tokens instead of activations.
    `feedback`: at positions drafted in the current round, layers attend to a mixture of all layers' outputs (SPIRe
    paper, section 3.3); if False, to their own inputs.
    `vocabulary`: the number of tokens that the draft can propose, listed in its tensor of that name; None: all tokens.
    It is a multiple of 32, as kernels need it.
    `stop_head`: the head that predicts whether a draft token is accepted, if one was trained.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["spire", "vanilla"] = "spire"
    target_fingerprint: str
    tapped_layers: tuple[Annotated[int, Field(ge=0)], ...]
    window: Annotated[int, Field(ge=0, le=1_000_000)] = 64
    sink: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    attends_self: bool = True
    feedback: bool = True
    vocabulary: Annotated[int, Field(ge=1, le=10_000_000, multiple_of=32)] | None = None
    embeddings: SharedEmbeddings | None = None
    stop_head: StopHeadConfig | None = None

    @model_validator(mode="after")
    def _feedback_needs_activations(self) -> DraftConfig:
        if self.feedback and not self.tapped_layers:
            raise ValueError("feedback memory without the target's activations is not supported")
        return self


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a checkpoint directory. Raises CheckpointError naming an unreadable file."""
    file = directory / "config.json"
    if not file.is_file():
        if gguf := directory if directory.suffix == ".gguf" else next(directory.glob("*.gguf"), None):
            raise CheckpointError(f"{gguf} can be served once it is converted: spire convert gguf {gguf} --out DIR")
        raise CheckpointError(f"{file} does not exist: --model and --draft take a directory in Hugging Face layout")
    return read_object(file)


def load_model_config(directory: Path) -> ModelConfig:
    """Return the model config of a checkpoint directory. Raises CheckpointError naming an unsupported key or value."""
    raw, file = read_config(directory), directory / "config.json"
    try:
        return model_config_of(raw)
    except ValueError as error:
        wrong = in_words(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{file}: {wrong}") from error


def model_config_of(raw: dict[str, Any]) -> ModelConfig:
    """Return the model config of a parsed `config.json`. Raises ValueError naming an unsupported key or value."""
    family, end = _family(raw), raw.get("eos_token_id")
    unused = {"sliding_window"} if raw.get("use_sliding_window") is False else set()
    _refuse_unbuilt({name: value for name, value in raw.items() if name not in unused}, family.neutral)
    # As in transformers, a null is not the family's default: a sliding window of null is none.
    given = {**family.defaults, **raw}
    values = {name: value for name, value in given.items() if name in family.read and value is not None}
    values["rope"] = _rope(raw, family)
    values["eos_token_ids"] = () if end is None else tuple(end) if isinstance(end, list) else (end,)
    values["torch_dtype"] = values.get("dtype") or values.get("torch_dtype") or "float32"
    return ModelConfig.model_validate(values)


def unknown_keys(directory: Path) -> list[str]:
    """Return the keys of a checkpoint's `config.json` that are ignored because they are unknown."""
    raw = read_config(directory)
    family = _family(raw)
    return sorted(raw.keys() - family.read - family.harmless - family.neutral.keys())


def _family(raw: dict[str, Any]) -> Family:
    """Return the model family of a parsed `config.json`. Raises ValueError for unsupported types or architectures."""
    kind = raw.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type is {short(kind)}; served are {_listed(FAMILIES)}")
    family, named = FAMILIES[kind], raw.get("architectures")
    for name in named if isinstance(named, list) else [named]:
        if name is not None and str(name).lower() not in map(str.lower, family.architectures):
            raise ValueError(f"architectures names {short(name)}; served is {_listed(family.architectures)}")
    return family


def _rope(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of RopeConfig from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`
    (older versions). Raises ValueError for settings that the family does not support."""
    given = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)}
    if wrong := [name for name, section in given.items() if not isinstance(section, dict)]:
        raise ValueError(f"{wrong[0]} is {short(raw[wrong[0]])}; it must be an object")
    where = next(iter(given), "rope_parameters")
    section = _merged(given.values())
    kind = section.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in family.ropes:
        raise ValueError(f"{where}: rope_type is {short(kind)}; served are {_listed(family.ropes)}")
    needed = family.ropes[kind]
    if missing := [name for name in needed if section.get(name) is None]:
        raise ValueError(f"{where}: rope_type {kind!r} needs {missing[0]}, which is not there")
    others = {name: value for name, value in section.items() if name not in {*needed, *HARMLESS_ROPE, *_ROPE_KEYS}}
    _refuse_unbuilt(others, dict.fromkeys(others, (None,)) | NEUTRAL_ROPE, f"{where}.")
    theta = next((one["rope_theta"] for one in (section, raw) if one.get("rope_theta") is not None), None)
    chosen = {name: section[name] for name in needed} | {"rope_type": kind}
    return chosen if theta is None else chosen | {"rope_theta": theta}


def _merged(given: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the rope sections of a `config.json`, dropping nulls and renaming the older key `type` to `rope_type`.

    Raises ValueError if the sections differ, except that `rope_theta` may be absent from one section.
    """
    sections, merged = [], dict[str, Any]()
    for one in given:
        older = {} if one.get("type") is None else {"rope_type": one["type"]}
        section = older | {name: value for name, value in one.items() if name != "type" and value is not None}
        sections.append(section)
        merged |= section
    for section in sections:
        if {"rope_theta": merged.get("rope_theta")} | section != {"rope_theta": None} | merged:
            raise ValueError("rope_parameters and rope_scaling say different things: keep one of them")
    return merged


def _refuse_unbuilt(values: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    for name, value in values.items():
        if name in neutral and not is_neutral(value, neutral[name]):
            plain = [one for one in neutral[name] if one is not None]
            instead = f"only {plain[0]!r} is" if plain else "leave it out if the model does without"
            raise ValueError(f"{where}{name} is {short(value)}, which is not served: {instead}")


def load_draft_config(directory: Path) -> DraftConfig:
    """Return the `spire_draft` section of a draft's `config.json`. Raises CheckpointError if missing or invalid."""
    raw = read_config(directory)
    section = raw.get("spire_draft")
    if section is None:
        raise CheckpointError(f"{directory / 'config.json'} has no 'spire_draft' section: this directory is no draft")
    try:
        return DraftConfig.model_validate(section)
    except ValidationError as error:
        raise CheckpointError(f"{directory / 'config.json'}: spire_draft: {in_words(error)}") from error


def in_words(error: ValidationError) -> str:
    """Format a validation error as one line with every invalid key, its value and its message."""
    return "; ".join(
        f"{_place(e['loc'])} is {short(e['input'])}: {e['msg']}"
        if e["loc"] and e["type"] != "missing"
        else ": ".join(filter(None, (_place(e["loc"]), e["msg"].removeprefix("Value error, "))))
        for e in error.errors()
    )


def _place(keys: Iterable[str | int]) -> str:
    """Join the keys that lead to a value. A key that would break the line is quoted."""
    return ".".join(str(key) if str(key).isprintable() else repr(key) for key in keys)


def short(value: Any) -> str:
    """Return the repr of a value, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
