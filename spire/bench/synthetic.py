"""A pair of a known shape with random weights, and a tokenizer of bytes: what `spire bench --shape` serves.

Its text means nothing, so acceptance must be made up as well (`--accept-rate`); only its time is real. The services
draw the weights, each on its device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spire.model.checkpoint import fingerprint
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import last_layers
from spire.model.random_weights import RANDOM_WEIGHTS
from spire.shapes import Shape, trained_draft


def write_pair(directory: Path, shape: Shape, positions: int) -> tuple[Path, Path]:
    """Directories of a target of this shape and of a SPIRe draft by the paper's rule, a quarter of its layers."""
    config = config_of(shape, positions)
    rule = trained_draft("spire", shape)
    tapped = last_layers(config, rule.shape.layers)
    draft = DraftConfig(
        target_fingerprint=fingerprint(config, {}), tapped_layers=tapped, window=rule.window or 0, sink=rule.sink
    )
    _write(directory / "target", config, {})
    _bytes_tokenizer(shape.vocab_size).save(str(directory / "target" / "tokenizer.json"))
    of_draft = config.model_copy(update={"num_hidden_layers": len(tapped)})
    _write(directory / "draft", of_draft, {"spire_draft": draft.model_dump(mode="json")})
    return directory / "target", directory / "draft"


def config_of(shape: Shape, positions: int) -> ModelConfig:
    """A target of this shape, of up to so many positions."""
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


def _bytes_tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each byte; the rest of the vocabulary stands for nothing that text holds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<s>", *letters])}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
