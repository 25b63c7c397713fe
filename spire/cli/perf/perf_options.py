"""Parsing of the options of `spire perf-model`: target, drafts with their acceptance, devices, and the wire."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import typer

from spire.bench.prediction import recorded_acceptance, served_draft
from spire.cli.options import listed, numbers
from spire.cli.paths import SMOLLM2, TINY, own_draft, target_directory
from spire.cli.perf.perf_report import Candidate
from spire.cli.terminal import note
from spire.errors import SpireError
from spire.model.config import load_draft_config, load_model_config
from spire.perf import calibration
from spire.perf.hardware import GPUS, Carrier, Hardware, gpu
from spire.perf.perf_model import PAPER_K, PAPER_TAU, AcceptanceModel
from spire.perf.shapes import SHAPES, DraftKind, DraftShape, Shape, paper_draft, trained_draft
from spire.perf.wire import Wire, wire_of

_KINDS: dict[str, DraftKind] = {"vanilla": "vanilla", "magicdec": "magicdec", "spire": "spire"}
_CARRIERS: dict[str, Carrier] = {"shared_memory": "shared_memory", "grpc": "grpc"}
POWERS = [2**exponent for exponent in range(21)]


@dataclass(frozen=True)
class TargetOption:
    """The target that --target names. `longest` is the maximum number of positions of a sequence; None is no limit.

    `context`, `contexts`: default contexts of table and map. `tied`: embedding and unembedding are one matrix.
    """

    name: str
    shape: Shape
    longest: int | None
    context: int
    contexts: list[int]
    tied: bool = False
    directory: Path | None = None

    @property
    def of_the_paper(self) -> bool:
        return self.name in _PAPER_CONTEXTS

    def check(self, option: str, contexts: list[int]) -> list[int]:
        """Return `contexts` unchanged. Raises SpireError, naming `option`, if one exceeds the target's maximum."""
        if self.longest is not None and max(contexts) > self.longest:
            raise SpireError(f"{option} {max(contexts)}: {self.name} takes at most {self.longest} positions")
        return contexts


# Contexts of table and map for the paper's targets: those of its Figures 4 and 6.
_PAPER_CONTEXTS = {"seqax-67m": (512, POWERS[5:14]), "llama-3-70b": (65536, POWERS[12:])}


def find_target(name: str) -> TargetOption:
    """Return the target for the name of a shape, or of a model as `choose_pair` takes it. Raises SpireError."""
    if known := SHAPES.get(name):
        contexts = _PAPER_CONTEXTS[name] if known.longest is None else _contexts(known.longest)
        return TargetOption(name, known.shape, known.longest, *contexts)
    directory = target_directory(Path(name))
    if not directory.is_dir():
        names = ", ".join([*SHAPES, str(TINY), str(SMOLLM2)])
        raise SpireError(f"--target {name} is no directory and none of {names}")
    config = load_model_config(directory)
    longest = config.longest
    return TargetOption(name, Shape.of(config), longest, *_contexts(longest), config.tie_word_embeddings, directory)


def _contexts(longest: int) -> tuple[int, list[int]]:
    """Return the default context of the table and those of the map, for a target of at most `longest` positions."""
    return min(512, longest), [context for context in POWERS if 32 <= context <= longest][-9:] or [longest]


def find_candidate(
    name: str, goal: TargetOption, given: AcceptanceModel | None, context: int, window: str | None, machine: Hardware
) -> Candidate:
    own = own_draft(goal.directory) if goal.directory and name == "spire" else None
    directory = own or (None if name in _KINDS else Path(name))
    served = _draft(name, directory, goal)
    recorded = None if given or directory is None else recorded_acceptance(directory, context)
    acceptance = given or recorded or _published(name, goal)
    if served.kind == "vanilla":
        return Candidate(name, acceptance, {"all": served})
    rules = [served.window] if window is None else [None if window == "paper" else numbers(window)[0]]
    if window is None and goal.of_the_paper:
        rules.append(None)
    if machine.measured and served.kind == "spire":
        if rules[0] != served.window:
            raise SpireError(f"--window {window}: a SPIRe draft's pass was measured with its own window")
        rules = [served.window]
    windows = {"L/8" if rule is None else str(rule): replace(served, window=rule) for rule in rules}
    return Candidate(name, acceptance, windows)


