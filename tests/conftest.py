"""Fixtures that every test may use: the converted stories260K target, and text. All from files in the repository."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: threads of two test processes wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"

from spire.bench.prompts import PromptSource
from spire.checkpoints.smollm2 import NotAvailable
from tests import smollm2
from tests.paths import TESTS
from tests.services import Service, Services, running, start

# Triton asks when it is first imported: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

FIXTURES, FAULTS = TESTS / "fixtures", TESTS / "faults"

# What starts processes: fixtures by name, and what test modules import.
STARTING_FIXTURES = {"changing", "driver", "guarded", "services", "serving", "shared", "shared_apart", "system"}
STARTERS = {id(starter) for starter in (running, start, subprocess, multiprocessing)}

# Files whose tests take seconds together, without processes, or whose libraries take seconds to import.
SECONDS = [
    "deploy/test_secrets.py",
    "draft_service/test_health.py",
    "draft_service/test_requests.py",
    "draft_service/test_worker.py",
    "gateway/api/test_long_work.py",
    "gateway/requests/test_field_names.py",
    "gateway/requests/test_fields.py",
    "gateway/requests/test_structured.py",
    "gateway/rounds/test_depth.py",
    "gateway/rounds/test_order.py",
    "gateway/text/test_tokenizer.py",
    "security/test_pickle.py",
    "spire/checkpoints/test_checkpoint.py",
    "spire/checkpoints/test_convert.py",
    "spire/checkpoints/test_generation_config.py",
    "spire/checkpoints/test_gguf.py",
    "spire/checkpoints/test_gguf_bpe.py",
    "spire/checkpoints/test_gguf_vocabulary.py",
    "spire/checkpoints/test_model_tokenizer.py",
    "spire/cli/test_perf_model_command.py",
    "spire/decoding/test_sampling.py",
    "spire/decoding/test_verification.py",
    "spire/model/cache/test_cache.py",
    "spire/model/test_draft.py",
    "spire/model/test_families.py",
    "spire/model/test_self_speculation.py",
    "spire/model/test_target.py",
    "spire/perf/test_calibration.py",
    "spire/perf/test_perf_model_properties.py",
    "spire/text/test_chat_template.py",
    "spire/training/test_draft_training.py",
    "system/test_garbage.py",
    "verifier_service/engine/test_protocol_model.py",
    "verifier_service/engine/test_rounds.py",
    "verifier_service/engine/test_self_drafting.py",
    "verifier_service/engine/test_shares.py",
    "verifier_service/feed/test_activations.py",
    "verifier_service/feed/test_feed.py",
    "verifier_service/sampling/test_grammar.py",
    "verifier_service/sampling/test_json_formats.py",
    "verifier_service/serve/test_lifetimes.py",
    "verifier_service/serve/test_pace_told.py",
]

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("spire", deadline=None)
settings.load_profile("spire")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which `make check` runs no test: libraries of theirs take many seconds."""
    if collection_path.suffix != ".py":
        return None
    left_out = "not seconds" in config.option.markexpr and collection_path in {TESTS / file for file in SECONDS}
    if "not processes" in config.option.markexpr:
        left_out |= FAULTS in collection_path.parents or _imports_starters(collection_path)
    return left_out or None


def _imports_starters(file: Path) -> bool:
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Import() if {"subprocess", "multiprocessing"} & {alias.name for alias in node.names}:
                return True
            case ast.ImportFrom(module="tests.services") if {"running", "start"} & {alias.name for alias in node.names}:
                return True
    return False


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark tests that start processes or take seconds, which `make check` leaves out."""
    seconds = {TESTS / file for file in SECONDS}
    for item in items:
        if item.path in seconds:
            item.add_marker(pytest.mark.seconds)
        imported = set(map(id, vars(item.module).values()))
        if STARTERS & imported or STARTING_FIXTURES & set(item.fixturenames) or FAULTS in item.path.parents:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_proxies() -> Iterator[None]:
    """No test asks what it started through a proxy of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def stories_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, small target: stories260K, converted from llama2.c's format. float32, vocabulary 512, context 512."""
    from spire.checkpoints.convert import convert_llama2c

    out = tmp_path_factory.mktemp("models") / "stories260K"
    source = FIXTURES / "stories260K"
    convert_llama2c(source / "stories260K.bin", source / "tok512.model", out)
    return out


# ChatML, as most tokenizers have it, in the few characters that stories260K knows.
CHAT_TEMPLATE = """{{ bos_token }}{% if tone is defined %}{{ 'be ' + tone + '\n' -}}{% endif %}
{% for message in messages %}
{% if message.name is defined %}{{ raise_exception('no names: ' + message.name) }}{% endif %}
{{ message.role + ': ' + message.content + '\n' -}}
{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@pytest.fixture(scope="session")
def stories_chat_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with the tokenizer configuration of a chat model."""
    out = tmp_path_factory.mktemp("chat") / "stories260K"
    shutil.copytree(stories_dir, out)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="session")
def stories_draft_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SPIRe draft of stories260K, pruned and untrained: it guesses badly, which no text may show."""
    from tests.untrained import untrained_draft

    out = tmp_path_factory.mktemp("models") / "stories260K-draft"
    return untrained_draft(stories_dir, out, layers=(3, 4), window=16)


@pytest.fixture(scope="session")
def smollm2_gguf(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file (Q4_1), downloaded once; skips where it cannot be had."""
    try:
        return smollm2.gguf_file(pytestconfig.cache.mkdir("smollm2"))
    except NotAvailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def smollm2_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout, bfloat16: vocabulary 49,152, context 8,192, a chat template."""
    if named := os.environ.get(smollm2.DIRECTORY):
        return Path(named)
    from spire.checkpoints.gguf.convert import convert_gguf

    out = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    convert_gguf(request.getfixturevalue("smollm2_gguf"), out)
    return out


@pytest.fixture(scope="session")
def prose() -> list[Path]:
    """Beginnings of three public-domain books, about 200 kB."""
    return sorted((FIXTURES / "text").glob("*.txt"))


@pytest.fixture(scope="module")
def services(stories_dir: Path, stories_draft_dir: Path) -> Iterator[Services]:
    """The three real services around stories260K, for one file of tests."""
    with running(stories_dir, stories_draft_dir) as services:
        yield services


@pytest.fixture(scope="module")
def source(stories_dir: Path, prose: list[Path]) -> PromptSource:
    """Prompts cut from the texts of the fixtures."""
    return PromptSource(stories_dir, prose)


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `spire certs` makes: a CA, and a directory for each service."""
    from spire.service.certificates import make_certificates

    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory)
    return directory


@pytest.fixture(scope="module")
def tls_verifier(certs: Path, stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A verifier that talks only to holders of a certificate."""
    options = ["--model", str(stories_dir), "--port", "0", "--dtype", "float32", "--tls", str(certs / "verifier")]
    service = start(["-m", "verifier_service", *options], tmp_path_factory.mktemp("verifier"))
    yield service
    service.stop()
