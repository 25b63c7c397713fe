"""What a checkpoint's `generation_config.json` says: which tokens end a text, and how its makers sample from it.

Its end tokens are added to those of `config.json`: chat models name there the one that ends a turn. How to sample is
told to clients and never applied unasked: a request means the same on every model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spire.errors import CheckpointError
from spire.model.config import ModelConfig, TokenId, in_words
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


class _Generation(Sampling):
    eos_token_id: TokenId | list[TokenId] | None = None


def read_generation(directory: Path, config: ModelConfig) -> tuple[tuple[int, ...], Sampling]:
    """The tokens that end a text, those of `config.json` first, and the sampling that the makers suggest.

    Raises CheckpointError naming the key of `generation_config.json` that is wrong.
    """
    file = directory / "generation_config.json"
    raw = read_object_if_any(file)
    try:
        said = _Generation.model_validate(raw)
    except ValidationError as error:
        raise CheckpointError(f"{file}: {in_words(error)}") from error
    ends = said.eos_token_id if isinstance(said.eos_token_id, list) else [said.eos_token_id]
    more = [end for end in ends if end is not None]
    if beyond := [end for end in more if end >= config.vocab_size]:
        raise CheckpointError(f"{file}: eos_token_id {beyond[0]} is not below vocab_size {config.vocab_size}")
    return tuple(dict.fromkeys([*config.eos_token_ids, *more])), Sampling.model_validate(
        said.model_dump(exclude={"eos_token_id"})
    )