def _draft(name: str, directory: Path | None, goal: TargetOption) -> DraftShape:
    if directory is None:
        return (paper_draft if goal.of_the_paper else trained_draft)(_KINDS[name], goal.shape)
    if not directory.is_dir():
        raise SpireError(f"--draft {name} is no directory and none of {', '.join(_KINDS)}")
    # The sizes of a draft may show that it belongs to another target.
    foreign = f"--draft {directory} is of another target"
    draft, target = Shape.of(load_model_config(directory)), goal.shape
    tapped = load_draft_config(directory).tapped_layers
    sizes = {"vocabulary": "vocab_size"} if target.vocab_size else {}
    if tapped:
        sizes |= {"width": "hidden_size", "heads": "heads", "KV heads": "kv_heads", "head width": "head_dim"}
    for what, size in sizes.items():
        ours, theirs = getattr(draft, size), getattr(target, size)
        if ours != theirs:
            raise SpireError(f"{foreign}: its {what} is {ours}, {goal.name} has {theirs}")
    if tapped and max(tapped) >= target.layers:
        enters = f"it is sent what enters layer {max(tapped)}, counted from 0"
        raise SpireError(f"{foreign}: {enters}, {goal.name} has {target.layers}")
    return served_draft(directory)


def find_acceptance(tau: float | None, shares: str | None, k: int, drafts: list[str]) -> AcceptanceModel | None:
    if tau is None and shares is None:
        return None
    if tau is not None and shares is not None:
        raise typer.BadParameter("--tau and --acceptance say the same thing: give one of them")
    if len(drafts) > 1:
        raise typer.BadParameter("--tau and --acceptance belong to one draft: give one --draft")
    if tau is not None:
        return AcceptanceModel.of_tau(tau, k)
    return AcceptanceModel(tuple(listed(shares or "", float, "shares like 0.8,0.6,0.5")))


def _published(name: str, goal: TargetOption) -> AcceptanceModel:
    """Return the acceptance that the paper measures or assumes for this draft and target; raises SpireError if none."""
    if goal.of_the_paper and name in _KINDS:
        return AcceptanceModel.of_tau(PAPER_TAU[_KINDS[name]], PAPER_K)
    raise SpireError(
        f"no τ is known of draft {name} for target {goal.name}: measure it with 'spire eval acceptance' while the pair "
        "is served, and give --tau, or --acceptance with the shares it prints"
    )


def find_hardware(name: str | None, hoi: float, bytes_per_value: int | None, shape: Shape) -> Hardware:
    if name is None:
        return Hardware.of_intensity(hoi, bytes_per_value or 1)
    if name in GPUS:
        return gpu(name, bytes_per_value or 2)
    file = calibration.default_file() if name == calibration.CALIBRATED else Path(name)
    if name != calibration.CALIBRATED and not file.is_file():
        raise SpireError(f"--hardware {name} is no file and none of {', '.join([*GPUS, calibration.CALIBRATED])}")
    found = calibration.load(file)
    if bytes_per_value not in (None, found.hardware.bytes_per_value):
        raise SpireError(f"--bytes {bytes_per_value}: {file} was measured with {found.dtype}")
    if found.target != shape:
        note(f"{file} was measured at the widths of another target: {found.target}")
    return found.hardware


def find_wire(
    carrier: str | None, machine: Hardware, another: bool, round_trip_ms: float | None, gb_per_s: float | None
) -> Wire:
    """Return message costs to the draft's device, by default of gRPC to `another` kind of device, else shared memory.

    Raises SpireError if `machine.relative` (no costs in seconds) or the carrier is unknown.
    """
    if machine.relative:
        raise SpireError("--split needs the seconds of a device: name one with --hardware")
    name = carrier or ("grpc" if another else "shared_memory")
    if name not in _CARRIERS:
        raise SpireError(f"--carrier {name} is none of {', '.join(_CARRIERS)}")
    wire = wire_of(_CARRIERS[name], machine)
    if round_trip_ms is not None:
        wire = replace(wire, round_trip=round_trip_ms / 1000)
    if gb_per_s is not None:
        wire = replace(wire, activations=1e-9 / gb_per_s, guesses=1e-9 / gb_per_s)
    return wire
