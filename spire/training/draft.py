"""`spire train draft`: training of a draft for a frozen target (paper sections 3.2 to 3.4, 4.1).

A SPIRe draft learns by block rollouts: each training sequence is divided into blocks of k positions, and the draft runs
k passes over all blocks in parallel, with teacher forcing. The target runs once per sequence; its activations are used
at once and never stored. The offset of the blocks is drawn for each step. The paper's ablations and its vanilla
baseline are values of the same recipe: the draft's initialisation, its memory, and its loss.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_draft, load_target, save_draft
from spire.errors import DataError
from spire.model.config import DraftConfig, ModelConfig, load_model_config
from spire.model.draft import BlockRollouts, Draft, OwnPast, RolloutBlocks, input_scale, last_layers, prune
from spire.model.target import Target, WholeSequence
from spire.perf.shapes import SERVED_SINK, SERVED_WINDOW, quarter_of
from spire.text.documents import Chats
from spire.text.text_files import find_files
from spire.training.corpus import TokenStream
from spire.training.on_policy import OnPolicy
from spire.training.run import Checkpoint, Execution, StepResult, adamw, muon_and_adamw, train_steps
from spire.training.target import initialise

Loss = Literal["mixed", "mixed-log", "data"]


@dataclass(frozen=True)
class DraftRecipe:
    """All values, besides target and text, that determine a trained draft. The defaults are those of the bundled one.

    `recipe_for` adapts the defaults to a target, for example `layers` to a quarter of the target's layers.

    `start_from` is the directory of a draft to train further, instead of a new draft initialised as `init` says.
    `on_policy` is the share of the short sequences whose second half is sampled from the target.
    `loss`: "mixed" is the paper's ω · CE(p, q) − (1 − ω) · α (α: acceptance); "mixed-log" has log α in place of α;
    "data" is cross-entropy on the text itself. ω changes linearly from `omega` to `omega_final`.
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
        """Return the target layers whose weights the draft copies and whose inputs it attends to. Raises DataError."""
        if self.copied_layers is None:
            return last_layers(target, self.layers)
        if wrong := [layer for layer in self.copied_layers if not 0 <= layer < target.num_hidden_layers]:
            raise DataError(
                f"layer {wrong[0]} cannot be copied: the target has layers 0 to {target.num_hidden_layers - 1}"
            )
        return self.copied_layers


