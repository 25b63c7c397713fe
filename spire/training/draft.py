"""`spire train draft`: training of a draft for a frozen target (paper sections 3.2 to 3.4, 4.1).

A SPIRe draft learns by block rollouts: each training sequence is divided into blocks of k positions, and the draft runs
k passes over all blocks in parallel, with teacher forcing. The offset of the blocks is drawn for each step. The paper's
ablations and its vanilla baseline are values of the same recipe: the draft's initialisation, its memory, and its loss.
Of chats the draft learns the answers; of text it learns random windows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_draft, load_embeddings, load_target, sampled_hash, save_draft
from spire.errors import DataError
from spire.model.config import DraftConfig, ModelConfig, SharedEmbeddings, load_draft_config, load_model_config
from spire.model.draft import Draft, RolloutBlocks, input_scale, last_layers, prune, spread_layers
from spire.model.placement import choose_dtype
from spire.model.target import Target
from spire.perf.shapes import SERVED_SINK, SERVED_WINDOW, quarter_of
from spire.text.documents import Chats, hold_chats
from spire.text.text_files import find_files
from spire.training.conversations import Conversations, TrainingBatch
from spire.training.corpus import TokenStream
from spire.training.on_policy import OnPolicy
from spire.training.rollouts import Loss, acceptance, rollout_loss
from spire.training.run import Checkpoint, Execution, StepResult, adamw, muon_and_adamw, train_steps
from spire.training.sources import Source, WholeConversations, Windows, most_frequent
from spire.training.target import initialise
from spire.training.teacher import StoredTeacher, Taught, teach

# A draft for a larger vocabulary proposes only the most frequent tokens, as many as these.
_WHOLE_VOCABULARY, _OWN_VOCABULARY = 16384, 8192
# The rate for layers that are copied from a target trained by AdamW. Conversations longer than this are cut off.
_REAL_RATE, _LONGEST_CONVERSATION = 1e-3, 1024


@dataclass(frozen=True)
class DraftRecipe:
    """All values, besides target and text, that determine a trained draft. The defaults are those of the bundled one.

    `recipe_for` adapts the defaults to a target, for example `layers` to a quarter of the target's layers.

    `start_from` is the directory of a draft to train further, instead of a new draft initialised as `init` says.
    `vocabulary` is the number of tokens that the draft can propose, the most frequent ones of the text; None: all.
    `freeze_embeddings`: embedding and unembedding remain the target's, and are not stored with the draft.
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
    vocabulary: int | None = None
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
        start_from = Path(given["start_from"])
        begun = load_draft_config(start_from)
        fitted["layers"] = load_model_config(start_from).num_hidden_layers
        fitted["vocabulary"], fitted["copied_layers"] = begun.vocabulary, begun.tapped_layers or None
    else:
        fitted["layers"] = quarter_of(target.num_hidden_layers)
    if target.vocab_size > _WHOLE_VOCABULARY and given.get("init") != "random" and given.get("kind") != "vanilla":
        real = {"freeze_embeddings": True, "optimizer": "adamw", "adamw_rate": _REAL_RATE}
        copied = spread_layers(target, given.get("layers", fitted["layers"]))
        fitted = {"vocabulary": _OWN_VOCABULARY, "copied_layers": copied} | real | fitted
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
    for option, paths in {"--data": data, "--valid": valid}.items():
        find_files(paths, option)  # reports missing files before a large target is loaded
    device = execution.device
    target, identity = load_target(target_directory, target_dtype(target_directory, device), device)
    _check(recipe, target.config)
    source = source_of(data, target_directory, target, identity, recipe)
    held_out = held_out_source(valid, target_directory, target.config, recipe) if valid else None
    torch.manual_seed(recipe.seed)
    vocabulary_W = most_frequent(source, recipe.vocabulary, target.config.vocab_size, target.config.eos_token_ids)
    draft = new_draft(target, identity, recipe, vocabulary_W, target_directory)
    draft = draft.to(device).requires_grad_(True).train()
    factor = _scale_embedding(draft, target, source, recipe)
    optimizers = _optimizers(draft, recipe, factor)
    checkpoint = Checkpoint(out / "run", asdict(recipe) | {"target": identity, "data": source.data})
    objective = torch.compile(rollout_loss, dynamic=False) if execution.compiled else rollout_loss
    tapped, needs_p = draft.draft.tapped_layers, recipe.loss != "data"
    stored = source.stored_outputs(target, identity, tapped, device, recipe.steps) if needs_p or tapped else None

    def forward(step: int) -> StepResult:
        batch = source.batch(step)
        omega = torch.tensor(recipe.omega_at(step), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            taught = _taught(stored, target, batch, tapped, device) if needs_p or tapped else None
            blocks = _blocks(recipe, step, batch.tokens_BL.shape[1], device)
            loss, alpha = objective(draft, target, taught, batch.to(device), blocks, recipe.loss, omega)
        length = float(batch.tokens_BL.shape[1])
        figures = {"length": length} if alpha is None else {"alpha": alpha.item(), "length": length}
        return StepResult(loss, figures, batch.tokens_BL.numel())

    def validate() -> dict[str, float]:
        return validation_figures(draft, target, held_out, recipe, device) if held_out else {}

    lengths, decay = [source.length_at(step) for step in range(recipe.steps)], recipe.decay_share
    done = train_steps("draft", checkpoint, draft, optimizers, lengths, decay, forward, validate, execution.minutes)
    if done:
        save_draft(out, draft)
    return done


def source_of(data: list[Path], target_directory: Path, target: Target, identity: str, recipe: DraftRecipe) -> Source:
    """Return the training batches that a recipe draws from files: conversations if there are any, else windows."""
    corpus = _corpus(data, target_directory, target.config, recipe)
    if isinstance(corpus, Conversations):
        return WholeConversations(corpus, recipe.seed, recipe.tokens_per_step)
    stream: TokenStream | OnPolicy = corpus
    if recipe.on_policy:
        stream = OnPolicy.build(target, identity, corpus, recipe.on_policy, recipe.short_length)
    longest = target.config.longest
    return Windows(stream, recipe.seed, recipe.tokens_per_step, lambda step: min(recipe.length_at(step), longest))


def held_out_source(valid: list[Path], target_directory: Path, config: ModelConfig, recipe: DraftRecipe) -> Source:
    """Return the same batches of held-out text for every recipe of the same lengths."""
    corpus, tokens = _corpus(valid, target_directory, config, recipe), 4 * recipe.short_length
    if isinstance(corpus, Conversations):
        return WholeConversations(corpus, 0, tokens)
    return Windows(corpus, 0, tokens, lambda _: recipe.short_length)


def _corpus(
    paths: list[Path], target_directory: Path, config: ModelConfig, recipe: DraftRecipe
) -> Conversations | TokenStream:
    """Read training data: as conversations if there are any, otherwise as one stream of text."""
    chats, tokenizer = Chats(target_directory), load_tokenizer(target_directory, config.vocab_size)
    start = config.bos_token_id if config.bos_token_id is not None else 0
    end = config.eos_token_ids[0] if config.eos_token_ids else start
    if not hold_chats(find_files(paths)):
        return TokenStream.build(paths, tokenizer, start, end, chats)
    longest = min(_LONGEST_CONVERSATION, config.longest)
    return Conversations.build(paths, tokenizer, start, end, chats, recipe.short_length, longest)


def target_dtype(target_directory: Path, device: str) -> torch.dtype:
    """Return the dtype in which the target runs: its own, if the hardware multiplies it, otherwise float32."""
    own = load_model_config(target_directory).torch_dtype
    return torch.float32 if own == "float32" else choose_dtype("auto", torch.device(device))


def load_pair(target_directory: Path, draft_directory: Path, device: str) -> tuple[Target, Draft]:
    """Load a trained draft and its target. Raises the errors of `load_draft`, and DataError for another target."""
    target, identity = load_target(target_directory, target_dtype(target_directory, device), device)
    draft = load_draft(draft_directory, device=device, target=target_directory)
    if draft.draft.target_fingerprint != identity:
        raise DataError(f"{draft_directory} was trained for another target than {target_directory}")
    return target, draft


def _taught(
    stored: StoredTeacher | None, target: Target, batch: TrainingBatch, tapped: tuple[int, ...], device: str
) -> Taught:
    """Return the target's outputs for a batch: those that were stored, if any, or those of a forward."""
    if stored is None:
        return teach(target, batch.tokens_BL.to(device), tapped)
    taps_BLND, hidden_BLD, log_sum_BL = stored(batch)
    on_device = None if taps_BLND is None else taps_BLND.to(device)
    return Taught(on_device, hidden_BLD.to(device), log_sum_BL.to(device))


def _scale_embedding(draft: Draft, target: Target, source: Source, recipe: DraftRecipe) -> float:
    """Scale a new draft's embedding to the magnitude of the copied layers' input, and return the factor."""
    if not recipe.scale_input:
        return 1.0
    weight, shared = draft.embed_tokens.weight, draft.draft.embeddings
    factor = input_scale(target, recipe.copied(target.config)[0], source.batch(0).tokens_BL.to(weight.device))
    if recipe.start_from is None:
        weight.data.mul_(factor)
        if shared:
            scaled = shared.model_copy(update={"scale": factor})
            draft.draft = draft.draft.model_copy(update={"embeddings": scaled})
    return factor


def new_draft(
    target: Target,
    identity: str,
    recipe: DraftRecipe,
    vocabulary_W: Tensor | None = None,
    target_directory: Path | None = None,
) -> Draft:
    """Return a new draft, or the draft stored in `recipe.start_from`. Raises DataError if the latter does not fit.

    `target_directory` is needed for a draft whose embeddings are the target's.
    """
    fresh = _fresh_draft(target, identity, recipe, vocabulary_W)
    if recipe.freeze_embeddings and recipe.init == "pruned" and target_directory:
        shared = SharedEmbeddings(scale=1.0, fingerprint=sampled_hash(load_embeddings(target_directory)))
        fresh.draft = fresh.draft.model_copy(update={"embeddings": shared})
    if recipe.start_from is None:
        return fresh
    given = load_draft(Path(recipe.start_from), target=target_directory)
    # A draft that changes needs another head.
    changed: dict[str, Any] = {"stop_head": None}
    if given.draft.embeddings:  # the tokens that this run's text has most, as many as asked
        changed["vocabulary"] = fresh.draft.vocabulary
        given.vocabulary, given.lm_head = fresh.vocabulary, fresh.lm_head
    given.draft, given.stop_head = given.draft.model_copy(update=changed), None
    asked = _described(fresh)
    for name, value in _described(given).items():
        if value != asked[name]:
            raise DataError(f"{recipe.start_from} has {name} = {value!r}, this run asks for {asked[name]!r}")
    return given


def _described(draft: Draft) -> dict[str, Any]:
    """Return the draft's settings, which must equal those of a run that trains the draft further."""
    own = draft.draft.model_dump(mode="json", exclude={"embeddings"}) | {"embeddings": bool(draft.draft.embeddings)}
    return draft.config.model_dump(mode="json", exclude={"torch_dtype"}) | own


def _fresh_draft(target: Target, identity: str, recipe: DraftRecipe, vocabulary_W: Tensor | None) -> Draft:
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
        vocabulary=None if vocabulary_W is None else len(vocabulary_W),
    )
    if recipe.init == "pruned":
        return prune(target, draft, copied, vocabulary_W)
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
    fresh.vocabulary = vocabulary_W
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


