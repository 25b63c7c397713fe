"""`spire train target`: training of a small Llama-architecture target from text, on a CPU or a GPU.

Muon updates the matrices of the layers, AdamW all other parameters. The learning rate is constant, then falls linearly.
Short and long sequences are mixed from the start (a quarter of the steps are long, and all steps while the rate
decays), so that all positions are trained. Does not know: more than one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn

from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import save_target
from spire.errors import DataError
from spire.files import write_whole
from spire.model.config import ModelConfig
from spire.model.target import Target, WholeSequence
from spire.text.documents import Chats
from spire.training.corpus import END, START, TokenStream, corpus_texts, described, train_tokenizer
from spire.training.run import Checkpoint, Execution, StepResult, muon_and_adamw, train_steps


@dataclass(frozen=True)
class TargetRecipe:
    """All values, besides the text, that determine a trained target. The defaults are those of the bundled one."""

    steps: int = 3000
    tokens_per_step: int = 4096
    short_length: int = 512
    long_length: int = 2048
    muon_rate: float = 0.02
    muon_weight_decay: float = 0.1
    adamw_rate: float = 3e-3
    decay_share: float = 0.3
    seed: int = 1
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 8
    heads: int = 4
    head_dim: int | None = None

    def model_config(self) -> ModelConfig:
        """Return the shape of the target. Raises DataError if there is no such shape."""
        try:
            return ModelConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads,
                head_dim=self.head_dim or self.hidden_size // self.heads,
                rms_norm_eps=1e-5,
                max_position_embeddings=self.long_length,
                bos_token_id=0,
                eos_token_ids=(1,),
                torch_dtype="bfloat16",
            )
        except ValidationError as error:
            wrong = "; ".join(": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors())
            raise DataError(f"there is no target of this shape: {wrong}") from error

    def length_at(self, step: int) -> int:
        decaying = step >= (1 - self.decay_share) * self.steps
        return self.long_length if decaying or step % 4 == 1 else self.short_length


def train_target(
    data: list[Path], valid: list[Path], out: Path, recipe: TargetRecipe, execution: Execution = Execution()
) -> bool:
    """Train a target and write it to `out`. Training resumes from a checkpoint in `out/run`, if there is one.

    Returns False if the time ran out before the last step.
    """
    device, chats, config = execution.device, Chats(out), recipe.model_config()
    tokenizer = _tokenizer(data, out, recipe.vocab_size, chats)
    start, end = tokenizer.encode(START + END, add_special_tokens=False).ids
    stream = TokenStream.build(data, tokenizer, start, end, chats)
    held_out = TokenStream.build(valid, tokenizer, start, end, chats) if valid else None

    torch.manual_seed(recipe.seed)
    target = Target(config).to(device)
    initialise(target, target.layers)
    optimizers = muon_and_adamw(target, target.layers, recipe.muon_rate, recipe.adamw_rate, recipe.muon_weight_decay)
    checkpoint = Checkpoint(out / "run", asdict(recipe) | {"data": described(stream.tokens)})
    loss_of = torch.compile(next_token_loss, dynamic=False) if execution.compiled else next_token_loss

    def forward(step: int) -> StepResult:
        length = recipe.length_at(step)
        tokens_BT = torch.from_numpy(stream.batch(recipe.seed, step, max(1, recipe.tokens_per_step // length), length))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(target, tokens_BT.to(device))
        return StepResult(loss, {"length": length}, tokens_BT.numel())

    def validate() -> dict[str, float]:
        return {"valid_loss": validation_loss(target, held_out, recipe.short_length, device)} if held_out else {}

    lengths, decay = [recipe.length_at(step) for step in range(recipe.steps)], recipe.decay_share
    done = train_steps("target", checkpoint, target, optimizers, lengths, decay, forward, validate, execution.minutes)
    if done:
        save_target(out, target)
    return done


def next_token_loss(target: Target, tokens_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of each token given the tokens before it."""
    logits = target.unembed(target(tokens_BT[:, :-1], WholeSequence(tokens_BT[:, :-1])).hidden_BTD)
    return F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())


@torch.no_grad()
def validation_loss(target: Target, stream: TokenStream, length: int, device: str, batches: int = 8) -> float:
    """Return a target's mean loss in nats per token over fixed windows of held-out text."""
    losses = []
    for number in range(batches):
        tokens_BT = torch.from_numpy(stream.batch(0, number, 8, length)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            losses.append(next_token_loss(target, tokens_BT).item())
    return sum(losses) / len(losses)


def _tokenizer(data: list[Path], out: Path, vocab_size: int, chats: Chats) -> Tokenizer:
    file = out / "tokenizer.json"
    if not file.exists():

        def texts() -> Iterator[str]:
            yield from corpus_texts(data, chats, "reading for the tokenizer")
            # This takes long and shows no progress.
            Console(stderr=True, highlight=False).print("tokenizer: learning its vocabulary")

        tokenizer = train_tokenizer(texts(), vocab_size)
        write_whole(file, lambda unfinished: tokenizer.save(str(unfinished)))
    return load_tokenizer(out, vocab_size)


def initialise(model: nn.Module, layers: nn.ModuleList) -> None:
    """Initialise matrices by normal(0, 0.02), divided by sqrt(2 · layers) if they write into the residual stream.

    The embedding gets normal(0, 1), as large as the outputs of the layers, so that the residual stream keeps its scale:
    with a small embedding, Muon's steps let the stream grow far beyond that scale, and the loss is higher.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name != "memory_weights":
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / ((2 * len(layers)) ** 0.5 if writes_residual else 1)
            torch.nn.init.normal_(parameter, std=1.0 if name.startswith("embed_tokens") else std)
