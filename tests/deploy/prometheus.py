"""A real Prometheus with the committed configuration, but for targets and short intervals, beside live services."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.gateway.conftest import eventually
from tests.paths import ROOT
from tests.verifier_service.harness import free_port

CONFIGURATION = ROOT / "deploy" / "prometheus"
# Scraped every second: what Grafana would take as $__rate_interval is at least four times that.
RATE_INTERVAL = "15s"


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str, gateway: str = ".*") -> dict[str, float]:
        """Values by labels, of an expression as it stands in a dashboard."""
        filled = expression.replace("$__rate_interval", RATE_INTERVAL).replace("$gateway", gateway)
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": filled}, timeout=30).json()
        assert answer["status"] == "success", f"{filled}: {answer}"
        return {str(sample["metric"]): float(sample["value"][1]) for sample in answer["data"]["result"]}


@contextmanager
def prometheus(targets: dict[str, str], directory: Path) -> Iterator[Prometheus]:
    """Scrapes `targets`, HOST:PORT by job; entered when it has seen all of them."""
    configured = directory / "configuration"
    shutil.copytree(CONFIGURATION, configured)
    file = configured / "prometheus.yml"
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    content["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    assert {job["job_name"] for job in content["scrape_configs"]} == set(targets)
    content["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
    ]
    file.write_text(yaml.safe_dump(content))
    rules = configured / "rules.yml"
    rules.write_text(rules.read_text().replace("[1m]", f"[{RATE_INTERVAL}]"))
    port = free_port()
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    log = directory / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=subprocess.STDOUT
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: _sees(server, set(targets)), within=60)
        yield server
    except AssertionError:
        print(log.read_text()[-2000:])
        raise
    finally:
        process.terminate()
        process.wait(20)


def _sees(server: Prometheus, jobs: set[str]) -> bool:
    time.sleep(0.2)
    try:
        if not httpx.get(f"{server.url}/-/ready", timeout=5).is_success:
            return False
    except httpx.HTTPError:
        return False
    found = server.query("up == 1")
    return all(any(f"'{job}'" in labels for labels in found) for job in jobs)


def problem(panel: dict[str, Any], values: dict[str, float]) -> str:
    """What is wrong with what a panel's expression gave; nothing where it is as it should be."""
    if not values:
        return "nothing"
    axis = panel["fieldConfig"]["defaults"]
    low, high = axis.get("min", -math.inf), axis.get("max", math.inf)
    outside = {
        labels: value for labels, value in values.items() if not math.isfinite(value) or not low <= value <= high
    }
    return f"outside of {low} to {high}: {outside}" if outside else ""


def colour(panel: dict[str, Any], value: float) -> str:
    """In which colour a panel shows it."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
