"""The Dockerfiles build, and what they build runs as docker-compose.yml says: `make images-test`, about 10 minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.compose import ROOT, composed
from tests.deploy.images import TOOLS, Container, Images, end
from tests.gateway.conftest import eventually
from tests.verifier_service.harness import free_port

_ABSENT = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif("SPIRE_TEST_IMAGES" not in os.environ, reason="takes minutes and gigabytes: make images-test"),
    pytest.mark.skipif(bool(_ABSENT), reason=f"needs buildah: apt-get install {' '.join(_ABSENT)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot isolation needs root"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """Both images. Removed afterwards: they are gigabytes."""
    directory = tmp_path_factory.mktemp("images")
    built = Images(directory)
    built.build_base()
    built.build("gateway")
    built.build("model", TORCH_INDEX="")
    yield built
    shutil.rmtree(directory)


@dataclass(frozen=True)
class Running:
    """A service in a container: where its port is on this machine, and what compose says of it."""

    container: Container
    process: subprocess.Popen[bytes]
    log: Path
    port: int
    service: dict[str, Any]
    options: tuple[str, ...]

    def healthy(self) -> bool:
        """As the health check of compose finds it, at the port that it has here."""
        assert self.process.poll() is None, self.log.read_text()
        test = [
            word.replace(f":{_port(self.service)}", f":{self.port}") for word in self.service["healthcheck"]["test"]
        ]
        return self.container.run(*test[1:], options=self.options).returncode == 0


def _port(service: dict[str, Any]) -> str:
    return next(value for name, value in service["environment"].items() if name in _PORTS)


_PORTS = tuple(f"SPIRE_{service}_PORT" for service in ("GATEWAY", "VERIFIER", "DRAFT"))


@pytest.fixture(scope="module")
def deployed(images: Images, secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Verifier, draft and gateway from their images, with users, mounts and environment of the profile cpu.

    What differs: ports are free ones of this machine, whose network chroot isolation shares.
    """
    services = composed("cpu")["services"]
    directory = tmp_path_factory.mktemp("deployed-images")
    ports = {name: free_port() for name in ("verifier", "draft", "gateway")}
    memory = Path("/dev/shm") / f"spire-test-{os.getpid()}"
    memory.mkdir(mode=0o700)
    os.chown(memory, 10001, 10001)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, memory)
        running: dict[str, Running] = {}
        for name in ports:
            image = "localhost/spire-gateway" if name == "gateway" else "localhost/spire-model"
            container = stack.enter_context(images.container(image))
            running[name] = _started(container, name, services[name], ports, secrets, memory, directory)
            stack.callback(end, running[name].process)
            eventually(running[name].healthy, within=180)
        yield running


def _started(
    container: Container,
    name: str,
    service: dict[str, Any],
    ports: dict[str, int],
    secrets: Path,
    memory: Path,
    directory: Path,
) -> Running:
    own = {f"SPIRE_{name.upper()}_PORT": str(ports[name]), f"SPIRE_{name.upper()}_METRICS_PORT": str(free_port())}
    environment = {
        variable: own.get(variable) or _here(value, ports)
        for variable, value in service["environment"].items()
        if value is not None
    }
    options = [part for variable, value in environment.items() for part in ("--env", f"{variable}={value}")]
    for volume in service["volumes"]:
        source = _source(volume, secrets, memory)
        options += ["--volume", f"{source}:{volume['target']}:{'ro' if volume.get('read_only') else 'rw'}"]
    options += ["--user", service["user"], "--mount", "type=tmpfs,dst=/tmp"]
    command = ["python", "-m", *(service["command"] or ["gateway"])]
    log = directory / f"{name}.log"
    process = subprocess.Popen(
        container.command(command, options), stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
    )
    return Running(container, process, log, ports[name], service, tuple(options))


def _here(value: str, ports: dict[str, int]) -> str:
    for name, port in ports.items():
        if value.startswith(f"{name}:"):
            return f"127.0.0.1:{port}"
    return value


