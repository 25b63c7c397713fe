"""A training run that dies goes on as if nothing had happened, and a run that cannot work says why."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spire.checkpoints.weights import load_target
from spire.errors import DataError
from spire.training.corpus import TokenStream
from spire.training.run import Checkpoint, Execution
from spire.training.target import TargetRecipe, train_target
from tests.conftest import FIXTURES

TEXT = FIXTURES / "text" / "jowett_charmides.txt"

TINY = TargetRecipe(
    steps=399,
    tokens_per_step=64,
    short_length=16,
    long_length=32,
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    heads=2,
)


def train(out: Path, recipe: TargetRecipe = TINY, data: Path = TEXT) -> None:
    train_target([data], [], out, recipe, Execution(compiled=False))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed")
    train(out)
    return out


def kill_after_first_checkpoint(out: Path) -> None:
    """Train in a process of its own and SIGKILL it between its first checkpoint and its end."""
    program = f"""
        import torch
        from pathlib import Path
        from tests.spire.training.test_target_training import train
        torch.set_num_threads(1)
        train(Path({str(out)!r}))
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "run" / "state.safetensors").exists():
        assert child.poll() is None, "the run ended before its first checkpoint"
        assert time.monotonic() < deadline, "the run never wrote a checkpoint"
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists(), "the run was over before it was killed"


def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    kill_after_first_checkpoint(tmp_path)
    train(tmp_path)
    whole, resumed = (load_file(out / "run" / "state.safetensors") for out in (undisturbed, tmp_path))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert (undisturbed / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert (undisturbed / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_training_lowers_the_loss_and_the_result_can_be_served(undisturbed: Path) -> None:
    lines = (undisturbed / "run" / "log.jsonl").read_text().splitlines()
    losses = [float(line.split('"loss": ')[1].split(",")[0]) for line in lines if '"loss"' in line]
    assert losses[-1] < losses[0] - 0.5
    target, _ = load_target(undisturbed)
    assert target.config.vocab_size == TINY.vocab_size


@pytest.mark.thorough
def test_another_seed_gives_other_weights(undisturbed: Path, tmp_path: Path) -> None:
    train(tmp_path, replace(TINY, seed=2))
    assert (undisturbed / "model.safetensors").read_bytes() != (tmp_path / "model.safetensors").read_bytes()


def test_a_run_is_not_resumed_with_another_recipe(undisturbed: Path) -> None:
    with pytest.raises(DataError, match=r"made with adamw_rate = 0\.003, this run asks for 0\.1"):
        train(undisturbed, replace(TINY, adamw_rate=0.1))


def test_a_run_is_not_resumed_with_other_data(undisturbed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT.read_text() + "And so on.")
    with pytest.raises(DataError, match=r"made with data = '[\d,]+ tokens .*, this run asks for '[\d,]+ tokens "):
        train(undisturbed, data=other)


def test_a_checkpoint_that_does_not_tell_its_data_is_resumed(tmp_path: Path) -> None:
    recipe = asdict(TINY)
    Checkpoint(tmp_path, recipe).save(3, torch.nn.Linear(1, 1), [])
    resumed = Checkpoint(tmp_path, recipe | {"data": "7 tokens"})
    assert resumed.step() == 3
    resumed.save(4, torch.nn.Linear(1, 1), [])
    with pytest.raises(DataError, match="made with data = '7 tokens', this run asks for '8 tokens'"):
        Checkpoint(tmp_path, recipe | {"data": "8 tokens"}).step()


def test_a_finished_run_is_not_taken_for_a_shorter_one(undisturbed: Path) -> None:
    with pytest.raises(DataError, match="has 399 steps behind it, this run asks for 300"):
        train(undisturbed, replace(TINY, steps=300))


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model, checkpoint = torch.nn.Linear(1, 1), Checkpoint(tmp_path, asdict(TINY))
    checkpoint.save(3, model, [])
    model.weight.data.fill_(torch.nan)
    with pytest.raises(DataError, match="weight is not finite after 4 steps"):
        checkpoint.save(4, model, [])
    assert checkpoint.step() == 3


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/run cannot be made: Not a directory"):
        Checkpoint(tmp_path / "file" / "run", {})


def test_a_sequence_longer_than_a_step_is_a_step(tmp_path: Path) -> None:
    train(tmp_path, replace(TINY, steps=2, tokens_per_step=8))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("given", [{"heads": 32}, {"head_dim": 3}])
def test_a_shape_that_no_target_has_is_refused(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no target of this shape: "):
        train(tmp_path, replace(TINY, **given))
    assert list(tmp_path.iterdir()) == []


def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too little")
    with pytest.raises(DataError, match=r"holds \d+ tokens, fewer than one sequence of 32"):
        train(tmp_path / "out", data=short)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, r"absent\.txt does not exist"),
        ("latin.txt", b"caf\xe9", r"latin\.txt, line 1: byte 4 is 0xe9"),
        ("broken.jsonl", b'{"text": "a"}\n{"other": 1}\n', r"broken\.jsonl, line 2: no 'text'"),
        ("picture.png", b"\x89PNG", r"picture\.png, line 1: byte 1 is 0x89"),
    ],
)
def test_data_that_cannot_be_used_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        train(tmp_path / "out", data=tmp_path / name)


def test_the_order_of_the_data_depends_on_seed_and_step_alone() -> None:
    first, second = (TokenStream(np.arange(5000, dtype=np.uint32), start_token=0) for _ in range(2))
    first.batch(1, 0, 4, 16)
    assert (first.batch(1, 7, 4, 16) == second.batch(1, 7, 4, 16)).all()
    assert (first.batch(1, 7, 4, 16) != first.batch(1, 8, 4, 16)).any()
    assert (first.batch(1, 7, 4, 16) != first.batch(2, 7, 4, 16)).any()
    assert (first.batch(1, 7, 4, 16)[:, 0] == 0).all()
