"""The record of `spire doctor --calibrate`: what this machine was measured to do, as the performance model takes it.

One JSON file, by default `calibration.json` in the user's cache directory. Reading it does not import torch; how it is
measured is told in `spire.microbenchmarks`, which `spire.calibrator` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from spire.errors import SpireError
from spire.files import user_cache, write_whole
from spire.hardware import Hardware
from spire.shapes import Shape

CALIBRATED = "calibrated"


@dataclass(frozen=True)
class Machine:
    """Where it was measured. `threads` are the target's; `draft_threads` those of its draft."""

    system: str
    processor: str
    cores: int
    threads: int
    draft_threads: int
    device: str
    torch: str


@dataclass(frozen=True)
class Calibration:
    """`hardware` computes in `dtype` at the widths of `target`; `matmul` holds its products' FLOP/s for each dtype."""

    measured_at: str
    took_seconds: float
    machine: Machine
    target: Shape
    dtype: str
    matmul: dict[str, tuple[tuple[int, float], ...]]
    hardware: Hardware


_JSON = TypeAdapter(Calibration)


def default_file() -> Path:
    """`calibration.json` in the user's cache."""
    return user_cache() / "calibration.json"


def save(calibration: Calibration, file: Path) -> None:
    """Raises SpireError when the file cannot be written."""
    write_whole(file, lambda unfinished: unfinished.write_bytes(_JSON.dump_json(calibration, indent=1) + b"\n"))


def load(file: Path) -> Calibration:
    """Raises SpireError, saying how to measure, for a file that is absent or not of this version."""
    try:
        return _JSON.validate_json(file.read_bytes())
    except OSError as error:
        raise SpireError(f"no calibration at {file}: measure this machine with 'spire doctor --calibrate'") from error
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "its beginning"
        advice = "measure again with 'spire doctor --calibrate'"
        raise SpireError(f"{file} is no calibration of this version ({place}): {advice}") from error


def to_json(calibration: Calibration) -> str:
    return _JSON.dump_json(calibration).decode()
