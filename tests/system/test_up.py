"""`spire up` with real services: it serves, mends what dies, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from spire.checkpoints.weights import load_draft, load_target, save_draft
from spire.cli import app
from spire.cli.paths import choose_pair
from spire.cli.service import Service
from tests.marks import thoroughly

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc")

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def spire(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spire.cli", *arguments]


def up(model: Path, draft: Path, *more: str) -> list[str]:
    shape = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--port", "0", "--k", "4"]
    return spire("up", "--model", str(model), "--draft", str(draft), *shape, *more)


def wait_until(what: str, done: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.05)


def services(parent: int) -> dict[str, int]:
    """Process ids of the child services, by module name."""
    found = {}
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:  # it was a child a moment ago
            continue
        if b"-m" in command:
            found[command[command.index(b"-m") + 1].decode()] = int(child)
    return found


def alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


class Running:
    """A `spire up` that serves: its process and where its gateway listens."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] = ENVIRONMENT):
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        wait_until("spire up to serve", self._serves)
        found = re.search(r"completions (http://\S+)/v1/completions", self.printed)
        assert found, self.printed
        self.url = found[1]

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.printed
        return "Ctrl-C stops" in self.printed

    def complete(self, **changes: object) -> dict:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0} | changes
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self) -> str:
        return self.complete()["choices"][0]["text"]