def _source(volume: dict[str, Any], secrets: Path, memory: Path) -> Path:
    if volume["type"] == "volume":
        return memory
    source = Path(volume["source"])
    own = ROOT / "deploy" / "secrets"
    return secrets / source.relative_to(own) if own in source.parents else source


@pytest.fixture(scope="module")
def client(deployed: dict[str, Running], your_key: dict[str, str]) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{deployed['gateway'].port}"
    with httpx.Client(base_url=url, headers=your_key, timeout=120) as asking:
        eventually(lambda: asking.get("/ready").json().get("draft") == "connected", within=60)
        yield asking


def test_the_images_answer_a_completion_with_speculation(client: httpx.Client) -> None:
    body = {"prompt": "The old man looked at the sea and", "max_tokens": 48, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    details = answer["usage"]["completion_tokens_details"]
    assert answer["usage"]["completion_tokens"] == 48
    assert details["accepted_prediction_tokens"] > 0
    plain = client.post("/v1/completions", json=body | {"speculation": {"draft": "off"}}).raise_for_status().json()
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_the_live_page_is_in_the_image(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


def test_who_has_no_key_is_refused(deployed: dict[str, Running]) -> None:
    url = f"http://127.0.0.1:{deployed['gateway'].port}"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401


def test_activations_travel_through_the_shared_memory(client: httpx.Client, deployed: dict[str, Running]) -> None:
    events = [json.loads(line) for line in deployed["draft"].log.read_text().splitlines() if line.startswith("{")]
    carriers = [event["carrier"] for event in events if "carrier" in event]
    assert carriers[-1:] == ["shared_memory"]


def test_the_health_check_tells_a_service_that_is_gone(deployed: dict[str, Running]) -> None:
    """A control for the health checks that starting has waited for."""
    verifier = deployed["verifier"]
    gone = Running(verifier.container, verifier.process, verifier.log, free_port(), verifier.service, verifier.options)
    assert not gone.healthy()


def test_a_service_writes_nothing_where_its_root_would_be_read_only(
    client: httpx.Client, deployed: dict[str, Running], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 8}).raise_for_status()
    assert {name: service.container.written_since(marker) for name, service in deployed.items()} == {
        "verifier": set(),
        "draft": set(),
        "gateway": set(),
    }
    (deployed["draft"].container.root / "opt" / "written").touch()
    assert deployed["draft"].container.written_since(marker) == {"/opt/written"}


@pytest.mark.parametrize("image", ["localhost/spire-gateway", "localhost/spire-model"])
def test_an_image_runs_as_a_user_without_capabilities_and_cannot_install(images: Images, image: str) -> None:
    with images.container(image) as container:
        assert container.run("id", "-u").stdout.strip() == "10001"
        status = container.run("cat", "/proc/self/status").stdout
        assert "CapEff:\t0000000000000000" in status
        assert container.run("touch", "/opt/spire/x").returncode != 0
        assert container.run("python", "-m", "pip", "--version").returncode != 0


def test_torch_is_in_the_image_of_the_models_alone(images: Images) -> None:
    found = {}
    for name in ("gateway", "model"):
        with images.container(f"localhost/spire-{name}") as container:
            found[name] = container.run("python", "-c", "import torch").returncode == 0
    assert found == {"gateway": False, "model": True}


def test_what_pip_was_told_is_not_in_the_image(images: Images) -> None:
    for name in ("gateway", "model"):
        with images.container(f"localhost/spire-{name}") as container:
            file = container.root / "etc" / "pip.conf"
            assert not file.exists() or not file.read_text()


def test_the_gateway_s_image_makes_the_secrets(images: Images, tmp_path: Path) -> None:
    """As the service `secrets` of compose does, here as root."""
    service = composed("setup")["services"]["secrets"]
    with images.container("localhost/spire-gateway") as container:
        volumes = [f"{ROOT / 'deploy' / 'make-secrets'}:/make-secrets:ro", f"{tmp_path}:/secrets"]
        options = ["--user", "0:0", *(part for volume in volumes for part in ("--volume", volume))]
        made = container.run(*service["entrypoint"], options=options)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "you" / "api_key").read_text().startswith("spire-")
    assert (tmp_path / "tls" / "draft" / "tls.crt").is_file()
