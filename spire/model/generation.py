"""The `generation_config.json` of a checkpoint: tokens that end a text, and how its makers suggest to sample.

Its end tokens are added to those of `config.json`: chat models name there the one that ends a turn. How to sample is
told to clients and never applied unasked: a request means the same on every model. What cannot be told is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spire.errors import CheckpointError
from spire.model.config import ModelConfig, in_words, short
from spire.model.directory import read_object_if_any

Share = Annotated[float, Field(ge=0, le=1)]


class Sampling(BaseModel):
    """The part of `generation_config.json` that is told to clients; None where it says nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Generation(NamedTuple):
    """`end_tokens`: those of `config.json` first. `unusable`: suggestions that were left out, in one line."""

    end_tokens: tuple[int, ...]
    sampling: Sampling
    unusable: str


def read_generation(directory: Path, config: ModelConfig) -> Generation:
    """Read end tokens and suggestions. Raises CheckpointError for an end token that the vocabulary does not have."""
    file = directory / "generation_config.json"
    raw = read_object_if_any(file)
    sampling, unusable = _suggested(raw)
    return Generation(
        tuple(dict.fromkeys([*config.eos_token_ids, *_end_tokens(raw, config, file)])), sampling, unusable
    )


def _end_tokens(raw: dict[str, Any], config: ModelConfig, file: Path) -> list[int]:
    """The token ids under `eos_token_id`, where older files write -1 for none."""
    said = raw.get("eos_token_id")
    ends = [end for end in (said if isinstance(said, list) else [said]) if end not in (None, -1)]
    for end in ends:
        if type(end) is not int or not 0 <= end < config.vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id {short(end)} is no token of a vocabulary of {config.vocab_size}"
            )
    return ends


def _suggested(raw: dict[str, Any]) -> tuple[Sampling, str]:
    """The suggestions that can be told, and in words those that cannot: as none is applied, none ends a start."""
    try:
        return Sampling.model_validate(raw), ""
    except ValidationError as error:
        wrong = {one["loc"][0] for one in error.errors()}
        usable = {name: value for name, value in raw.items() if name not in wrong}
        return Sampling.model_validate(usable), in_words(error)
