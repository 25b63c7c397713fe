"""Who may import whom, and what stays light: the rules of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICES = ("gateway", "verifier_service", "draft_service")


def imported_modules(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other_service(service: str) -> None:
    files = list((ROOT / service).rglob("*.py"))
    assert files, f"{service} is empty"
    others = tuple(name for name in SERVICES if name != service)
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported_modules(file)
        if name.split(".")[0] in others
    }
    assert not wrong


def test_the_shared_package_imports_no_service() -> None:
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / "spire").rglob("*.py")
        for name in imported_modules(file)
        if name.split(".")[0] in SERVICES
    }
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "spire",
        "spire.calibration",
        "spire.chat_messages",
        "spire.cli",
        "spire.errors",
        "spire.hardware",
        "spire.machine_memory",
        "spire.memory_need",
        "spire.model.config",
        "spire.perf_model",
        "spire.plots",
        "spire.rpc.loopback",
        "spire.rpc.channel",
        "spire.rpc.errors",
        "spire.shapes",
        "spire.v1.verifier_pb2_grpc",
        "spire.v1.draft_pb2_grpc",
        "gateway.app",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit(42 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


def test_the_check_for_torch_would_see_it() -> None:
    """A control for the test above."""
    program = "import sys, spire.model.target; sys.exit(42 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 42


def test_help_takes_little_longer_than_the_libraries_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the processor, and beside one another: a slow machine is slow with both. Half as long again is usual; with
    torch it would be five times as long."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    spire_help = [sys.executable, "-m", "spire.cli", "--help"]
    libraries = [
        sys.executable,
        "-c",
        "import grpc, httpx, pydantic_settings, rich.markdown, structlog, tokenizers, typer",
    ]
    for command in (spire_help, libraries):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # writes the byte code
    pairs = [(_processor_seconds(spire_help), _processor_seconds(libraries)) for _ in range(5)]
    assert min(ours for ours, _ in pairs) < 2.5 * min(theirs for _, theirs in pairs), pairs


def _processor_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "base", "misc"])
def test_no_module_is_named_for_nothing(name: str) -> None:
    packages = [ROOT / package for package in ("spire", *SERVICES)]
    assert not [found for package in packages for found in package.rglob(f"{name}*") if found.stem == name]
