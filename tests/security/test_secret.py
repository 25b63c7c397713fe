"""The secret between services: no call but health is answered without it, and it is written nowhere but in its file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given, strategies as st

from spire.errors import SpireError
from spire.rpc.secret import SECRET_METADATA_KEY, Secret, make_secret
from spire.rpc.trust import Trust
from spire.service.health import refusal_of
from tests.security.conftest import refused_start
from tests.security.protocol import METHODS, answer
from tests.services import Services, running, start


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_secret(file := tmp_path_factory.mktemp("secret") / "secret")
    return file


@pytest.fixture(scope="module")
def secretive(stories_dir: Path, stories_draft_dir: Path, secret_file: Path) -> Iterator[Services]:
    options = ["--secret-file", str(secret_file), "--log-level", "debug"]
    with running(
        stories_dir, stories_draft_dir, verifier_options=options, draft_options=options, gateway_options=options
    ) as services:
        yield services


@pytest.mark.fault(36)
@pytest.mark.parametrize("came", [None, "another-secret-of-like-length"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_no_call_is_answered_without_the_secret(
    method: MethodDescriptor, came: str | None, secretive: Services
) -> None:
    assert secretive.draft
    for service in (secretive.verifier, secretive.draft):
        status = await answer(service.address, method, Trust(secret=Secret(came) if came else None))
        assert status is grpc.StatusCode.UNAUTHENTICATED


def test_the_protocol_has_calls_to_refuse() -> None:
    assert {method.name for method in METHODS} >= {"Rounds", "Follow", "Release", "GetInfo"}


async def test_whoever_has_the_secret_is_answered_and_health_answers_everybody(
    secretive: Services, secret_file: Path
) -> None:
    (get_info,) = [method for method in METHODS if method.full_name == "spire.v1.Verifier.GetInfo"]
    known = Trust(secret=Secret.read(secret_file))
    assert await answer(secretive.verifier.address, get_info, known) is grpc.StatusCode.OK


def test_health_is_told_to_everybody(secretive: Services) -> None:
    assert secretive.draft
    for service in (secretive.verifier, secretive.draft):
        assert refusal_of(service.address, None, timeout=10) == ""


def test_what_is_asked_of_the_gateway_is_drafted_and_verified(secretive: Services) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    done = httpx.post(f"{secretive.url}/v1/completions", json=body, timeout=60).json()
    assert done["usage"]["completion_tokens"] == 16
    assert httpx.get(f"{secretive.url}/ready").json()["draft"] == "connected"


def test_the_secret_is_in_no_log_argument_or_environment(secretive: Services, secret_file: Path) -> None:
    assert secretive.draft
    secret = secret_file.read_bytes()
    for service in (secretive.verifier, secretive.draft, secretive.gateway):
        process = Path(f"/proc/{service.process.pid}")
        for told in (process / "cmdline", process / "environ", service.log):
            assert secret not in told.read_bytes()
    assert secret.decode() not in repr(Secret.read(secret_file))


def test_a_service_with_another_secret_says_what_is_wrong(
    secretive: Services, stories_draft_dir: Path, tmp_path: Path
) -> None:
    make_secret(tmp_path / "another")
    options = ["--startup-patience", "0", "--secret-file", str(tmp_path / "another"), "--port", "0"]
    gateway = start(["-m", "gateway", "--verifier", secretive.verifier.address, *options], tmp_path)
    try:
        said = gateway.log.read_text
        while "unreachable" not in said():
            assert gateway.process.poll() is None
        assert "asks for a secret and another came: start both with the same --secret-file" in said()
    finally:
        gateway.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["verifier_service", "draft_service"])
def test_beyond_loopback_a_service_wants_certificates_or_a_secret(
    module: str, stories_dir: Path, stories_draft_dir: Path
) -> None:
    own = ["--model", str(stories_dir)] if module == "verifier_service" else ["--draft", str(stories_draft_dir)]
    own += ["--verifier", "127.0.0.1:9"] if module == "draft_service" else []
    said = refused_start(module, *own, "--host", "0.0.0.0", "--port", "0")
    assert "--host 0.0.0.0" in said
    assert "--tls DIR" in said
    assert "--secret-file FILE" in said


def test_with_a_secret_a_service_listens_beyond_loopback(stories_dir: Path, secret_file: Path, tmp_path: Path) -> None:
    options = ["--host", "0.0.0.0", "--port", "0", "--secret-file", str(secret_file)]
    verifier = start(["-m", "verifier_service", "--model", str(stories_dir), *options], tmp_path)
    assert "can be read on the network" in verifier.log.read_text()
    assert verifier.stop() == 0


def test_without_either_a_service_says_who_can_use_it(stories_dir: Path, tmp_path: Path) -> None:
    verifier = start(["-m", "verifier_service", "--model", str(stories_dir), "--port", "0"], tmp_path)
    assert "any user of this host can read prompts and use the model" in verifier.log.read_text()
    assert verifier.stop() == 0


def test_a_secret_is_made_for_its_owner_alone_and_once(tmp_path: Path) -> None:
    make_secret(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        make_secret(tmp_path / "secret")


@pytest.mark.parametrize(
    ("content", "mode", "wrong"),
    [
        (None, 0, "cannot be read"),
        ("a" * 64, 0o604, "can be read by every user"),
        ("", 0o600, "one word"),
        ("short", 0o600, "one word"),
        ("two words of a secret", 0o600, "one word"),
    ],
)
def test_a_file_that_holds_no_good_secret_is_named(content: str | None, mode: int, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(SpireError, match=re.escape(f"--secret-file {file}")) as refusal:
        Secret.read(file)
    assert wrong in str(refusal.value)


@given(st.text())
def test_no_other_text_is_the_secret(text: str) -> None:
    secret = Secret("0123456789abcdef")
    assert secret.is_in({SECRET_METADATA_KEY: "0123456789abcdef"})
    assert secret.is_in({SECRET_METADATA_KEY: text}) == (text == secret.text)
    assert not secret.is_in({})
