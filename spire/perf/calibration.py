"""The record of `spire doctor --calibrate`: measured costs of this machine in the form the performance model takes.

The record is one JSON file, by default `calibration.json` in the user's cache directory; reading it does not import
torch. `spire.perf.calibrator` measures the costs by running `spire.perf.microbenchmarks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from spire.errors import SpireError
from spire.files import user_cache, write_whole
from spire.perf.hardware import Hardware
from spire.perf.shapes import Shape

CALIBRATED = "calibrated"


@dataclass(frozen=True)
class Machine:
    """Description of the measured machine. The target uses `threads` threads, its draft `draft_threads`."""

    system: str
    processor: str
    cores: int
    threads: int
    draft_threads: int
    device: str
    torch: str


@dataclass(frozen=True)
class Calibration:
    """Costs of `hardware` measured in `dtype` at the widths of `target`; `matmul`: (rows, FLOP/s) for each dtype."""

    measured_at: str
    took_seconds: float
    machine: Machine
    target: Shape
    dtype: str
    matmul: dict[str, tuple[tuple[int, float], ...]]
    hardware: Hardware


_JSON = TypeAdapter(Calibration)


def default_file() -> Path:
    """Return the path of `calibration.json` in the user's cache."""
    return user_cache() / "calibration.json"


def save(calibration: Calibration, file: Path) -> None:
    """Write a calibration to `file`. Raises SpireError if the file cannot be written."""
    write_whole(file, lambda unfinished: unfinished.write_bytes(_JSON.dump_json(calibration, indent=1) + b"\n"))


def load(file: Path) -> Calibration:
    """Read a calibration. Raises SpireError with advice for a file that is missing or not of this version."""
    try:
        return _JSON.validate_json(file.read_bytes())
    except OSError as error:
        raise SpireError(f"no calibration at {file}: measure this machine with 'spire doctor --calibrate'") from error
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "its beginning"
        advice = "measure again with 'spire doctor --calibrate'"
        raise SpireError(f"{file} is no calibration of this version ({place}): {advice}") from error


def processor_line(name: str) -> str:
    """Return the value of the field `name` of the first processor in /proc/cpuinfo; empty if there is no such field."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
