"""deploy/make-secrets: what it makes starts the system, lets in who should be, and survives a second call."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from spire.service.keys import create_key
from tests.deploy.compose import DEPLOY, PROFILES, composed
from tests.deploy.conftest import make_secrets
from tests.gateway.conftest import eventually
from tests.services import Services


def test_the_services_know_one_another_and_answer_who_has_the_key(system: Services, your_key: dict[str, str]) -> None:
    def ready() -> bool:
        return httpx.get(f"{system.url}/ready", headers=your_key).json().get("draft") == "connected"

    eventually(ready, within=60)
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, headers=your_key, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_prometheus_has_a_key_for_the_metrics(system: Services, secrets: Path) -> None:
    key = (secrets / "prometheus" / "api_key").read_text().strip()
    assert httpx.get(f"{system.url}/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_without_a_key_only_the_health_check_is_answered(system: Services) -> None:
    assert httpx.get(f"{system.url}/health").status_code == 200
    assert httpx.get(f"{system.url}/metrics").status_code == 401


@pytest.mark.thorough
def test_a_second_call_renews_certificates_and_leaves_all_else(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    make_secrets(directory)
    create_key("colleague", directory / "keys" / "api_keys")
    before = contents(directory)
    make_secrets(directory)
    after = contents(directory)
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        f"tls/{service}/tls.{end}" for service in ("gateway", "verifier", "draft") for end in ("crt", "key")
    }


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_container_users_can_read_it_and_nobody_else_passes_the_directory(secrets: Path) -> None:
    assert secrets.stat().st_mode & 0o777 == 0o700
    unreadable = {str(file.relative_to(secrets)) for file in secrets.rglob("*") if not file.stat().st_mode & 0o004}
    assert unreadable == {"tls/ca.key"}


def test_no_key_is_in_the_file_of_keys(secrets: Path) -> None:
    known = (secrets / "keys" / "api_keys").read_text()
    for name in ("you", "prometheus"):
        key = (secrets / name / "api_key").read_text().strip()
        assert key.startswith("spire-")
        assert key not in known


def test_everything_that_compose_mounts_is_made(secrets: Path) -> None:
    mounted = {
        Path(volume["source"]).relative_to(DEPLOY / "secrets")
        for profile in PROFILES
        for service in composed(profile)["services"].values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind" and DEPLOY / "secrets" in Path(volume["source"]).parents
    }
    assert {str(path) for path in mounted} >= {"keys", "tls/gateway", "tls/verifier", "tls/draft"}
    assert not [path for path in mounted if not any((secrets / path).iterdir())]
