"""A verifier of a tiny random target on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch

from spire.checkpoints.weights import load_target, save_target
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.cache.paged import PagedCache
from spire.model.config import ModelConfig
from spire.model.target import Target
from spire.training.corpus import train_tokenizer
from tests.recorder import Recorder
from tests.verifier_service.harness import VOCAB, Verifier
from verifier_service.config import VerifierConfig
from verifier_service.serve.server import listening, load


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, width 32, grouped queries, weights wide enough that the argmax moves about."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=200,
        eos_token_ids=(1,),
    )
    target = Target(config)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    out = tmp_path_factory.mktemp("target")
    save_target(out, target, dtype=torch.float32)
    train_tokenizer(["one two three four five six seven eight nine ten " * 20], VOCAB).save(str(out / "tokenizer.json"))
    return out


@pytest.fixture(scope="session")
def target(model_dir: Path) -> Target:
    return load_target(model_dir)[0]


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and graphs as on a GPU, too: with torch in the place of kernels, and graphs that a double records."""
    if request.param == "as on a GPU":
        monkeypatch.setattr("verifier_service.serve.server.backend_for", lambda device: GpuBackend(Recorder()))
        monkeypatch.setattr("verifier_service.serve.server.cache_for", PagedCache)


Running = Callable[..., AbstractAsyncContextManager[Verifier]]


@pytest.fixture
def running(model_dir: Path) -> Running:
    """`async with running(max_sequences=2) as verifier:` with any option of the service."""

    @asynccontextmanager
    async def run(**options: object) -> AsyncIterator[Verifier]:
        values = {"model": model_dir, "dtype": "float32", "port": 0, "max_sequences": 8} | options
        config = VerifierConfig.model_validate(values)
        engine, hosted = load(config)
        async with listening(engine, hosted, config) as address:
            verifier = Verifier(address, engine, hosted.info)
            try:
                yield verifier
            finally:
                await verifier.close()

    return run


@pytest.fixture
async def verifier(running: Running) -> AsyncIterator[Verifier]:
    async with running() as started:
        yield started
