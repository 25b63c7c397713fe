"""Of several GPUs the one with the most free memory serves, unless another is chosen. `nvidia-smi` is a script here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from spire.cli.paths import Pair
from spire.cli.up import ModelOptions, Stack
from spire.perf.gpus import VISIBLE, chosen, gpus
from tests.spire.cli.test_cli import run

TWO = """GPU-a, NVIDIA H100 80GB HBM3, 1000, 81559, 580.159.04, Disabled
GPU-b, "NVIDIA H200, of ours", 140000, 143771, 580.159.04, Disabled
"""
DIVIDED = TWO.replace("580.159.04, Disabled", "580.159.04, Enabled")


def driver(monkeypatch: pytest.MonkeyPatch, directory: Path, says: str, code: int = 0) -> None:
    (directory / "told").write_text(says)
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat {directory / 'told'}\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_gpu_with_the_most_free_memory_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, tmp_path, TWO)
    assert [gpu.free for gpu in gpus()] == [1000, 140000]
    gpu = chosen()
    assert gpu is not None
    assert (gpu.uuid, gpu.name, gpu.divided) == ("GPU-b", "NVIDIA H200, of ours", False)


@pytest.mark.parametrize(
    "says", [TWO.splitlines()[0], DIVIDED, "", "no devices were found", "GPU-a, x, [N/A], 1, 2, No"]
)
def test_nothing_is_chosen_where_there_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    driver(monkeypatch, tmp_path, says)
    assert chosen() is None


def test_a_choice_that_is_made_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, tmp_path, TWO)
    assert chosen({"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, tmp_path, TWO, code=9)
    assert gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpus() == []


@pytest.mark.parametrize(("device", "seen"), [(None, "GPU-b"), ("cuda", "GPU-b"), ("cpu", None)])
def test_services_see_the_chosen_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, seen: str | None
) -> None:
    driver(monkeypatch, tmp_path, TWO)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    stack = Stack(Pair(tmp_path, None), ModelOptions(device=device), "127.0.0.1", 0, None, tmp_path)
    stack._choose_gpu()
    assert os.environ.get(VISIBLE) == seen


def test_doctor_names_a_gpu_that_torch_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(monkeypatch, tmp_path, DIVIDED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, printed = run(["doctor", "--url", "http://127.0.0.1:9", "--json"], capsys, monkeypatch)
    found = [check for check in json.loads(printed)["checks"] if check["name"] == "GPU"]
    assert [check["value"] for check in found] == [
        "NVIDIA H100 80GB HBM3, 1 of 80 GiB free, driver 580.159.04, divided by MIG",
        "NVIDIA H200, of ours, 137 of 140 GiB free, driver 580.159.04, divided by MIG",
    ]
    assert all("build of torch for CUDA" in check["advice"] for check in found)
