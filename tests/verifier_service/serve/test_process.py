"""The verifier as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spire.checkpoints.tokenizer import load_tokenizer, tokenizer_of
from spire.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from tests.verifier_service.harness import free_port

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "verifier_service", *map(str, options)]


@pytest.fixture(scope="module")
def process(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A verifier process, its address and its metrics port. Some options come from the environment."""
    ready, metrics_port = tmp_path_factory.mktemp("run") / "ready", free_port()
    environment = ONE_THREAD | {"SPIRE_VERIFIER_MAX_SEQUENCES": "3", "SPIRE_VERIFIER_READY_FILE": str(ready)}
    options = ("--model", model_dir, "--port", 0, "--metrics-port", metrics_port, "--dtype", "float32")
    with subprocess.Popen(command(*options), env=environment, stderr=subprocess.PIPE, text=True) as started:
        deadline = time.monotonic() + 60
        while not ready.exists() and started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        yield started, ready.read_text(), metrics_port
        if started.poll() is None:
            started.kill()


def test_the_handshake_tells_what_is_hosted(process: tuple[subprocess.Popen[str], str, int], model_dir: Path) -> None:
    with grpc.insecure_channel(process[1]) as channel:
        info = rpc.VerifierStub(channel).GetInfo(pb.GetInfoRequest(), timeout=10)
        tokenizer = rpc.VerifierStub(channel).GetTokenizer(pb.GetTokenizerRequest(), timeout=10)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert (info.max_sequences, info.max_context, info.vocab_size, info.dtype) == (3, 200, 300, "float32")
    assert (info.num_layers, info.hidden_size, list(info.end_tokens)) == (3, 32, [1])
    assert info.model_name == model_dir.name
    assert len(info.target_fingerprint) == len(info.tokenizer_hash) == 16
    served = tokenizer_of(tokenizer.tokenizer_json)
    assert served.get_vocab() == load_tokenizer(model_dir).get_vocab()
    assert served.encode("one two").ids == load_tokenizer(model_dir).encode("one two").ids
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_are_served(process: tuple[subprocess.Popen[str], str, int]) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{process[2]}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert "spire_verifier_slots 3.0" in text


def test_sigterm_ends_it_cleanly(process: tuple[subprocess.Popen[str], str, int]) -> None:
    process[0].send_signal(signal.SIGTERM)
    _, output = process[0].communicate(timeout=20)
    assert process[0].returncode == 0
    assert "verifier service listens" in output


def refusal(*options: object) -> str:
    """Stderr of a start that must fail: one line, exit code 2."""
    done = subprocess.run(command(*options), env=ONE_THREAD, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_broken_checkpoint_is_named(model_dir: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    assert str(broken / "tokenizer.json") in refusal("--model", broken, "--port", 0)


@pytest.mark.thorough
def test_a_tokenizer_larger_than_the_vocabulary_is_refused_at_the_start(model_dir: Path, tmp_path: Path) -> None:
    larger = shutil.copytree(model_dir, tmp_path / "larger")
    tokenizer = load_tokenizer(larger)
    known = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<{number}>" for number in range(301 - known)])
    tokenizer.save(str(larger / "tokenizer.json"))
    assert "has 301 tokens, the model's vocab_size is 300" in refusal("--model", larger, "--port", 0)


def test_a_cache_that_cannot_fit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    endless = shutil.copytree(model_dir, tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    message = refusal("--model", endless, "--port", 0, "--max-context", 10**9)
    assert "--max-context" in message
    assert "GB" in message


@pytest.mark.thorough
def test_a_wrong_option_is_named(model_dir: Path) -> None:
    assert "port" in refusal("--model", model_dir, "--port", "here")
