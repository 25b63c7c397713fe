"""`python -m spire.service.health`: says whether a service serves, by HTTP and by gRPC, with TLS and without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import Service, start


def asked(*arguments: str) -> tuple[int, str]:
    """Exit code, and what is said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "spire.service.health", *arguments], capture_output=True, text=True, timeout=60
    )
    assert not done.stdout
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def gateway(certs: Path, tls_verifier: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    peers = ["--verifier", tls_verifier.address, "--tls", str(certs / "gateway")]
    service = start(["-m", "gateway", *peers, "--port", "0"], tmp_path_factory.mktemp("gateway"))
    yield service
    service.stop()


def test_a_verifier_behind_tls_serves(certs: Path, tls_verifier: Service) -> None:
    assert asked(tls_verifier.address, "--tls", str(certs / "verifier")) == (0, "")


def test_who_has_no_certificate_reads_why(tls_verifier: Service) -> None:
    code, said = asked(tls_verifier.address)
    assert code == 1
    assert said.startswith(f"{tls_verifier.address}: UNAVAILABLE")
    assert "--tls" in said


def test_certificates_that_cannot_be_read_are_named(tls_verifier: Service, tmp_path: Path) -> None:
    code, said = asked(tls_verifier.address, "--tls", str(tmp_path))
    assert code == 1
    assert str(tmp_path) in said


def test_a_gateway_serves(gateway: Service) -> None:
    assert asked(f"http://{gateway.address}/health") == (0, "")
    assert asked(f"http://{gateway.address}/ready") == (0, "")


def test_another_status_is_no_service(gateway: Service) -> None:
    code, said = asked(f"http://{gateway.address}/nowhere")
    assert code == 1
    assert "404" in said


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:9/health"])
def test_nobody_there_is_no_service(address: str) -> None:
    code, said = asked(address, "--timeout", "2")
    assert code == 1
    assert address in said