def validation_figures(
    draft: Draft, target: Target, source: Source, recipe: DraftRecipe, device: str, batches: int = 8
) -> dict[str, float]:
    """Return α (mean acceptance of a draft token) and τ (mean number of tokens per round) on held-out text.

    With teacher forcing, τ = 1 + Σ_i E[α_1 · … · α_i] over blocks of k. `spire eval acceptance` measures τ on policy.
    """
    found = []
    for number in range(batches):
        batch = source.batch(number).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            blocks = _blocks(recipe, number, batch.tokens_BL.shape[1], device)
            taught = teach(target, batch.tokens_BL, draft.draft.tapped_layers)
            found.append(acceptance(draft, target, taught, batch, blocks))
    alpha, accepted, positions, whole = (sum(column) for column in zip(*found, strict=True))
    return {"valid_alpha": alpha / max(1, positions), "valid_tau": 1 + accepted / max(1, whole)}


def _blocks(recipe: DraftRecipe, step: int, length: int, device: str) -> RolloutBlocks:
    offset = 1 + int(np.random.default_rng((recipe.seed, step, 1)).integers(recipe.k))
    return RolloutBlocks.of(length, recipe.k, offset, device)


def _check(recipe: DraftRecipe, target: ModelConfig) -> None:
    if recipe.vocabulary is not None and (recipe.vocabulary % 32 or not 0 < recipe.vocabulary <= target.vocab_size):
        raise DataError(
            f"vocabulary is {recipe.vocabulary}: it is a multiple of 32, at most the target's {target.vocab_size}"
        )
    if recipe.short_length <= 2 * recipe.k:
        raise DataError(f"sequences of {recipe.short_length} tokens are too short for blocks of k = {recipe.k}")
    if recipe.feedback and not recipe.activations:
        raise DataError("feedback memory needs the target's activations: use --no-feedback with --no-activations")
    if recipe.kind == "vanilla" and (recipe.init == "pruned" or recipe.activations):
        raise DataError(
            "a vanilla draft has its own width: it cannot be pruned from the target nor remember its activations"
        )
