"""Packages that the services need, and where they come from on a machine without a network. Standard library only.

`make gpu-wheels` puts wheels into build/gpu-wheels where there is a package index; they are carried to the machine and
unpacked here, beside a torch that is there already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "gpu-wheels"
_EXTRAS = ("gateway", "model")


def needed() -> dict[str, str]:
    """The lowest version of each package by name, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for e in _EXTRAS for line in project["optional-dependencies"][e])]
    floors = {}
    for line in lines:
        if not (parts := re.match(r"([A-Za-z0-9._-]+)[^>]*>=([0-9.]+)", line)):
            raise ValueError(f"pyproject.toml: {line!r} has no lowest version")
        floors[_normal(parts[1])] = parts[2]
    return floors


def lacking(there: dict[str, str], floors: dict[str, str]) -> list[str]:
    """A line for each package that is missing or too old. `there`: versions by name."""
    found = []
    for name, floor in floors.items():
        version = there.get(name)
        if version is None:
            found.append(f"{name}>={floor} is missing")
        elif _numbers(version) < _numbers(floor):
            found.append(f"{name} is {version}, {floor} is needed")
    return found


def installed(paths: list[str]) -> dict[str, str]:
    """Versions by name of what these directories hold; the first that has it counts."""
    versions: dict[str, str] = {}
    for distribution in distributions(path=paths):
        versions.setdefault(_normal(distribution.metadata["Name"]), distribution.version)
    return versions


def search_path(into: Path) -> list[str]:
    """Directories for PYTHONPATH with which nothing is lacking; wheels are unpacked into `into` where something is.

    Raises RuntimeError that says what to do.
    """
    own = [str(ROOT)]
    if not (wanting := lacking(installed(sys.path), needed())):
        return own
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels:
        raise RuntimeError(
            f"{'; '.join(wanting)}. Run 'make gpu-wheels' where there is a package index, and carry {WHEELS} here"
        )
    unpack = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(into)]
    done = subprocess.run([sys.executable, "-m", "pip", *unpack, *wheels], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the wheels of {WHEELS} cannot be installed: {done.stderr.strip()}")
    if wanting := lacking(installed([str(into), *sys.path]), needed()):
        raise RuntimeError(f"with the wheels of {WHEELS} {'; '.join(wanting)}: add it to experiments/gpu/wheels.txt")
    return [*own, str(into)]


def environment(paths: list[str]) -> dict[str, str]:
    """This process's environment for one that shall find these directories first."""
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, which are compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
