"""`spire train draft`: a draft for a frozen target (paper sections 3.2 to 3.4, 4.1).

A SPIRe draft learns by block rollouts: on each training sequence k passes follow every k-th prefix, all blocks in
parallel and with teacher forcing. The target runs once per sequence; its activations are captured on the fly and never
stored. The offset of the blocks is drawn for each step. The paper's ablations and its vanilla baseline are values of
the same recipe: what the draft starts from, what it remembers, what it learns from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from spire.documents import Chats
from spire.errors import DataError
from spire.model.checkpoint import load_draft, load_target, save_draft
from spire.model.config import DraftConfig, ModelConfig, load_model_config
from spire.model.draft import BlockRollouts, Draft, OwnPast, RolloutBlocks, input_scale, last_layers, prune
from spire.model.target import Target, WholeSequence
from spire.model.tokenizer import load_tokenizer
from spire.shapes import SERVED_SINK, SERVED_WINDOW, quarter_of
from spire.text_files import find_files
from spire.training.corpus import TokenStream
from spire.training.on_policy import OnPolicy
from spire.training.run import (
    Checkpoint,
    Execution,
    Schedule,
    StepResult,
    adamw,
    muon_and_adamw,
    scale_rate,
    train_steps,
)
from spire.training.target import initialise

Loss = Literal["mixed", "mixed-log", "data"]


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that determines a draft besides its target and the text. The defaults are the bundled draft's.

    `recipe_for` fits them to a target: `layers` is a quarter of its layers there.

    `start_from` is the directory of a draft to train further, instead of one made from `init`.
    `on_policy` is the share of the short sequences whose second half the target has written itself.
    `loss`: "mixed" is the paper's ω · CE(p, q) − (1 − ω) · α; "mixed-log" has log α for α; "data" is cross-entropy on
    the text itself. ω goes linearly from `omega` to `omega_final`.
    """

    kind: Literal["spire", "vanilla"] = "spire"
    steps: int = 4000
    tokens_per_step: int = 2048
    short_length: int = 512
    long_length: int = 2048
    layers: int = 2
    copied_layers: tuple[int, ...] | None = None
    init: Literal["pruned", "random"] = "pruned"
    start_from: str | None = None
    scale_input: bool = True
    activations: bool = True
    feedback: bool = True
    self_key: bool = True
    window: int = SERVED_WINDOW
    sink: int = SERVED_SINK
    k: int = 4
    loss: Loss = "mixed"
    omega: float = 0.5
    omega_final: float = 0.5
    freeze_embeddings: bool = False
    on_policy: float = 0.0
    optimizer: Literal["muon", "adamw"] = "muon"
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    decay_share: float = 0.5
    seed: int = 2

    def length_at(self, step: int) -> int:
        return self.long_length if step % 4 == 1 else self.short_length

    def omega_at(self, step: int) -> float:
        return self.omega + (self.omega_final - self.omega) * step / self.steps

    def copied(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers that the draft starts from, and whose inputs it remembers."""
        if self.copied_layers is None:
            return last_layers(target, self.layers)
        if wrong := [layer for layer in self.copied_layers if not 0 <= layer < target.num_hidden_layers]:
            raise DataError(
                f"layer {wrong[0]} cannot be copied: the target has layers 0 to {target.num_hidden_layers - 1}"
            )
        return self.copied_layers


def recipe_for(target_directory: Path, given: dict[str, Any]) -> DraftRecipe:
    """The recipe of the kind of draft that is asked for, with what is `given`. Raises DataError for unknown values."""
    choices = get_type_hints(DraftRecipe)
    for name in ("kind", "init", "loss", "optimizer"):
        if name in given and given[name] not in get_args(choices[name]):
            raise DataError(f"{name} is {given[name]!r}: it is one of {', '.join(get_args(choices[name]))}")
    if "omega" in given:
        given = {"omega_final": given["omega"]} | given
    target = load_model_config(target_directory)
    fitted = _vanilla(target) if given.get("kind") == "vanilla" else {"layers": _layers(target, given)}
    return DraftRecipe(**fitted | given)


def _layers(target: ModelConfig, given: dict[str, Any]) -> int:
    """Those of the draft that is trained further, else a quarter of the target's."""
    if "start_from" in given:
        return load_model_config(Path(given["start_from"])).num_hidden_layers
    return quarter_of(target.num_hidden_layers)


def _vanilla(target: ModelConfig) -> dict[str, Any]:
    """The paper's baseline (section 4.1): half the layers at half the width, cross-entropy on data, the whole past."""
    return {
        "layers": max(1, target.num_hidden_layers // 2),
        "init": "random",
        "scale_input": False,
        "activations": False,
        "feedback": False,
        "window": target.max_position_embeddings,
        "loss": "data",
    }


def train_draft(
    target_directory: Path,
    data: list[Path],
    valid: list[Path],
    out: Path,
    recipe: DraftRecipe,
    execution: Execution = Execution(),
) -> bool:
    """Train, checkpointing into `out/run`, and write the finished draft to `out`. Resumes what it finds there.

    Returns False when the time ran out first.
    """
    find_files([*data, *valid])  # what is not there is told before a large target is loaded
    work, device = out / "run", execution.device
    target, identity = load_target(target_directory)
    target = target.to(device)
    _check(recipe)
    stream, held_out = _streams(target, target_directory, data, valid)
    source = (
        stream
        if recipe.on_policy == 0
        else OnPolicy.build(target, identity, stream, recipe.on_policy, recipe.short_length)
    )
    torch.manual_seed(recipe.seed)
    draft = new_draft(target, identity, recipe).to(device).requires_grad_(True).train()
    factor = 1.0
    if recipe.scale_input:
        sample_BT = torch.from_numpy(stream.batch(recipe.seed, 0, 4, recipe.short_length)).to(device)
        factor = input_scale(target, recipe.copied(target.config)[0], sample_BT)
        if recipe.start_from is None:
            draft.embed_tokens.weight.data.mul_(factor)
    optimizers = _optimizers(draft, recipe, factor)
    checkpoint = Checkpoint(work, {**{k: v for k, v in asdict(recipe).items() if k != "steps"}, "target": identity})
    objective = torch.compile(rollout_loss, dynamic=False) if execution.compiled else rollout_loss

    def forward(step: int) -> StepResult:
        length = min(recipe.length_at(step), target.config.max_position_embeddings)
        tokens_BT = torch.from_numpy(source.batch(recipe.seed, step, max(1, recipe.tokens_per_step // length), length))
        omega = torch.tensor(recipe.omega_at(step), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, step, length, device)
            loss, alpha = objective(draft, target, tokens_BT.to(device), blocks, recipe.loss, omega)
        figures = {"length": float(length)} if alpha is None else {"alpha": alpha.item(), "length": float(length)}
        return StepResult(loss, figures, tokens_BT.numel())

    def validate() -> dict[str, float]:
        return validation_figures(draft, target, held_out, recipe, device) if held_out else {}

    schedule = Schedule(recipe.steps, recipe.decay_share)
    minutes = execution.minutes
    done = train_steps("draft", checkpoint, draft, optimizers, schedule, recipe.length_at, forward, validate, minutes)
    if done:
        save_draft(out, draft)
    return done


def new_draft(target: Target, identity: str, recipe: DraftRecipe) -> Draft:
    """A draft as it is before the first step. Raises DataError where the recipe does not fit the target, or the draft
    that it starts from."""
    fresh = _fresh_draft(target, identity, recipe)
    if recipe.start_from is None:
        return fresh
    given = load_draft(Path(recipe.start_from))
    asked = _described(fresh)
    for name, value in _described(given).items():
        if value != asked[name]:
            raise DataError(f"{recipe.start_from} has {name} = {value!r}, this run asks for {asked[name]!r}")
    return given


def _described(draft: Draft) -> dict[str, Any]:
    """What two drafts have in common of which one can be trained on as the other."""
    return draft.config.model_dump(mode="json", exclude={"torch_dtype"}) | draft.draft.model_dump(mode="json")


def _fresh_draft(target: Target, identity: str, recipe: DraftRecipe) -> Draft:
    shape = target.config
    copied = () if recipe.kind == "vanilla" else recipe.copied(shape)
    draft = DraftConfig(
        kind=recipe.kind,
        target_fingerprint=identity,
        tapped_layers=copied if recipe.activations else (),
        window=recipe.window,
        sink=recipe.sink,
        attends_self=recipe.self_key,
        feedback=recipe.feedback,
    )
    if recipe.init == "pruned":
        return prune(target, draft, copied)
    narrower = _half_as_wide(shape, recipe.layers) if recipe.kind == "vanilla" else shape
    layers = recipe.layers if recipe.kind == "vanilla" else len(copied)
    update = {"num_hidden_layers": layers, "tie_word_embeddings": False}
    fresh = Draft(narrower.model_copy(update=update), draft)
    initialise(fresh, fresh.layers)
    return fresh


def _half_as_wide(target: ModelConfig, layers: int) -> ModelConfig:
    if target.hidden_size % 2 or target.intermediate_size % 2 or target.head_dim % 4:
        raise DataError(
            f"a vanilla draft is half as wide as its target: width {target.hidden_size}, MLP "
            f"{target.intermediate_size} and head width {target.head_dim} cannot all be halved"
        )
    halves = ("hidden_size", "intermediate_size", "head_dim")
    return target.model_copy(update={name: getattr(target, name) // 2 for name in halves})


def _optimizers(draft: Draft, recipe: DraftRecipe, input_factor: float) -> list[torch.optim.Optimizer]:
    """What is learned, and how fast. A scaled embedding needs steps scaled alike."""
    if recipe.freeze_embeddings:
        draft.embed_tokens.requires_grad_(False)
        draft.lm_head.requires_grad_(False)
    if recipe.optimizer == "muon":
        optimizers = muon_and_adamw(draft, draft.layers, recipe.muon_rate, recipe.adamw_rate)
    else:
        optimizers = adamw(draft, recipe.adamw_rate)
    if not recipe.freeze_embeddings:
        scale_rate(optimizers, draft.embed_tokens.weight, input_factor)
    return optimizers


def rollout_loss(
    draft: Draft, target: Target, tokens_BL: Tensor, blocks: RolloutBlocks, loss: Loss, omega: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The loss, and α unless the target is not needed for it; both means over drafted positions."""
    losses, alphas = [], []
    for positions_T, log_q, p in _passes(draft, target, tokens_BL, blocks, needs_p=loss != "data"):
        if p is None:
            losses.append(-log_q.gather(-1, tokens_BL[:, positions_T + 1, None]).mean())
            continue
        alpha_BT = _alpha(p, log_q)
        gain_BT = alpha_BT.log() if loss == "mixed-log" else alpha_BT
        losses.append(omega * -(p * log_q).sum(dim=-1).mean() - (1 - omega) * gain_BT.mean())
        alphas.append(alpha_BT.detach().mean())
    return torch.stack(losses).mean(), torch.stack(alphas).mean() if alphas else None


def _passes(
    draft: Draft, target: Target, tokens_BL: Tensor, blocks: RolloutBlocks, needs_p: bool
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Of each pass over the sequences: the positions fed, log q, and p where it is needed."""
    tapped = draft.draft.tapped_layers
    taps_BLND, p_BLV = None, None
    if tapped or needs_p:
        with torch.no_grad():
            output = target(tokens_BL, WholeSequence(tokens_BL), tapped)
            taps_BLND = output.taps_BTND
            p_BLV = target.unembed(output.hidden_BTD).softmax(dim=-1) if needs_p else None
    memory = OwnPast(draft, tokens_BL) if taps_BLND is None else BlockRollouts(draft, taps_BLND, blocks)
    passes = []
    for _ in range(memory.passes):
        positions_T = memory.advance()
        log_q = draft.unembed(draft(tokens_BL[:, positions_T], memory)).log_softmax(dim=-1)
        passes.append((positions_T, log_q, None if p_BLV is None else p_BLV[:, positions_T]))
    return passes


def _alpha(p: Tensor, log_q: Tensor) -> Tensor:
    """Σ_x min(p(x), q(x)): how likely a draft token is accepted under the rejection rule."""
    return torch.minimum(p, log_q.exp()).sum(dim=-1)


@torch.no_grad()
def validation_figures(
    draft: Draft, target: Target, stream: TokenStream, recipe: DraftRecipe, device: str, batches: int = 8
) -> dict[str, float]:
    """Over fixed windows of held-out text: mean α, and the τ it would give if every guess stood on the text itself.

    τ = 1 + Σ_i E[α_1 · … · α_i] over blocks of k positions. On policy it is measured by `spire eval acceptance`.
    """
    alphas, taus = [], []
    for number in range(batches):
        tokens_BT = torch.from_numpy(stream.batch(0, number, 4, recipe.short_length)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, number, recipe.short_length, device)
            passes = _passes(draft, target, tokens_BT, blocks, needs_p=True)
        alpha_kBT = torch.stack([_alpha(p, log_q) for _, log_q, p in passes if p is not None])
        if len(passes) == 1:  # every position at once: blocks are stretches of neighbours
            alpha_kBT = alpha_kBT[0].unfold(1, recipe.k, recipe.k).permute(2, 0, 1)
        alphas.append(alpha_kBT.mean())
        taus.append(1 + alpha_kBT.cumprod(dim=0).mean(dim=(1, 2)).sum())
    return {"valid_alpha": torch.stack(alphas).mean().item(), "valid_tau": torch.stack(taus).mean().item()}


def _blocks(recipe: DraftRecipe, step: int, length: int, device: str) -> RolloutBlocks:
    offset = 1 + int(np.random.default_rng((recipe.seed, step, 1)).integers(recipe.k))
    return RolloutBlocks.of(length, recipe.k, offset, device)


def _streams(
    target: Target, directory: Path, data: list[Path], valid: list[Path]
) -> tuple[TokenStream, TokenStream | None]:
    config = target.config
    tokenizer = load_tokenizer(directory, config.vocab_size)
    start = config.bos_token_id if config.bos_token_id is not None else 0
    end = config.eos_token_ids[0] if config.eos_token_ids else start
    build = lambda paths: TokenStream.build(paths, tokenizer, start, end, Chats(directory))  # noqa: E731
    return build(data), build(valid) if valid else None


def _check(recipe: DraftRecipe) -> None:
    if recipe.short_length <= 2 * recipe.k:
        raise DataError(f"sequences of {recipe.short_length} tokens are too short for blocks of k = {recipe.k}")
    if recipe.feedback and not recipe.activations:
        raise DataError("feedback memory needs the target's activations: use --no-feedback with --no-activations")
    if recipe.kind == "vanilla" and (recipe.init == "pruned" or recipe.activations):
        raise DataError(
            "a vanilla draft has its own width: it cannot be pruned from the target nor remember its activations"
        )
