"""The pair that `spire bench --shape` serves: target and draft of a known shape, random weights, a byte tokenizer.

The text is meaningless, so acceptance must be artificial as well (`--accept-rate`); only the times are real. Each
service draws its random weights on its own device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spire.checkpoints.random_weights import RANDOM_WEIGHTS
from spire.checkpoints.weights import fingerprint
from spire.model.config import ModelConfig
from spire.perf.shapes import Shape, trained_config


def write_pair(directory: Path, shape: Shape, positions: int) -> tuple[Path, Path]:
    """Write a target of this shape and a SPIRe draft with a quarter of its layers, and return both directories."""
    config = config_of(shape, positions)
    draft = trained_config(config, fingerprint(config, {}))
    _write(directory / "target", config, {})
    # One token per byte. The rest of the vocabulary never occurs in text.
    vocabulary = {token: at for at, token in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), shape.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "target" / "tokenizer.json"))
    of_draft = config.model_copy(update={"num_hidden_layers": len(draft.tapped_layers)})
    _write(directory / "draft", of_draft, {"spire_draft": draft.model_dump(mode="json")})
    return directory / "target", directory / "draft"


def config_of(shape: Shape, positions: int) -> ModelConfig:
    """Return the configuration of a target of this shape with at most `positions` positions."""
    return ModelConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        bos_token_id=0,
    )


def _write(directory: Path, config: ModelConfig, more: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    said = config.to_hugging_face() | {"dtype": "bfloat16", RANDOM_WEIGHTS: True} | more
    (directory / "config.json").write_text(json.dumps(said, indent=2) + "\n")
