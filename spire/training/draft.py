"""`spire train draft`: a SPIRe draft by block rollouts against its frozen target (paper sections 3.3, 3.4).

On each training sequence k passes follow every k-th prefix, all blocks in parallel and with teacher forcing. The target
runs once per sequence; its activations are captured on the fly and never stored. The offset of the blocks is drawn for
each step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from spire.errors import DataError
from spire.model.checkpoint import load_target, save_draft
from spire.model.draft import BlockRollouts, RolloutBlocks, SpireDraft, match_input_scale, prune
from spire.model.target import Target, WholeSequence
from spire.training.corpus import TokenStream
from spire.training.run import Checkpoint, Schedule, StepResult, muon_and_adamw, scale_rate, train_steps


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that determines a draft besides its target and the text. The defaults are the bundled draft's."""

    steps: int = 4000
    tokens_per_step: int = 2048
    short_length: int = 512
    long_length: int = 2048
    layers: int = 2
    window: int = 64
    sink: int = 1
    k: int = 4
    omega: float = 0.5
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    decay_share: float = 0.5
    seed: int = 2

    def length_at(self, step: int) -> int:
        return self.long_length if step % 4 == 1 else self.short_length


def train_draft(
    target_directory: Path,
    data: list[Path],
    valid: list[Path],
    out: Path,
    recipe: DraftRecipe,
    device: str = "cpu",
    compiled: bool = True,
) -> SpireDraft:
    """Train, checkpointing into `out/run`, and write the finished draft to `out`. Resumes what it finds there."""
    work = out / "run"
    target, identity = load_target(target_directory)
    target = target.to(device)
    _check(target, recipe)
    torch.manual_seed(recipe.seed)
    draft = prune(target, identity, recipe.layers, recipe.window, recipe.sink).to(device).requires_grad_(True).train()
    stream, held_out = _streams(target, target_directory, data, valid, work)
    sample_BT = torch.from_numpy(stream.batch(recipe.seed, 0, 4, recipe.short_length)).to(device)
    factor = match_input_scale(draft, target, sample_BT)
    optimizers = muon_and_adamw(draft, draft.layers, recipe.muon_rate, recipe.adamw_rate)
    scale_rate(optimizers, draft.embed_tokens.weight, factor)
    checkpoint = Checkpoint(work, {**{k: v for k, v in asdict(recipe).items() if k != "steps"}, "target": identity})
    objective = torch.compile(rollout_loss, dynamic=False) if compiled else rollout_loss

    def forward(step: int) -> StepResult:
        length = min(recipe.length_at(step), target.config.max_position_embeddings)
        tokens_BT = torch.from_numpy(stream.batch(recipe.seed, step, max(1, recipe.tokens_per_step // length), length))
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, step, length, device)
            loss, alpha = objective(draft, target, tokens_BT.to(device), blocks, recipe.omega)
        return StepResult(loss, {"alpha": alpha.item(), "length": length}, tokens_BT.numel())

    def validate() -> dict[str, float]:
        return {"valid_alpha": validation_alpha(draft, target, held_out, recipe, device)} if held_out else {}

    schedule = Schedule(recipe.steps, recipe.decay_share)
    train_steps("draft", checkpoint, draft, optimizers, schedule, forward, validate)
    save_draft(out, draft)
    return draft


def rollout_loss(
    draft: SpireDraft, target: Target, tokens_BL: Tensor, blocks: RolloutBlocks, omega: float
) -> tuple[Tensor, Tensor]:
    """MixedLoss(ω) = ω · CE(p, q) − (1 − ω) · α, and α = Σ_x min(p(x), q(x)), both means over drafted positions."""
    with torch.no_grad():
        output = target(tokens_BL, WholeSequence(tokens_BL), draft.draft.tapped_layers)
        log_p_BLV = target.unembed(output.hidden_BTD).log_softmax(dim=-1)
    assert output.taps_BTND is not None
    rollouts = BlockRollouts(draft, output.taps_BTND, blocks)
    losses, alphas = [], []
    for _ in range(blocks.k):
        positions_T = rollouts.advance()
        hidden_BTD = draft(tokens_BL[:, positions_T], rollouts)
        log_q = draft.unembed(hidden_BTD).log_softmax(dim=-1)
        log_p = log_p_BLV[:, positions_T]
        p = log_p.exp()
        alpha = torch.minimum(p, log_q.exp()).sum(dim=-1).mean()
        losses.append(omega * -(p * log_q).sum(dim=-1).mean() - (1 - omega) * alpha)
        alphas.append(alpha.detach())
    return torch.stack(losses).mean(), torch.stack(alphas).mean()


@torch.no_grad()
def validation_alpha(
    draft: SpireDraft, target: Target, stream: TokenStream, recipe: DraftRecipe, device: str, batches: int = 8
) -> float:
    """Mean α over fixed windows of held-out text, teacher-forced."""
    total = 0.0
    for number in range(batches):
        tokens_BT = torch.from_numpy(stream.batch(0, number, 4, recipe.short_length)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, number, recipe.short_length, device)
            total += rollout_loss(draft, target, tokens_BT, blocks, recipe.omega)[1].item()
    return total / batches


def _blocks(recipe: DraftRecipe, step: int, length: int, device: str) -> RolloutBlocks:
    offset = 1 + int(np.random.default_rng((recipe.seed, step, 1)).integers(recipe.k))
    return RolloutBlocks.of(length, recipe.k, offset, device)


def _streams(
    target: Target, directory: Path, data: list[Path], valid: list[Path], work: Path
) -> tuple[TokenStream, TokenStream | None]:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file} does not exist: the draft must see the target's own tokens")
    tokenizer, config = Tokenizer.from_file(str(file)), target.config
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise DataError(f"{file} has {tokenizer.get_vocab_size()} tokens, the target only {config.vocab_size}")
    start = config.bos_token_id if config.bos_token_id is not None else 0
    end = config.eos_token_ids[0] if config.eos_token_ids else start
    build = lambda paths: TokenStream.build(paths, tokenizer, start, end, work)  # noqa: E731
    return build(data), build(valid) if valid else None


def _check(target: Target, recipe: DraftRecipe) -> None:
    depth = target.config.num_hidden_layers
    if not 0 < recipe.layers < depth:
        raise DataError(f"layers is {recipe.layers}: a draft of a target of {depth} layers has 1 to {depth - 1}")
    if recipe.short_length <= 2 * recipe.k:
        raise DataError(f"sequences of {recipe.short_length} tokens are too short for blocks of k = {recipe.k}")
