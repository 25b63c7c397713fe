"""Greedy text of every model family through REST is that of `transformers`, with and without speculation.

The models are random and small, the drafts are a SPIRe draft of their last layers and MagicDec: 64 prompts of mixed
lengths, batched, in fp32 (`tests/spire/model/test_target.py` compares logits).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from spire.errors import CheckpointError
from tests.greedy import by_transformers, complete
from tests.marks import thoroughly
from tests.services import Services, running
from tests.spire.model.test_target import reference_model
from tests.untrained import untrained_draft
from verifier_service.config import VerifierConfig
from verifier_service.serve.server import load

# Thousands of tokens, on whatever machine.
pytestmark = pytest.mark.timeout(1200)

LENGTHS, EACH, GENERATED = (3, 17, 40, 64, 90, 130, 170, 220), 8, 24
WINDOW = 256
# Sizes that the CPU kernels fit.
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
SYSTEMS = [
    ("mistral", "spire"),
    ("qwen2", "spire"),
    ("qwen3", "spire"),
    thoroughly(("mistral", "magicdec")),
    thoroughly(("qwen2", "magicdec")),
    ("qwen3", "magicdec"),
]


class Case(NamedTuple):
    """A family's checkpoint, the kind of its draft, and the services around both."""

    model: Path
    draft: str
    services: Services


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    drawn = (torch.randint(3, SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS * EACH)
    return [ids.tolist() for ids in drawn]


def checkpoint(model_type: str, stories_dir: Path, out: Path) -> Path:
    reference_model(model_type, **SIZES | KINDS[model_type]).save_pretrained(out)
    shutil.copy(stories_dir / "tokenizer.json", out)
    return out


@pytest.fixture(scope="module", params=SYSTEMS, ids="-".join)
def case(request: pytest.FixtureRequest, stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model_type, kind = request.param
    directory = tmp_path_factory.mktemp("models")
    model = checkpoint(model_type, stories_dir, directory / "target")
    draft = untrained_draft(model, directory / "draft", window=16) if kind == "spire" else "magicdec"
    with running(model, draft) as services:
        yield Case(model, kind, services)


def test_greedy_text_is_that_of_transformers_speculated_or_not(case: Case, prompts: list[list[int]]) -> None:
    plain = complete(case.services.url, prompts, GENERATED, speculation={"draft": "off"})
    assert plain.accepted + plain.rejected == 0
    speculated = complete(case.services.url, prompts, GENERATED)
    assert speculated.accepted + speculated.rejected > 0
    if case.draft == "magicdec":  # which is the target itself up to the length of its window
        short = sum(len(prompt) + GENERATED <= 64 for prompt in prompts)
        assert speculated.accepted > short * GENERATED // 2 > 0
    assert speculated.texts == plain.texts == by_transformers(case.model, prompts, GENERATED)


def test_a_mistral_is_served_up_to_its_window_and_refused_beyond(stories_dir: Path, tmp_path: Path) -> None:
    model = checkpoint("mistral", stories_dir, tmp_path)
    assert load(VerifierConfig(model=model, device="cpu"))[1].info.max_context == WINDOW
    with pytest.raises(CheckpointError, match=rf"--max-context {WINDOW + 1}: .* window of {WINDOW} positions"):
        load(VerifierConfig(model=model, device="cpu", max_context=WINDOW + 1))