@pytest.fixture(scope="module")
def untouched(
    stories_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A `spire up` for all tests that only ask it."""
    yield from _running(stories_dir, stories_draft_dir, tmp_path_factory.mktemp("up"))


@pytest.fixture
def running(stories_dir: Path, stories_draft_dir: Path, tmp_path: Path) -> Iterator[Running]:
    """A `spire up` of which a test may kill parts."""
    yield from _running(stories_dir, stories_draft_dir, tmp_path)


def _running(model: Path, draft: Path, directory: Path) -> Iterator[Running]:
    stack = Running(up(model, draft, "--prompt", ""), directory / "up.log")
    yield stack
    if stack.process.poll() is None:
        stack.process.terminate()
        stack.process.wait(60)
        assert "did not end" not in stack.printed, stack.printed


def test_once_completes_a_prompt_prints_figures_and_stops(stories_dir: Path, stories_draft_dir: Path) -> None:
    command = up(stories_dir, stories_draft_dir, "--once", "--prompt", "Once upon a time")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Once upon a time, there" in done.stdout
    assert re.search(r"\d+ tokens · τ \d\.\d\d · [\d.]+ tokens/s", done.stdout), done.stdout
    assert "/v1/completions" in done.stdout


def test_a_chat_model_answers_a_question_beside_plain_decoding(stories_chat_dir: Path, stories_draft_dir: Path) -> None:
    command = up(stories_chat_dir, stories_draft_dir, "--once")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is the capital of France" in done.stdout
    assert re.search(r"after the first token \d+ tokens/s, by plain decoding \d+: \d\.\d\d ×", done.stdout), done.stdout


@pytest.mark.thorough
def test_logs_stay_where_they_were_wanted_and_the_model_has_its_name(stories_dir: Path, tmp_path: Path) -> None:
    logs = tmp_path / "kept" / "logs"
    options = ["--port", "0", "--threads", "1", "--once", "--log-dir", str(logs), "--served-model-name", "my-model"]
    command = spire("up", "--model", str(stories_dir), "--draft", "off", *options)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"logs        {logs}" in done.stdout
    assert {file.name for file in logs.iterdir()} == {"verifier.log", "gateway.log"}
    assert '"model": "my-model"' in (logs / "verifier.log").read_text()


@pytest.mark.parametrize("told", [{}, {"SPIRE_GATEWAY_WITHOUT_KEYS": "False"}], ids=["not said", "said no"])
def test_an_open_address_without_keys_is_refused_before_anything_is_loaded(
    told: dict[str, str], tmp_path: Path
) -> None:
    options = ["--host", "0.0.0.0", "--port", "0", "--once", "--log-dir", str(tmp_path / "logs")]
    command = spire("up", "--model", "tiny", *options)
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | told, timeout=60)
    assert done.returncode == 1
    assert "other machines can reach 0.0.0.0, and no API keys are asked for" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_tokenizer_that_does_not_fit_is_refused_before_loading_anything(stories_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(stories_dir, tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    command = spire("up", "--model", str(model), "--port", "0", "--once", "--log-dir", str(tmp_path / "logs"))
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 1
    assert "the tokenizer has 513 tokens, the model's vocab_size is 512" in " ".join(done.stderr.split())
    assert not (tmp_path / "logs").exists()


@pytest.mark.thorough
def test_ids_without_text_are_told_before_anything_is_loaded(stories_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(stories_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 640}))
    command = spire("up", "--model", str(model), "--port", "0", "--once")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 1  # the weights have 512 rows
    assert "128 of the model's 640 ids have no text" in " ".join(done.stdout.split())


@pytest.mark.thorough
@pytest.mark.parametrize("told", ["option", thoroughly("environment"), thoroughly("file")])
def test_serving_everybody_can_be_said_in_every_way(told: str, stories_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "spire.toml").write_text("[gateway]\nwithout_keys = true\n" if told == "file" else "")
    environment = ENVIRONMENT | ({"SPIRE_GATEWAY_WITHOUT_KEYS": "true"} if told == "environment" else {})
    environment |= {"SPIRE_CONFIG": str(tmp_path / "spire.toml")}
    options = ["--host", "0.0.0.0", "--port", "0", "--once", *(["--without-keys"] if told == "option" else [])]
    command = spire("up", "--model", str(stories_dir), "--draft", "off", *options)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_a_model_without_a_draft_drafts_for_itself_when_asked(stories_dir: Path) -> None:
    command = spire("up", "--model", str(stories_dir), "--port", "0", "--threads", "1", "--once", "--k", "4")
    environment = ENVIRONMENT | {"SPIRE_DRAFT": "magicdec"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"tokens · τ [2-5]\.\d\d · ", done.stdout), done.stdout
    assert "MagicDec" in done.stdout
    assert "decoding plainly" not in done.stdout


def test_a_model_without_a_draft_is_told_how_to_speculate(stories_dir: Path) -> None:
    note = choose_pair(stories_dir, None).note
    assert "decoding plainly" in note
    assert "--draft magicdec" in note
    assert "spire train draft" in note


def test_doctor_knows_the_target_as_its_own_draft(stories_dir: Path) -> None:
    options = ["--model", str(stories_dir), "--draft", "magicdec", "--json", "--url", "http://127.0.0.1:9"]
    printed = CliRunner().invoke(app, ["doctor", *options]).stdout
    checks = {check["name"]: check for check in json.loads(printed)["checks"]}
    assert checks["draft"]["ok"]
    assert checks["draft"]["value"] == "magicdec: the target itself"


@pytest.mark.thorough
def test_complete_streams_the_same_text_as_it_prints_whole(untouched: Running) -> None:
    request = ["complete", "Once upon a time", "--url", untouched.url, "--temperature", "0", "--max-tokens", "24"]

    def output(*more: str) -> str:
        return subprocess.run(spire(*request, *more), capture_output=True, text=True, check=True, timeout=60).stdout

    whole = output("--no-stream")
    assert whole.strip() == untouched.text().strip()
    assert output() == whole
    assert output("--draft", "off") == whole
    report = json.loads(output("--json"))
    assert report["tokens"] == 24
    assert report["tau"] >= 1
    assert report["text"].strip() == whole.strip()


@pytest.mark.thorough
def test_a_refusal_by_the_gateway_is_shown(untouched: Running) -> None:
    command = spire("complete", "hi", "--url", untouched.url, "--max-tokens", "-1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the gateway refused (400)" in done.stderr
    assert "max_tokens" in done.stderr


@pytest.mark.parametrize("module", ["verifier_service", thoroughly("draft_service"), thoroughly("gateway")])
@pytest.mark.fault(1, 4)
def test_a_service_that_dies_is_restarted_where_it_was(module: str, running: Running) -> None:
    before = running.text()
    killed = services(running.process.pid)[module]
    os.kill(killed, signal.SIGKILL)
    wait_until("a new process", lambda: services(running.process.pid).get(module, killed) != killed)

    def serves_again() -> bool:
        try:
            return httpx.get(f"{running.url}/ready", timeout=5).status_code == 200 and running.text() == before
        except (httpx.HTTPError, AssertionError):
            return False

    wait_until("the same text from the same address", serves_again)
    assert "was ended by SIGKILL; restarting" in running.printed


@pytest.mark.thorough
@pytest.mark.fault(2)
def test_a_service_that_is_frozen_is_restarted_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spire.cli.service._LOOKS_WITHOUT_A_SIGN", 60)
    service = Service("gateway", ["--verifier", "127.0.0.1:9", "--startup-patience", "0"], tmp_path)
    said: list[str] = []

    def look() -> bool:
        service.keep_alive(said.append)
        time.sleep(0.05)
        return service.restarts > 0

    service.start()
    try:
        wait_until("it to serve", service.serves)
        assert not any(look() for _ in range(90)), said
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        wait_until("another process", look)
        wait_until("the same address", lambda: service.ready_file.exists())
        assert service.ready_file.read_text() == service.address
        assert "no sign of life" in said[0]
    finally:
        service.ask_to_stop()
        service.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, thoroughly(signal.SIGINT)])
@pytest.mark.fault(20)
def test_a_signal_ends_all_services_in_order(number: signal.Signals, running: Running) -> None:
    children = services(running.process.pid).values()
    assert len(children) == 3
    running.process.send_signal(number)
    assert running.process.wait(30) == 0
    assert not [child for child in children if alive(child)]


def test_a_killed_spire_up_leaves_no_process_behind(running: Running) -> None:
    children = services(running.process.pid).values()
    assert len(children) == 3
    running.process.kill()
    wait_until("the services to end with it", lambda: not any(alive(child) for child in children), 10)


@pytest.mark.thorough
@pytest.mark.fault(21)
def test_a_draft_of_another_target_is_refused_with_both_fingerprints(
    stories_dir: Path, stories_draft_dir: Path, tmp_path: Path
) -> None:
    stranger = load_draft(stories_draft_dir)
    stranger.draft = stranger.draft.model_copy(update={"target_fingerprint": "0123456789abcdef"})
    save_draft(tmp_path / "stranger", stranger, torch.float32)
    command = up(stories_dir, tmp_path / "stranger", "--once")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 1
    assert "0123456789abcdef" in done.stderr
    assert load_target(stories_dir)[1] in done.stderr


def test_a_service_that_cannot_start_shows_its_last_lines(stories_dir: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(stories_dir, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((stories_dir / "model.safetensors").read_bytes()[:1000])
    command = spire("up", "--model", str(broken), "--draft", "off", "--port", "0", "--once")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 1
    assert "the verifier service ended with exit code" in done.stderr
    assert f"{broken}/model.safetensors cannot be read" in done.stderr


def test_a_start_that_fails_shows_nothing_of_an_earlier_log(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    service = Service("gateway", ["--no-such-option"], tmp_path, logs=tmp_path / "kept")
    service.log.write_text("the last run's words\n")
    service.start()
    assert service.process is not None
    service.process.wait()
    assert "--no-such-option" in service.last_lines()
    assert "the last run's words" not in service.last_lines(1000)
    assert service.log.read_text().startswith("the last run's words\n")


def test_a_log_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    service = Service("gateway", ["--no-such-option"], tmp_path)
    service.start()
    assert service.process is not None
    service.process.wait()
    service.log.unlink()
    service.bound_log()
    assert "printed nothing" in service.last_lines()


@pytest.mark.fault(35)
def test_a_log_that_has_grown_begins_anew_and_one_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire.cli.service.LARGEST_LOG", 1000)
    service = Service("gateway", ["--verifier", "127.0.0.1:9", "--startup-patience", "0"], tmp_path)
    service.start()
    try:
        wait_until("it to serve", service.serves)
        service.bound_log()
        assert "listening" in service.log.read_text()
        for flood in ("first", "second"):
            with service.log.open("a") as log:
                log.write(f"{flood} flood\n" * 200)
            service.bound_log()
            assert service.log.stat().st_size == 0
            kept = service.log.with_suffix(".log.1")
            assert f"{flood} flood" in kept.read_text()
            assert kept.stat().st_mode & 0o077 == 0
        assert {file.name for file in tmp_path.glob("*.log*")} == {"gateway.log", "gateway.log.1"}
    finally:
        service.ask_to_stop()
        service.stop()
    assert service.last_lines().strip().startswith('{"event": "draining"'), "the service goes on where the log begins"


@pytest.mark.thorough
def test_how_much_is_held_can_be_said_and_is_shown(stories_dir: Path) -> None:
    command = up(stories_dir, Path("off"), "--once", "--prompt", "", "--max-context", "300", "--cache-gb", "0.1")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 sequences × 300 positions" in done.stdout


@pytest.mark.thorough
def test_a_context_beyond_the_models_is_refused_with_both_numbers(stories_dir: Path) -> None:
    command = up(stories_dir, Path("off"), "--once", "--max-context", "513")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 1
    assert "--max-context 513: the model takes at most 512 positions" in done.stderr
    assert "Traceback" not in done.stderr
