"""`spire convert gguf`: convert a GGUF file, quantised or not, to a directory in Hugging Face layout.

    spire convert gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2

Everything is checked before anything is written. Does not know: architectures other than Llama's, split files,
big-endian files, and pre-tokenizers that cannot be rebuilt exactly; each is refused with an error that names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spire.checkpoints.gguf.file import GgufFile
from spire.checkpoints.gguf.shape import model_config
from spire.checkpoints.gguf.tokenizer import read_tokenizer
from spire.checkpoints.gguf.weights import plan, write_weights
from spire.errors import CheckpointError
from spire.files import write_json, write_whole
from spire.model.config import ModelConfig

# Sampling parameters that are numbers: GGUF's names -> names in generation_config.json.
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}


def convert_gguf(path: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> ModelConfig:
    """Convert the GGUF file at `path` to a checkpoint in `out`, which must be empty or absent, with weights of `dtype`.

    Raises CheckpointError, naming the file and the key or tensor that is damaged or cannot be served exactly.
    """
    file = GgufFile(path)
    shape = model_config(file)
    found = read_tokenizer(file, shape.vocab_size)
    config = shape.model_copy(update={"bos_token_id": found.start, "eos_token_ids": found.ends})
    weights = plan(file, config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not an empty directory: name a new one with --out")
    write_weights(file, weights, config, out, dtype)
    write_whole(out / "tokenizer.json", lambda unfinished: found.tokenizer.save(str(unfinished)))
    context = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position_embeddings}
    write_json(out / "tokenizer_config.json", context | found.config)
    write_json(out / "generation_config.json", _generation(file, config))
    name = {"_name_or_path": file.text("general.name", path.stem)}
    # config.json is written last: without it a directory is no model, so an interrupted conversion is not served.
    write_json(out / "config.json", config.to_hugging_face() | {"dtype": str(dtype).removeprefix("torch.")} | name)
    return config


def _generation(file: GgufFile, config: ModelConfig) -> dict[str, Any]:
    stored = config.to_hugging_face()
    tokens = {key: stored[key] for key in ("bos_token_id", "eos_token_id")}
    sampling: dict[str, Any] = {
        name: file.number(f"general.sampling.{key}")
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in file.fields
    }
    if "general.sampling.top_k" in file.fields:
        sampling["top_k"] = file.whole("general.sampling.top_k")
    return tokens | ({"do_sample": True} | sampling if sampling else {})
