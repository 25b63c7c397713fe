"""API keys: how their file changes under a running gateway, and what the commands, documents and clients here do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.checks import CHECKS, load_all_checks
from typer.testing import CliRunner

from gateway.http.keys import Keys
from spire.bench.client import BenchError, Client, Request
from spire.bench.peers.against import Server
from spire.bench.stream import Timed, stream_all
from spire.cli import app
from spire.errors import SpireError
from spire.service.keys import authorization, create_key, read_keys, revoke_key
from tests.gateway.conftest import eventually
from tests.security.conftest import Guarded, refused_start

# -- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_file_that_is_no_file_of_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    absent, wrong = tmp_path / "absent", tmp_path / "wrong"
    assert str(absent) in refused_start("gateway", "--keys", str(absent))
    wrong.write_text("# ours\nalice secret-in-clear\n")
    message = refused_start("gateway", "--keys", str(wrong))
    assert f"{wrong}, line 2" in message
    assert "secret-in-clear" not in message
    assert "drop one of them" in refused_start("gateway", "--keys", str(wrong), "--without-keys")


def status(changing: Guarded, key: str) -> int:
    return httpx.get(f"{changing.url}/version", headers={"Authorization": f"Bearer {key}"}).status_code


def test_a_key_is_added_and_revoked_without_a_restart(changing: Guarded) -> None:
    bob = create_key("bob", changing.file)
    assert (status(changing, changing.key), status(changing, bob)) == (200, 200)
    revoke_key("alice", changing.file)
    assert (status(changing, changing.key), status(changing, bob)) == (401, 200)


def test_a_file_that_is_lost_lets_nobody_in_until_it_is_back(changing: Guarded) -> None:
    hidden = changing.file.rename(changing.file.with_name("hidden"))
    assert status(changing, changing.key) == 401
    hidden.rename(changing.file)
    assert status(changing, changing.key) == 200


def test_a_line_that_was_spoilt_costs_only_its_own_key(changing: Guarded) -> None:
    bob = create_key("bob", changing.file)
    changing.file.write_text(changing.file.read_text()[:-10])
    assert (status(changing, changing.key), status(changing, bob)) == (200, 401)


# -- the command -----------------------------------------------------------------------------------------------------


def spire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "spire.cli", *arguments], capture_output=True, text=True, timeout=60)


def test_a_key_is_shown_once_and_kept_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = spire("key", "create", "alice", "--file", str(file)).stdout.strip()
    assert len(key) > 43
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert Keys(file).name_of(key.encode()) == "alice"
    assert spire("key", "list", "--file", str(file)).stdout == "alice\n"
    again = spire("key", "create", "alice", "--file", str(file))
    assert (again.returncode, again.stdout) == (1, "")
    assert "revoke that one first" in again.stderr


def test_revoking_leaves_the_others_and_the_file_s_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    _, bob = (create_key(name, file) for name in ("alice", "bob"))
    file.chmod(0o640)
    file.write_text(f"# ours\n{file.read_text()}")
    printed = CliRunner().invoke(app, ["key", "revoke", "alice", "--file", str(file)])
    assert printed.exit_code == 0
    assert file.read_text().startswith("# ours\nbob ")
    assert file.stat().st_mode & 0o777 == 0o640
    assert Keys(file).name_of(bob.encode()) == "bob"
    with pytest.raises(SpireError, match="no key named 'alice'"):
        revoke_key("alice", file)


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 65, "-x", "é"])
def test_a_name_that_could_spoil_a_line_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpireError, match="is no name for a key"):
        create_key(name, tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_keys_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    names = [f"user-{n}" for n in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        made = dict(zip(names, pool.map(lambda name: create_key(name, tmp_path / "new" / "keys"), names), strict=True))
    known = Keys(tmp_path / "new" / "keys")
    assert {name: known.name_of(key.encode()) for name, key in made.items()} == {name: name for name in names}


def test_revoking_in_a_directory_that_does_not_exist_makes_none(tmp_path: Path) -> None:
    with pytest.raises(SpireError, match="No such file"):
        revoke_key("alice", tmp_path / "absent" / "keys")
    assert not (tmp_path / "absent").exists()


def test_two_keys_are_never_alike(tmp_path: Path) -> None:
    keys = [create_key(f"name-{number}", tmp_path / "keys") for number in range(20)]
    assert len({*keys}) == len({known.digest for known in read_keys(tmp_path / "keys")[0]}) == 20


# -- the document ----------------------------------------------------------------------------------------------------


def test_the_document_declares_the_key_and_refusal_only_where_they_hold(serving: Guarded, guarded: Guarded) -> None:
    document = httpx.get(f"{serving.url}/openapi.json", headers=serving.headers).json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == (path != "/health")
            assert operation.get("security") == ([] if path == "/health" else None)
    assert document["paths"]["/health"]["get"]["responses"].keys() == {"200"}


load_all_checks()


def test_schemathesis_finds_no_operation_that_ignores_the_key(serving: Guarded) -> None:
    document = schemathesis.openapi.from_url(f"{serving.url}/openapi.json", headers=serving.headers)
    checks = CHECKS.get_by_names(["ignored_auth", "status_code_conformance", "response_schema_conformance"])
    seen = set()
    for found in document.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=3,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy())
        def exchange(case: Case) -> None:
            response = case.call(headers=serving.headers, timeout=120)
            assert response.status_code != 401
            case.validate_response(response, checks=checks, headers=serving.headers)
            assert case.call(timeout=120).status_code == (200 if case.path == "/health" else 401)

        exchange()
        seen.add(operation.path)
    assert "/v1/completions" in seen


# -- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_spire_complete_sends_the_key_of_the_environment(serving: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["complete", "Once upon a time", "--url", serving.url, "--temperature", "0", "--max-tokens", "8"]
    refused = spire(*command)
    assert refused.returncode == 1
    assert "the gateway refused (401)" in refused.stderr
    assert "SPIRE_API_KEY" in refused.stderr
    monkeypatch.setenv("SPIRE_API_KEY", serving.key)
    texts = {spire(*command, *more).stdout.strip() for more in ([], ["--no-stream"])}
    assert len(texts) == 1
    assert texts.pop()


def test_doctor_says_where_it_looked_for_a_key(guarded: Guarded) -> None:
    printed = CliRunner().invoke(app, ["doctor", "--json", "--url", guarded.url]).stdout
    check = next(check for check in json.loads(printed)["checks"] if check["name"].startswith("gateway"))
    assert not check["ok"]
    assert "SPIRE_API_KEY" in check["advice"]


def test_the_measurements_send_the_key_of_the_environment(serving: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(8)

    async def eval_s_client() -> int:
        async with Client(serving.url, 2) as client:
            return len(await client.complete_all(request, [[1, 5, 6]]))

    with pytest.raises(BenchError, match="401"):
        asyncio.run(eval_s_client())
    with pytest.raises(BenchError, match="401"):
        asyncio.run(stream_all(serving.url, [Timed(request.streamed([1, 5], 1))]))
    monkeypatch.setenv("SPIRE_API_KEY", f"{serving.key}\n")
    assert asyncio.run(eval_s_client()) == 1
    (answer,) = asyncio.run(stream_all(serving.url, [Timed(request.streamed([1, 5], 1))], authorization()))
    assert answer.tokens == 8


def test_another_server_is_sent_its_own_key_and_never_the_gateway_s(
    serving: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIRE_API_KEY", serving.key)
    with pytest.raises(BenchError, match="does not say what is served there"):
        Server.meet(serving.url, None)
    monkeypatch.setenv("SPIRE_AGAINST_API_KEY", serving.key)
    assert Server.meet(serving.url, None).model == "stories260K"


def test_a_key_that_no_header_can_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIRE_API_KEY", "spire-abc\ndef")
    with pytest.raises(SpireError) as refusal:
        authorization()
    assert "SPIRE_API_KEY" in str(refusal.value)
    assert "abc" not in str(refusal.value)


@pytest.mark.thorough
def test_spire_up_serves_with_keys_though_it_has_none_itself(stories_dir: Path, tmp_path: Path) -> None:
    key, log = create_key("alice", tmp_path / "keys"), tmp_path / "up.log"
    command = ["up", "--model", str(stories_dir), "--draft", "off", "--port", "0", "--threads", "1"]
    with log.open("wb") as output:
        whole = [sys.executable, "-m", "spire.cli", *command, "--keys", str(tmp_path / "keys")]
        up = subprocess.Popen(whole, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        eventually(lambda: "Ctrl-C stops" in log.read_text() or up.poll() is not None, within=90)
        assert "no completion: the gateway asks for an API key, and SPIRE_API_KEY" in log.read_text()
        found = re.search(r"http://\S+/v1/completions", log.read_text())
        assert found
        body = {"prompt": "Once upon a time", "max_tokens": 4}
        assert httpx.post(found[0], json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.post(found[0], json=body).status_code == 401
    finally:
        up.terminate()
        up.wait(30)
