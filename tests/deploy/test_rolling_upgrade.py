"""Verifier and draft are replaced as deploy/kubernetes replaces them, under load, and no request is lost or differs.

The next one serves before the last is told to end, and a proxy leads new connections to it as a Service would. The
gateways' own end is that of tests/faults/test_gateways.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import DEPLOY
from tests.faults.history import bodies
from tests.faults.system import System, system
from tests.services import Service, start
from tests.verifier_service.harness import free_port


def told(name: str, option: str) -> list[str]:
    """An option as the manifests set it, for the command line."""
    documents: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / f"{name}.yaml").read_text()))
    variables = documents[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    (value,) = [each["value"] for each in variables if each["name"] == f"SPIRE_{name}_{option}".upper()]
    return [f"--{option.replace('_', '-')}", value]


@pytest.fixture(scope="module")
def cell(stories_dir: Path, stories_draft_dir: Path) -> Iterator[System]:
    with system(
        stories_dir,
        stories_draft_dir,
        gateway_options=["--k", "4", *told("gateway", "verifier_patience")],
        verifier_options=["--lease-seconds", "3", *told("verifier", "drain_seconds")],
        draft_options=["--wait-ms", "50"],
    ) as whole:
        whole.learn(bodies(4))
        yield whole


def roll(whole: System, name: str) -> Service:
    """Replace a service as a rollout does; the one that has been told to end."""
    last: Service = getattr(whole, name)
    command, port = last.command.copy(), free_port()
    command[command.index("--metrics-port") + 1] = str(port)
    following = start(command, whole.directory)
    for proxy in (whole.to_verifier, whole.activations) if name == "verifier" else ():
        assert proxy.target == last.address
        proxy.target = following.address
    setattr(whole, name, following)
    whole.metrics_ports[name] = port
    last.process.send_signal(signal.SIGTERM)
    return last


@pytest.mark.fault(1, 4)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["verifier", "draft"])
def test_a_rollout_under_load_loses_no_request(cell: System, name: str) -> None:
    rolled: list[Service] = []
    endured = cell.endure(
        lambda: rolled.append(roll(cell, name)),
        lambda: rolled[0].process.poll() is not None,
        lambda: None,
        patience=120,
    )
    print(name, endured)
    assert rolled[0].process.returncode == 0
    assert endured.requests >= 4
    assert endured.goodput_during > 0