def recipe_for(target_directory: Path, given: dict[str, Any]) -> DraftRecipe:
    """Return the recipe of a draft for this target; `given` overrides the defaults. Raises DataError if invalid."""
    choices = get_type_hints(DraftRecipe)
    for name in ("kind", "init", "loss", "optimizer"):
        if name in given and given[name] not in get_args(choices[name]):
            raise DataError(f"{name} is {given[name]!r}: it is one of {', '.join(get_args(choices[name]))}")
    if "omega" in given:
        given = {"omega_final": given["omega"]} | given
    target, fitted = load_model_config(target_directory), dict[str, Any]()
    if given.get("kind") == "vanilla":  # the paper's baseline (section 4.1), which is half as wide, too
        fitted = {
            "layers": max(1, target.num_hidden_layers // 2),
            "init": "random",
            **dict.fromkeys(("scale_input", "activations", "feedback"), False),
            "window": target.longest,
            "loss": "data",
        }
    elif "start_from" in given:
        fitted["layers"] = load_model_config(Path(given["start_from"])).num_hidden_layers
    else:
        fitted["layers"] = quarter_of(target.num_hidden_layers)
    return DraftRecipe(**fitted | given)


def train_draft(
    target_directory: Path,
    data: list[Path],
    valid: list[Path],
    out: Path,
    recipe: DraftRecipe,
    execution: Execution = Execution(),
) -> bool:
    """Train a draft and write it to `out`. Training resumes from a checkpoint in `out/run`, if there is one.

    Returns False if the time ran out before the last step.
    """
    find_files([*data, *valid])  # reports missing files before a large target is loaded
    target, identity = load_target(target_directory)
    device, config, chats = execution.device, target.config, Chats(target_directory)
    target = target.to(device)
    _check(recipe)
    tokenizer = load_tokenizer(target_directory, config.vocab_size)
    start = config.bos_token_id if config.bos_token_id is not None else 0
    end = config.eos_token_ids[0] if config.eos_token_ids else start
    stream = TokenStream.build(data, tokenizer, start, end, chats)
    held_out = TokenStream.build(valid, tokenizer, start, end, chats) if valid else None
    source: TokenStream | OnPolicy = stream
    if recipe.on_policy:
        source = OnPolicy.build(target, identity, stream, recipe.on_policy, recipe.short_length)
    torch.manual_seed(recipe.seed)
    draft = new_draft(target, identity, recipe).to(device).requires_grad_(True).train()
    optimizers = _optimizers(draft, recipe, _scale_embedding(draft, target, stream, recipe))
    checkpoint = Checkpoint(out / "run", asdict(recipe) | {"target": identity})
    objective = torch.compile(rollout_loss, dynamic=False) if execution.compiled else rollout_loss

    def forward(step: int) -> StepResult:
        length = min(recipe.length_at(step), config.longest)
        tokens_BT = torch.from_numpy(source.batch(recipe.seed, step, max(1, recipe.tokens_per_step // length), length))
        omega = torch.tensor(recipe.omega_at(step), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, step, length, device)
            loss, alpha = objective(draft, target, tokens_BT.to(device), blocks, recipe.loss, omega)
        figures = {"length": float(length)} if alpha is None else {"alpha": alpha.item(), "length": float(length)}
        return StepResult(loss, figures, tokens_BT.numel())

    def validate() -> dict[str, float]:
        return validation_figures(draft, target, held_out, recipe, device) if held_out else {}

    lengths, decay = [recipe.length_at(step) for step in range(recipe.steps)], recipe.decay_share
    done = train_steps("draft", checkpoint, draft, optimizers, lengths, decay, forward, validate, execution.minutes)
    if done:
        save_draft(out, draft)
    return done


def _scale_embedding(draft: Draft, target: Target, stream: TokenStream, recipe: DraftRecipe) -> float:
    """Scale a new draft's embedding to the magnitude of the copied layers' input, and return the factor."""
    if not recipe.scale_input:
        return 1.0
    weight = draft.embed_tokens.weight
    sample_BT = torch.from_numpy(stream.batch(recipe.seed, 0, 4, recipe.short_length)).to(weight.device)
    factor = input_scale(target, recipe.copied(target.config)[0], sample_BT)
    if recipe.start_from is None:
        weight.data.mul_(factor)
    return factor


def new_draft(target: Target, identity: str, recipe: DraftRecipe) -> Draft:
    """Return a new draft, or the draft stored in `recipe.start_from`. Raises DataError if the latter does not fit."""
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
    """Return the draft's settings, which must equal those of a run that trains the draft further."""
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
    update = {"num_hidden_layers": len(copied), "tie_word_embeddings": False}
    if recipe.kind == "vanilla":
        if shape.hidden_size % 2 or shape.intermediate_size % 2 or shape.head_dim % 4:
            raise DataError(
                f"a vanilla draft is half as wide as its target: width {shape.hidden_size}, MLP "
                f"{shape.intermediate_size} and head width {shape.head_dim} cannot all be halved"
            )
        update |= {name: getattr(shape, name) // 2 for name in ("hidden_size", "intermediate_size", "head_dim")}
        update["num_hidden_layers"] = recipe.layers
    fresh = Draft(shape.model_copy(update=update), draft)
    initialise(fresh, fresh.layers)
    return fresh


def _optimizers(draft: Draft, recipe: DraftRecipe, input_factor: float) -> list[torch.optim.Optimizer]:
    """Return the draft's optimizers. The embedding's learning rate is multiplied by `input_factor`."""
    if recipe.freeze_embeddings:
        draft.embed_tokens.requires_grad_(False)
        draft.lm_head.requires_grad_(False)
    if recipe.optimizer == "muon":
        optimizers = muon_and_adamw(draft, draft.layers, recipe.muon_rate, recipe.adamw_rate)
    else:
        optimizers = [adamw([p for p in draft.parameters() if p.requires_grad], recipe.adamw_rate)]
    if not recipe.freeze_embeddings:
        # A larger tensor needs larger steps.
        (group,), embedding = optimizers[-1].param_groups, draft.embed_tokens.weight
        group["params"] = [p for p in group["params"] if p is not embedding]
        optimizers[-1].add_param_group({**group, "params": [embedding], "lr": group["lr"] * input_factor})
    return optimizers


def rollout_loss(
    draft: Draft, target: Target, tokens_BL: Tensor, blocks: RolloutBlocks, loss: Loss, omega: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the loss and the acceptance α, both means over drafted positions. α is None if `loss` is "data"."""
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
    """Run the draft's passes; return for each the positions fed [T], log q [B, T, V], and p [B, T, V] if needed."""
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
    """Return Σ_x min(p(x), q(x)): the probability that a draft token is accepted under the rejection rule."""
    return torch.minimum(p, log_q.exp()).sum(dim=-1)


@torch.no_grad()
def validation_figures(
    draft: Draft, target: Target, stream: TokenStream, recipe: DraftRecipe, device: str, batches: int = 8
) -> dict[str, float]:
    """Return α (mean acceptance of a draft token) and τ (mean number of tokens per round) on windows of held-out text.

    With teacher forcing, τ = 1 + Σ_i E[α_1 · … · α_i] over blocks of k. `spire eval acceptance` measures τ on policy.
    """
    alphas, taus = [], []
    for number in range(batches):
        tokens_BT = torch.from_numpy(stream.batch(0, number, 4, recipe.short_length)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, number, recipe.short_length, device)
            passes = _passes(draft, target, tokens_BT, blocks, needs_p=True)
        alpha_kBT = torch.stack([_alpha(p, log_q) for _, log_q, p in passes if p is not None])
        if len(passes) == 1:  # one pass feeds all positions: blocks are consecutive positions
            alpha_kBT = alpha_kBT[0].unfold(1, recipe.k, recipe.k).permute(2, 0, 1)
        alphas.append(alpha_kBT.mean())
        taus.append(1 + alpha_kBT.cumprod(dim=0).mean(dim=(1, 2)).sum())
    return {"valid_alpha": torch.stack(alphas).mean().item(), "valid_tau": torch.stack(taus).mean().item()}


def _blocks(recipe: DraftRecipe, step: int, length: int, device: str) -> RolloutBlocks:
    offset = 1 + int(np.random.default_rng((recipe.seed, step, 1)).integers(recipe.k))
    return RolloutBlocks.of(length, recipe.k, offset, device)


def _check(recipe: DraftRecipe) -> None:
    if recipe.short_length <= 2 * recipe.k:
        raise DataError(f"sequences of {recipe.short_length} tokens are too short for blocks of k = {recipe.k}")
    if recipe.feedback and not recipe.activations:
        raise DataError("feedback memory needs the target's activations: use --no-feedback with --no-activations")
    if recipe.kind == "vanilla" and (recipe.init == "pruned" or recipe.activations):
        raise DataError(
            "a vanilla draft has its own width: it cannot be pruned from the target nor remember its activations"
        )
