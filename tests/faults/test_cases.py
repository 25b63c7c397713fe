"""Every case has its tests, and docs/faults.md names them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.paths import TESTS

# Those that must be there; the manual may have more.
CASES = {*range(1, 26), 29, 30, 31, 34}


def marked() -> dict[int, set[str]]:
    """Names of the tests that `pytest.mark.fault` gives to each case."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in TESTS.rglob("test_*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for case in (case for decorator in function.decorator_list for case in cases_of(decorator)):
                    found[case].add(f"{file.relative_to(TESTS)}::{function.name}")
    return found


def cases_of(decorator: ast.expr) -> list[int]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def documented() -> dict[int, set[str]]:
    text = (TESTS.parent / "docs" / "faults.md").read_text()
    parts = re.split(r"^### (\d+)\. ", text, flags=re.MULTILINE)[1:]
    return {
        int(case): set(re.findall(r"`(\S+::test_\w+)`", part)) for case, part in zip(*[iter(parts)] * 2, strict=True)
    }


def test_every_case_has_a_test() -> None:
    assert set(CASES) <= set(marked())


def test_the_manual_names_the_tests_of_every_case() -> None:
    assert documented() == marked()
