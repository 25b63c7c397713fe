"""The common parts of training runs: checkpoint, optimizers, schedule, progress, and the training loop.

A checkpoint is a safetensors file of parameters and optimizer state, with step and recipe as metadata. A new checkpoint
is written to another file and renamed, so that a kill at any moment leaves a complete checkpoint.
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from spire.errors import DataError
from spire.files import write_whole
from spire.progress import Count, count_shown

_REPORT_EVERY = 20
_SAVE_EVERY = 200
_WARMUP = 50
# A prediction times steps of this many lengths, and of the longest.
_LENGTHS_TIMED = 3


class Checkpoint:
    """The resumable state of a training run, in the file `state.safetensors` of the run's directory."""

    def __init__(self, directory: Path, recipe: dict[str, Any]):
        self.file = directory / "state.safetensors"
        # The number of steps may change until the learning rate decays: before, it has no effect.
        self.recipe = json.loads(json.dumps({name: value for name, value in recipe.items() if name != "steps"}))
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{directory} cannot be made: {error.strerror}") from error

    def save(self, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Replace the saved state. Raises DataError, and leaves the saved state, if a weight is not finite."""
        # Tied tensors are written twice, because safetensors refuses tensors that share memory.
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
        if diverged := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
            raise DataError(f"{diverged[0]} is not finite after {step} steps: train from the start at a lower rate")
        tensors = {f"model.{name}": tensor.detach().clone().contiguous() for name, tensor in state.items()}
        for number, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{number}.{parameter}.{name}"] = torch.as_tensor(value).detach().contiguous()
        metadata = {"step": str(step), "recipe": json.dumps(self.recipe)}
        write_whole(self.file, lambda unfinished: save_file(tensors, unfinished, metadata=metadata))

    def step(self) -> int:
        """Return the next step of the saved state, 0 without one. Raises DataError if it has another recipe."""
        if not self.file.exists():
            return 0
        with safe_open(self.file, framework="pt") as stored:
            metadata = stored.metadata()
        # Checkpoints of earlier versions do not tell their data.
        recipe = {"data": self.recipe.get("data")} | json.loads(metadata["recipe"])
        for name, value in self.recipe.items():
            if recipe.get(name) != value:
                raise DataError(
                    f"{self.file} was made with {name} = {recipe.get(name)!r}, this run asks for {value!r}: "
                    "use the same value or another --out"
                )
        return int(metadata["step"])

    def resume(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Load the saved state, if there is one."""
        if not self.file.exists():
            return
        with safe_open(self.file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        trained = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        model.load_state_dict(trained, strict=False)  # frozen parameters are not stored
        for number, optimizer in enumerate(optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    parameter, key = name.removeprefix(f"optimizer.{number}.").split(".", 1)
                    state.setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def muon_and_adamw(
    model: nn.Module, layers: nn.Module, muon_rate: float, adamw_rate: float, muon_weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of `layers` and AdamW for all other parameters of `model`.

    A draft needs its target's optimizer: matrices trained by Muon are so large that AdamW's steps hardly change them.
    """
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=muon_weight_decay, ns_steps=5)
    return [muon, adamw(rest, adamw_rate)]


def adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return AdamW with the settings that all training runs share."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


class ProgressLog:
    """The figures of a training run: beside its progress, and in `log.jsonl` with a JSON line per report."""

    def __init__(self, directory: Path, progress: Count):
        self.lines = (directory / "log.jsonl").open("a", buffering=1)
        self._progress = progress
        self.began, self.tokens = time.monotonic(), 0

    def report(self, step: int, **figures: float) -> None:
        seconds = time.monotonic() - self.began
        figures["tokens_per_second"] = self.tokens / seconds
        self._progress.figures(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))
        self.note(step, seconds=round(seconds, 1), **figures)

    def note(self, step: int, **figures: float) -> None:
        """Write a line with these figures to `log.jsonl` only."""
        self.lines.write(json.dumps({"step": step, **figures}) + "\n")


def predict(
    lengths: list[int],
    first: int,
    forward: Callable[[int], StepResult],
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
) -> tuple[float, int]:
    """Predict the seconds and the peak bytes of memory of training steps with these sequence lengths.

    Of the longest and of the most frequent lengths, one step compiles and a second one is timed, with an update at rate
    zero; other lengths are taken to need the mean of these times. Model and optimizers do not change.
    """
    counts = Counter(lengths)
    timed = dict.fromkeys([max(counts), *(length for length, _ in counts.most_common(_LENGTHS_TIMED))])
    seconds_of, waits = dict[int, float](), next(model.parameters()).device.type == "cuda"
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for length in timed:
        for _ in range(2):  # the first one compiles
            began = time.perf_counter()
            result = forward(first + lengths.index(length))
            result.loss.backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                optimizer.step()
            if waits:
                torch.cuda.synchronize()
            seconds_of[length] = time.perf_counter() - began
            model.zero_grad(set_to_none=True)
    for optimizer, of_groups in zip(optimizers, rates, strict=True):
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
            group["lr"] = rate
    usual = sum(seconds_of[length] * counts[length] for length in timed) / sum(counts[length] for length in timed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if waits:
        peak = torch.cuda.max_memory_allocated(next(model.parameters()).device)
    return sum(count * seconds_of.get(length, usual) for length, count in counts.items()), peak


@dataclass(frozen=True)
class Execution:
    """Settings of a training run without effect on the result. After `minutes` the run stops and can be resumed."""

    device: str = "cpu"
    compiled: bool = True
    minutes: float | None = None


class StepResult(NamedTuple):
    """The result of one training step's forward: the loss, other figures to show, and the number of tokens."""

    loss: Tensor
    figures: dict[str, float]
    tokens: int


def train_steps(
    name: str,
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    lengths: list[int],
    decay_share: float,
    forward: Callable[[int], StepResult],
    validate: Callable[[], dict[str, float]],
    minutes: float | None = None,
) -> bool:
    """Run the training steps (forward, backward, clip, update) from the checkpoint on, with periodic reports and saves.

    `lengths` has each step's sequence length. The learning rate rises for 50 steps, is constant, then falls linearly to
    zero over the last `decay_share` of the steps. Returns False if `minutes` have passed before the last step.
    """
    # Of norms, whose inputs autocast leaves in bfloat16 and whose weights are float32. It says nothing to users.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    began, steps = time.monotonic(), len(lengths)
    first = checkpoint.step()
    if first > steps:
        raise DataError(f"{checkpoint.file} has {first} steps behind it, this run asks for {steps}: use another --out")
    console = Console(stderr=True)
    with console.status(f"{name}: a few steps, to say how long all will take"):
        seconds, peak = predict(lengths[first:], first, forward, model, optimizers) if first < steps else (0.0, 0)
    checkpoint.resume(model, optimizers)
    need = f"{len(lengths[first:]):,} steps, about {seconds / 60:.0f} min, {peak / 1e9:.1f} GB of memory"
    console.print(f"{name}: {need}", highlight=False)

    def rate(done: int) -> float:
        step = first + done
        return min((step + 1) / _WARMUP, 1.0, (steps - step) / (decay_share * steps))

    schedulers = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    with count_shown(name, steps, "steps", first) as progress:
        log = ProgressLog(checkpoint.file.parent, progress)
        log.note(first, predicted_seconds=seconds, predicted_bytes=peak)
        for step in range(first, steps):
            result = forward(step)
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            log.tokens += result.tokens
            if step % _REPORT_EVERY == 0:
                log.report(step, loss=result.loss.item(), **result.figures)
            if (step + 1) % _SAVE_EVERY == 0:
                checkpoint.save(step + 1, model, optimizers)
                if figures := validate():
                    log.report(step, tokens=(step + 1) * result.tokens, **figures)
            progress.advance()
            if minutes is not None and time.monotonic() - began > 60 * minutes and step + 1 < steps:
                checkpoint.save(step + 1, model, optimizers)
                return False
    checkpoint.save(steps, model, optimizers)
    return True
