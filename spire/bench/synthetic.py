"""A pair of a known shape with random weights, and a tokenizer of bytes: what `spire bench --shape` serves.

Its text means nothing, so acceptance must be made up as well (`--accept-rate`); only its time is real. Needs torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spire.model.checkpoint import fingerprint, save_draft, save_target
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import last_layers, prune
from spire.model.target import Target
from spire.perf_model import Shape, paper_draft

_DEVIATION = 0.02


def write_pair(directory: Path, shape: Shape, positions: int) -> tuple[Path, Path]:
    """Directories of a target of this shape and of a SPIRe draft by the paper's rule, a quarter of its layers."""
    config = ModelConfig(
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
    target = _random(config)
    save_target(directory / "target", target)
    _bytes_tokenizer(shape.vocab_size).save(str(directory / "target" / "tokenizer.json"))
    rule = paper_draft("spire", shape)
    tapped = last_layers(config, rule.shape.layers)
    identity = fingerprint(config, target.state_dict())
    draft = DraftConfig(target_fingerprint=identity, tapped_layers=tapped, window=rule.window or 0, sink=rule.sink)
    save_draft(directory / "draft", prune(target, draft, tapped))
    return directory / "target", directory / "draft"


def _random(config: ModelConfig) -> Target:
    """Weights as before any training. Drawn in place: no second copy, and no initialisation that is thrown away."""
    with torch.device("meta"):
        target = Target(config).to(torch.bfloat16)
    target = target.to_empty(device="cpu").requires_grad_(False)
    for parameter in target.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, _DEVIATION)
        else:
            parameter.fill_(1)
    return target


def _bytes_tokenizer(vocab_size: int) -> Tokenizer:
    """A token for each byte; the rest of the vocabulary stands for nothing that text holds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<s>", *letters])}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
