"""A target whose next-token distribution is known exactly: attention is zeroed, so it depends on the last token alone.

Every generated token is then a draw from a known row, and goodness of fit can be tested through the services.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from spire.checkpoints.weights import load_target, save_draft, save_target
from spire.model.config import DraftConfig, ModelConfig, StopHeadConfig
from spire.model.draft import prune
from spire.model.stop_head import StopHead
from spire.model.target import Target, WholeSequence

VOCABULARY = 16


def write_markov_pair(
    directory: Path, vocabulary: int = VOCABULARY, own: int | None = None, stops: bool = False
) -> tuple[Path, Path]:
    """Target and draft directories. The draft is the pruned target made worse, so that q differs from p.

    `own`: how many tokens it can propose, every other one from the first on. `stops`: with a random stop head.
    """
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    target = Target(config)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.0 if name.endswith("o_proj.weight") else 0.12 if "mlp" in name else 0.25)
    model = directory / "target"
    save_target(model, target, torch.float32)
    _words(vocabulary).save(str(model / "tokenizer.json"))
    target, fingerprint = load_target(model)
    kind = DraftConfig(target_fingerprint=fingerprint, tapped_layers=(2,), window=4, vocabulary=own)
    draft = prune(target, kind, (2,), None if own is None else torch.arange(0, 2 * own, 2))
    # By this seed greedy guesses are right after one token of a text and wrong after another.
    noise = torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(21))
    with torch.no_grad():
        draft.lm_head.weight.add_(noise * 0.15)
    if stops:
        sizes = StopHeadConfig(depth=1, width=16)
        draft.draft, head = draft.draft.model_copy(update={"stop_head": sizes}), StopHead(config.hidden_size, sizes)
        draft.stop_head = head
    save_draft(directory / "draft", draft, torch.float32)
    return model, directory / "draft"


def logits_after_each_token(model: Path) -> Tensor:
    """Row x: the target's logits [V, V] for the token after x."""
    target, _ = load_target(model)
    tokens_V1 = torch.arange(target.config.vocab_size)[:, None]
    return target.unembed(target(tokens_V1, WholeSequence(tokens_V1)).hidden_BTD)[:, 0]


def _words(vocabulary: int) -> Tokenizer:
    words = {f" w{index}": index for index in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
