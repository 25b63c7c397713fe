"""Dashboards: they are what the code makes of them, and a real Prometheus beside live services answers all they ask."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.prometheus import Prometheus, problem, prometheus
from tests.faults.history import Load, bodies
from tests.faults.system import System, system
from tests.gateway.conftest import eventually
from tests.paths import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
PANELS: dict[str, dict[str, Any]] = {
    f"{file.stem}: {panel['title']}": panel for file in FILES for panel in json.loads(file.read_text())["panels"]
}
EXPRESSIONS = [(name, target["expr"]) for name, panel in PANELS.items() for target in panel["targets"]]
MEASURING = [
    *("--k", "4", "--draft-deadline", "5", "--plain-share", "0.1", "--price", "2.5", "--draft-price", "0.5"),
    *("--calibration", str(ROOT / "experiments/results/calibration.json")),
]


def test_the_committed_dashboards_are_those_of_the_code(tmp_path: Path) -> None:
    for file in GRAFANA.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "dashboards").mkdir()
    subprocess.run([sys.executable, str(tmp_path / "build.py")], check=True, timeout=60)
    made = {file.name: file.read_text() for file in (tmp_path / "dashboards").iterdir()}
    assert made == {file.name: file.read_text() for file in FILES}, "run python deploy/grafana/build.py"


def test_dashboards_belong_to_no_one_installation() -> None:
    boards = [json.loads(file.read_text()) for file in FILES]
    assert {board["uid"] for board in boards} == {"spire-overview", "spire-speculation", "spire-services"}
    for board in boards:
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert variables == {"datasource", "gateway"}
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_every_panel_says_what_to_do_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 15
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert not [target for target in panel["targets"] if "vector(" in target["expr"]]


@pytest.fixture(scope="module")
def loaded(stories_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The three services under a load that lasts."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    # Proposals wait for activations as long as it takes: a draft that falls back has no acceptance to show.
    patient = ["--wait-ms", "2000"]
    with (
        system(stories_dir, stories_draft_dir, gateway_options=MEASURING, draft_options=patient) as whole,
        Load(whole.url, bodies(3, max_tokens=24), repeat=True) as load,
    ):
        eventually(lambda: any(record.ends for record in load.records), within=90)
        yield whole


@pytest.fixture(scope="module")
def scraped(loaded: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(targets_of(loaded), tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def targets_of(whole: System) -> dict[str, str]:
    ports = {job: f"127.0.0.1:{port}" for job, port in whole.metrics_ports.items()}
    return {"gateway": whole.gateway.address} | ports


@pytest.mark.parametrize(
    ("name", "expression"), EXPRESSIONS, ids=[f"{name}: {at}" for at, (name, _) in enumerate(EXPRESSIONS)]
)
def test_every_expression_has_values_that_fit_its_panel(scraped: Prometheus, name: str, expression: str) -> None:
    """Asked again until it has: the rates of a system that has just begun are empty."""
    found: list[str] = []

    def good() -> bool:
        found.append(problem(PANELS[name], scraped.query(expression)))
        return not found[-1]

    try:
        eventually(good, within=40)
    except AssertionError:
        pytest.fail(f"{expression}: {found[-1]}")


@pytest.mark.thorough
def test_a_metric_by_another_name_would_be_noticed(scraped: Prometheus) -> None:
    """A control for the test above."""
    names = {name for _, expression in EXPRESSIONS for name in re.findall(r"spire[_:]\w+(?::\w+)*", expression)}
    assert len(names) > 30
    for panel, expression in EXPRESSIONS:
        for name in re.findall(r"(?:spire[_:]|process_)\w+(?::\w+)*", expression):
            renamed = re.sub(rf"\b{name}\b(?!:)", f"{name}_of_old", expression)
            assert renamed != expression
            assert problem(PANELS[panel], scraped.query(renamed)) == "nothing", renamed


def test_all_rules_are_evaluated_and_no_alert_fires(scraped: Prometheus, loaded: System) -> None:
    groups = httpx.get(f"{scraped.url}/api/v1/rules", timeout=10).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 25
    assert not [rule for rule in rules if rule["health"] != "ok"]
    assert not scraped.query('ALERTS{alertstate="firing"}')


@pytest.mark.parametrize("service", ["gateway", "verifier", "draft"])
def test_promtool_finds_nothing_wrong_with_the_metrics(promtool: str, loaded: System, service: str) -> None:
    text = httpx.get(f"http://{targets_of(loaded)[service]}/metrics", timeout=10).text
    # The names that others have chosen break the rule on colons, and no other.
    names = text.replace("vllm:", "vllm_")
    assert "spire_" in names
    checked = subprocess.run([promtool, "check", "metrics"], input=names, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_metric_is_explained(loaded: System) -> None:
    document = (ROOT / "docs" / "observability.md").read_text()
    for target in targets_of(loaded).values():
        text = httpx.get(f"http://{target}/metrics", timeout=10).text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and "process_" not in line}
        assert len(names) > 5
        assert not [name for name in names if f"`{name}" not in document]


def test_every_panel_is_in_the_list() -> None:
    document = (ROOT / "docs" / "observability.md").read_text()
    assert not [name for name in PANELS if name.split(": ", 1)[1] not in document]


def test_promtool_would_find_a_metric_that_breaks_the_rules(promtool: str) -> None:
    wrong = "# HELP spire_rounds Rounds.\n# TYPE spire_rounds counter\nspire_rounds 1\n"
    checked = subprocess.run([promtool, "check", "metrics"], input=wrong, capture_output=True, text=True, timeout=60)
    assert checked.returncode != 0
