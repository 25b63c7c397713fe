"""Read the `generation_config.json` of a checkpoint: end tokens and suggested sampling parameters.

End tokens are added to those of `config.json`, because chat models name the token that ends a turn only in
`generation_config.json`. The suggested sampling parameters are reported to clients and never applied by default, so
that a request means the same on every model. Invalid suggestions are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spire.errors import CheckpointError
from spire.model.config import ModelConfig, in_words, short
from spire.model.directory import read_object_if_any

Share = Annotated[float, Field(ge=0, le=1)]


class SuggestedSampling(BaseModel):
    """The sampling parameters in `generation_config.json` that are reported to clients; None for absent ones."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Generation(NamedTuple):
    """The end tokens of a checkpoint (`config.json` first), its suggested sampling, and a line on invalid values."""

    end_tokens: tuple[int, ...]
    sampling: SuggestedSampling
    unusable: str


def read_generation(directory: Path, config: ModelConfig) -> Generation:
    """Read a checkpoint's end tokens and suggested sampling. Raises CheckpointError for an invalid end token."""
    file = directory / "generation_config.json"
    raw = read_object_if_any(file)
    said = raw.get("eos_token_id")
    # In older files, -1 means no end token.
    ends = [end for end in (said if isinstance(said, list) else [said]) if end not in (None, -1)]
    for end in ends:
        if type(end) is not int or not 0 <= end < config.vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id {short(end)} is no token of a vocabulary of {config.vocab_size}"
            )
    try:
        sampling, unusable = SuggestedSampling.model_validate(raw), ""
    except ValidationError as error:
        wrong = {one["loc"][0] for one in error.errors()}
        usable = {name: value for name, value in raw.items() if name not in wrong}
        sampling, unusable = SuggestedSampling.model_validate(usable), in_words(error)
    return Generation(tuple(dict.fromkeys([*config.eos_token_ids, *ends])), sampling, unusable)
