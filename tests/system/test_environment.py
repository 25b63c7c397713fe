"""Environments that services meet: proxies, IPv6 and what Kubernetes tells every pod. With real processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import thoroughly
from tests.system.test_up import ENVIRONMENT, Running, spire, up


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.thorough
def test_no_proxy_stands_between_the_services(stories_dir: Path, stories_draft_dir: Path) -> None:
    names = ("http_proxy", "https_proxy", "grpc_proxy")
    nowhere = dict.fromkeys([*names, *map(str.upper, names)], "http://127.0.0.1:9")
    socks = {"all_proxy": "socks5://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
    command = up(stories_dir, stories_draft_dir, "--once", "--prompt", "Once upon a time")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | nowhere | socks, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"64 tokens · τ \d", done.stdout), done.stdout


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", [thoroughly("[::1]"), thoroughly("::")])
def test_all_services_listen_at_ipv6_addresses(
    host: str, stories_dir: Path, stories_draft_dir: Path, certs: Path, tmp_path: Path
) -> None:
    command = up(stories_dir, stories_draft_dir, "--host", host, "--without-keys", "--tls", str(certs))
    environment = ENVIRONMENT | {"SPIRE_VERIFIER_HOST": host, "SPIRE_DRAFT_HOST": host}
    stack = Running(command, tmp_path / "up.log", environment)
    try:
        assert re.fullmatch(r"http://\[::1\]:\d+", stack.url)
        assert re.search(r"verifier  \[::1?\]:\d+\n", stack.printed), stack.printed
        assert re.search(r"64 tokens · τ \d", stack.printed), stack.printed
        asked = ["complete", "Once upon a time", "--url", stack.url, "--temperature", "0", "--max-tokens", "24"]
        said = subprocess.run(spire(*asked), capture_output=True, text=True, check=True, timeout=60).stdout
        assert said.strip() == stack.text().strip()
        looked = subprocess.run(spire("doctor", "--json", "--url", stack.url), capture_output=True, timeout=60)
        gateway = json.loads(looked.stdout)["checks"][-1]
        assert (gateway["name"], gateway["ok"]) == (f"gateway {stack.url}", True)
    finally:
        stack.process.terminate()
        stack.process.wait(30)


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        thoroughly(["gateway"], "SPIRE_GATEWAY_PORT"),
        thoroughly(["verifier_service", "--model", "."], "SPIRE_VERIFIER_PORT"),
        thoroughly(["verifier_service", "--model", "."], "SPIRE_VERIFIER_METRICS_PORT"),
        thoroughly(["draft_service", "--draft", ".", "--verifier", "127.0.0.1:9"], "SPIRE_DRAFT_PORT"),
        (["spire.cli", "up", "--draft", "off"], "SPIRE_UP_PORT"),
    ],
)
def test_the_link_of_a_kubernetes_service_is_called_by_its_name(command: list[str], variable: str) -> None:
    environment = ENVIRONMENT | {variable: "tcp://10.96.0.7:8000", "COLUMNS": "500"}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    service = variable.removesuffix("_PORT").lower().replace("_", "-")
    told = (
        f"{variable}=tcp://10.96.0.7:8000 looks like the link to a Kubernetes Service named {service}, not like a port"
    )
    assert told in done.stderr
    assert "enableServiceLinks: false" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", [thoroughly("::1:50051"), "http://127.0.0.1:50051", thoroughly("verifier")])
def test_an_address_of_a_peer_that_is_none_is_refused_with_an_example(address: str) -> None:
    command = [sys.executable, "-m", "gateway", "--port", "0", "--verifier", address]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"--verifier: Value error, '{address}' is not HOST:PORT, as in" in done.stderr
