"""TLS: between the services, who has no certificate is refused and reads why; clients may speak HTTPS."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from spire.errors import DataError, SpireError
from spire.rpc.channel import connect, listen, new_server
from spire.rpc.tls import Tls, in_words
from spire.rpc.trust import Trust
from spire.service.certificates import make_certificates
from spire.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from tests.gateway.conftest import eventually
from tests.marks import thoroughly
from tests.security.conftest import refused_start
from tests.services import Service, start

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


async def met(address: str, tls: Tls | None) -> str:
    """The name of the model at the address, or why it is not told."""
    async with connect(address, Trust(tls)) as channel:
        try:
            return (await rpc.VerifierStub(channel).GetInfo(pb.GetInfoRequest(), timeout=5)).model_name
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"


async def test_a_certificate_of_the_ca_is_let_in(certs: Path, tls_verifier: Service) -> None:
    for service in ("gateway", "draft", "verifier"):
        assert await met(tls_verifier.address, Tls.read(certs / service)) == "stories260K"


@pytest.mark.parametrize(
    ("peer", "logged"),
    [
        ("plain", "WRONG_VERSION_NUMBER"),
        ("none", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("another CA's", "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"),
        ("expired", "CERTIFICATE_VERIFY_FAILED: certificate has expired"),
    ],
)
async def test_any_other_peer_is_refused_and_the_log_says_why(
    peer: str, logged: str, certs: Path, tls_verifier: Service, tmp_path: Path
) -> None:
    if peer == "plain":
        assert (await met(tls_verifier.address, None)).startswith("UNAVAILABLE")
    elif peer == "none":
        authority = grpc.ssl_channel_credentials((certs / "ca.crt").read_bytes())
        async with grpc.aio.secure_channel(tls_verifier.address, authority) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await rpc.VerifierStub(channel).GetInfo(pb.GetInfoRequest(), timeout=5)
    else:
        if peer == "expired":
            shutil.copytree(certs, tmp_path, dirs_exist_ok=True)
            make_certificates(tmp_path, days=0)
        else:
            make_certificates(tmp_path)
        shutil.copy(certs / "ca.crt", tmp_path / "gateway")
        assert (await met(tls_verifier.address, Tls.read(tmp_path / "gateway"))).startswith("UNAVAILABLE")
    eventually(lambda: logged in tls_verifier.log.read_text())


@pytest.mark.parametrize("module", [thoroughly("gateway"), "draft_service"])
def test_a_service_without_a_certificate_says_what_it_lacks(
    module: str, tls_verifier: Service, stories_draft_dir: Path, tmp_path: Path
) -> None:
    own = ["--startup-patience", "0"] if module == "gateway" else ["--draft", str(stories_draft_dir)]
    log = tmp_path / "log"
    command = [sys.executable, "-m", module, "--verifier", tls_verifier.address, "--port", "0", *own]
    with subprocess.Popen(command, stderr=log.open("wb"), env=ONE_THREAD) as process:
        eventually(lambda: "unreachable" in log.read_text() or process.poll() is not None, within=60)
        process.kill()
    said = next(json.loads(line) for line in log.read_text().splitlines() if "unreachable" in line)
    assert said["peer"] == "verifier"
    assert "it turned this service away: if it has --tls, this one needs it too" in said["reason"]


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("plain", "it does not speak TLS"),
        ("of another name", "its certificate is for another name"),
        ("of another CA", "its certificate is not of the CA"),
        ("expired", "its certificate has expired"),
    ],
)
async def test_an_untrustworthy_server_is_not_trusted_and_the_reason_is_told(
    server: str, told: str, certs: Path, tmp_path: Path
) -> None:
    ours = Tls.read(certs / "gateway")
    if server == "expired":
        shutil.copytree(certs, tmp_path, dirs_exist_ok=True)
    make_certificates(tmp_path, days=0 if server == "expired" else 1)
    its = {"plain": None, "of another name": ours}.get(server, Tls.read(tmp_path / "verifier"))
    # No certificate is for this address of loopback.
    host = "127.0.0.2" if server == "of another name" else "127.0.0.1"
    running = new_server()
    port = listen(running, host, 0, Trust(its))
    await running.start()
    try:
        assert told in in_words(await met(f"{host}:{port}", ours), ours)
    finally:
        await running.stop(None)


def test_a_certificate_is_for_the_names_it_was_made_for(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["verifier.internal", "10.0.0.7"])
    decoded = ssl._ssl._test_decode_cert(str(tmp_path / "verifier" / "tls.crt"))  # type: ignore[attr-defined]
    names = {name for _, name in decoded["subjectAltName"]}
    assert {"verifier", "verifier.internal", "10.0.0.7", "localhost", "127.0.0.1"} <= names


def test_making_them_again_renews_them_under_the_same_ca(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    assert {file.name for file in before if file.stat().st_mode & 0o077} == {"ca.crt", "tls.crt"}
    make_certificates(tmp_path)
    changed = {file.name for file, content in before.items() if file.read_bytes() != content}
    assert changed == {"tls.crt", "tls.key"}


@pytest.mark.parametrize(
    ("broken", "how"),
    [(file, how) for file in ("tls.crt", "tls.key", "ca.crt") for how in ("missing", "garbage")]
    + [("tls.crt", "a stranger's"), ("tls.key", "a stranger's")],
)
def test_files_that_do_not_belong_together_are_named(broken: str, how: str, certs: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(certs / "gateway", tmp_path / "gateway")
    if how == "missing":
        (directory / broken).unlink()
    else:
        (directory / broken).write_bytes(b"no PEM" if how == "garbage" else (certs / "draft" / broken).read_bytes())
    with pytest.raises(SpireError, match=re.escape(broken)) as refusal:
        Tls.read(directory)
    assert str(directory) in str(refusal.value)
    assert "spire certs" in str(refusal.value)


@pytest.mark.parametrize("option", [thoroughly("--tls"), "--https"])
def test_a_gateway_with_unusable_files_does_not_start(option: str, tmp_path: Path) -> None:
    message = refused_start("gateway", "--port", "0", option, str(tmp_path))
    assert f"{tmp_path}: tls.crt and tls.key cannot be used" in message


@pytest.mark.thorough
def test_spire_up_serves_with_tls_between_all_three_and_https_to_clients(
    stories_dir: Path, stories_draft_dir: Path, tmp_path: Path
) -> None:
    spire = [sys.executable, "-m", "spire.cli"]
    subprocess.run([*spire, "certs", str(tmp_path / "tls")], check=True, capture_output=True, timeout=60)
    command = [*spire, "up", "--model", str(stories_dir), "--draft", str(stories_draft_dir), "--port", "0", "--k", "4"]
    command += ["--threads", "1", "--once", "--prompt", "Once upon a time", "--tls", str(tmp_path / "tls")]
    command += ["--https", str(tmp_path / "tls" / "gateway")]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "https://127.0.0.1:" in done.stdout
    assert re.search(r"64 tokens · τ \d\.\d\d", done.stdout), done.stdout


@pytest.mark.parametrize("missing", ["ca.key", "ca.crt"])
def test_an_authority_that_is_not_whole_is_left_as_it_is(missing: str, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / missing).unlink()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    with pytest.raises(DataError, match=f"{tmp_path}: .*{missing} of the CA there is missing"):
        make_certificates(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before


def test_an_authority_with_the_key_of_another_is_refused(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    shutil.copy(certs / "ca.key", tmp_path)
    with pytest.raises(DataError, match=r"ca\.key is not the key of .*ca\.crt"):
        make_certificates(tmp_path)


def test_certificates_that_would_never_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="certificates cannot be made"):
        make_certificates(tmp_path, days=10**10)


def test_clients_may_speak_https(certs: Path, tmp_path: Path) -> None:
    options = ["--verifier", "127.0.0.1:9", "--startup-patience", "0", "--port", "0"]
    gateway = start(["-m", "gateway", *options, "--https", str(certs / "gateway")], tmp_path)
    try:
        trusted = ssl.create_default_context(cafile=str(certs / "ca.crt"))
        assert httpx.get(f"https://{gateway.address}/health", verify=trusted).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://{gateway.address}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{gateway.address}/health")
    finally:
        gateway.stop()
