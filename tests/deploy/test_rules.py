"""Scrape configuration, recording rules and alerts, as promtool sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULE_TESTS = ROOT / "tests" / "deploy" / "alerts.test.yml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


def test_prometheus_takes_the_configuration(promtool: str, tmp_path: Path) -> None:
    """With an API key elsewhere: the one it names is there in containers alone."""
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    file, key = tmp_path / "prometheus.yml", tmp_path / "api_key"
    key.touch()
    file.write_text(file.read_text().replace("/run/secrets/prometheus/api_key", str(key)))
    checked = run(promtool, "check", "config", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 rule files found" in checked.stdout


@pytest.mark.thorough
def test_the_documented_commands_find_nothing_wrong(promtool: str) -> None:
    document = (ROOT / "docs" / "observability.md").read_text()
    commands = [line.split()[1:] for line in document.splitlines() if line.startswith("promtool ")]
    assert {tuple(command[:2]) for command in commands} == {("check", "config"), ("check", "rules"), ("test", "rules")}
    for command in commands:
        checked = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, f"{command}: {checked.stdout}{checked.stderr}"


def test_every_alert_fires_for_its_fault_and_none_without(promtool: str) -> None:
    tested = run(promtool, "test", "rules", RULE_TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.thorough
def test_alerts_that_cannot_fire_would_be_noticed(promtool: str, tmp_path: Path) -> None:
    """A control for the test above, which shows too that no alert is without one."""
    rules, tests = tmp_path / "deploy" / "prometheus", tmp_path / "tests" / "deploy"
    shutil.copytree(PROMETHEUS, rules)
    tests.mkdir(parents=True)
    shutil.copy(RULE_TESTS, tests)
    content = yaml.safe_load((rules / "alerts.yml").read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule["expr"] = f"({rule['expr']}) and on () vector(1) > 2"
    (rules / "alerts.yml").write_text(yaml.safe_dump(content))
    tested = run(promtool, "test", "rules", tests / RULE_TESTS.name)
    assert tested.returncode == 1
    assert not [alert for alert in ALERTS if f'alertname="{alert}"' not in tested.stdout + tested.stderr]


def test_every_alert_says_what_to_do_and_where_it_is_explained() -> None:
    document = (ROOT / "docs" / "observability.md").read_text()
    headings = {re.sub(r"[^a-z0-9 -]", "", line[4:].lower()) for line in document.splitlines() if line[:4] == "### "}
    for name, rule in ALERTS.items():
        assert rule["annotations"]["description"], name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"]["runbook"] == f"docs/observability.md#{name.lower()}"
        assert name.lower() in headings, f"{name} is not explained"
