"""Who may import whom, and what stays light: the rules of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import SECONDS
from tests.paths import ROOT, TESTS

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


def modules() -> dict[str, Path]:
    """Dotted name and file of each module of ours that nobody generates."""
    files = [file for package in ("spire", *SERVICES) for file in (ROOT / package).rglob("*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return {name: file for name, file in names.items() if not name.startswith("spire.v1")}


def imports_within(package: str) -> dict[str, set[str]]:
    """Which of a package's modules and packages import which of the others."""
    known, graph = modules(), dict[str, set[str]]()
    for name, file in known.items():
        if name.startswith(f"{package}."):
            child = name.removeprefix(f"{package}.").split(".")[0]
            ours = {used for used in imported_names(file) & known.keys() if used.startswith(f"{package}.")}
            graph.setdefault(child, set()).update(used.removeprefix(f"{package}.").split(".")[0] for used in ours)
    return {child: used - {child} for child, used in graph.items()}


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Parts of a package that import one another in a circle, if any do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imported_names(file: Path) -> set[str]:
    """Modules that are imported, also as names of their package."""
    froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return imported_modules(file) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


PACKAGES = sorted(name for name, file in modules().items() if file.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_the_parts_of_a_package_go_down_only(package: str) -> None:
    assert circle_in(imports_within(package)) == []


def test_the_check_of_arrows_would_see_one_that_goes_up() -> None:
    upwards = {"layers": {"backends"}}
    assert circle_in(imports_within("spire.model") | upwards)


def test_no_module_is_longer_than_400_lines() -> None:
    assert {name: count for name, file in modules().items() if (count := file.read_text().count("\n")) > 400} == {}


def test_no_function_exceeds_50_lines_after_declarations_and_docstring() -> None:
    functions = [
        (f"{name}.{node.name}", node)
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert {name: lines for name, node in functions if (lines := lines_of(node)) > 50} == {}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_two_classes_have_one_name() -> None:
    classes = Counter(
        node.name
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in classes.items() if count > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_more_than_15_modules(package: str) -> None:
    assert len(list((ROOT / package.replace(".", "/")).glob("*.py"))) <= 15


@pytest.mark.parametrize(
    "module",
    [
        "spire",
        "spire.perf.calibration",
        "spire.text.chat_messages",
        "spire.cli",
        "spire.errors",
        "spire.perf.hardware",
        "spire.service.machine_memory",
        "spire.perf.memory_need",
        "spire.model.config",
        "spire.perf.perf_model",
        "spire.perf.plots",
        "spire.perf.loopback",
        "spire.rpc.channel",
        "spire.rpc.errors",
        "spire.perf.shapes",
        "spire.v1.verifier_pb2_grpc",
        "spire.v1.draft_pb2_grpc",
        "gateway.api.app",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit(42 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0


def test_the_check_for_torch_would_see_it() -> None:
    """A control for the test above."""
    program = "import sys, spire.model.target; sys.exit(42 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 42


@pytest.mark.thorough
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
    pairs = [(_processor_seconds(spire_help), _processor_seconds(libraries)) for _ in range(2)]
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


def test_every_file_that_make_check_leaves_out_is_there() -> None:
    assert [file for file in SECONDS if not (TESTS / file).is_file()] == []


def test_no_test_has_a_name_of_more_than_70_characters() -> None:
    names = [name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())]
    assert [name for name in names if len(name) > 70] == []
