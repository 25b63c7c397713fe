"""A vocabulary of 49,152 tokens, of whose draft distributions only the top 4,096 travel: each rule on a real pair."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spire.checkpoints.weights import load_target, save_target
from spire.model.target import Target
from tests.gateway.conftest import Api
from tests.marks import thoroughly
from tests.services import running
from tests.untrained import untrained_draft

VOCABULARY = 49_152
PROMPT = "Once upon a time"
ASKED = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "return_metrics": True}


def with_vocabulary(model: Path, size: int, out: Path) -> Path:
    """The target with random rows behind its own: tokens without text, as likely as others."""
    small, _ = load_target(model)
    update = {"vocab_size": size, "tie_word_embeddings": False}
    large = Target(small.config.model_copy(update=update))
    state = small.state_dict()
    generator = torch.Generator().manual_seed(0)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        rows = state[name]
        more = torch.randn(size - len(rows), rows.shape[1], generator=generator) * rows.std()
        state[name] = torch.cat([rows, more])
    large.load_state_dict(state)
    shutil.copytree(model, out)
    save_target(out, large, torch.float32)
    return out


@pytest.fixture(scope="module", params=["padded stories260K", thoroughly("SmolLM2")])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    directory = tmp_path_factory.mktemp("large")
    if request.param == "SmolLM2":
        target = request.getfixturevalue("smollm2_dir")
    else:
        target = with_vocabulary(request.getfixturevalue("stories_dir"), VOCABULARY, directory / "target")
    draft = untrained_draft(target, directory / "draft")
    assert load_target(target)[0].config.vocab_size == VOCABULARY
    with running(target, draft) as services:
        yield Api(services.url)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_the_invariant_rule_and_greedy_give_the_text_of_plain_decoding(api: Api, sampling: dict[str, Any]) -> None:
    rule = {"rule": "invariant"}
    drafted = api.complete(PROMPT, speculation=rule | {"k": 4}, **ASKED, **sampling)
    plain = api.complete(PROMPT, speculation=rule | {"draft": "off"}, **ASKED, **sampling)
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 40
    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


@pytest.mark.parametrize("rule", ["block", thoroughly("rejection")])
def test_rules_that_need_q_get_it_of_the_top_of_the_vocabulary(api: Api, rule: str) -> None:
    before = api.metric("spire_fallbacks_total")
    answers = [
        api.complete(PROMPT, speculation={"rule": rule, "k": 4}, temperature=1.0, seed=seed, logprobs=5, **ASKED)
        for seed in range(2)
    ]
    assert api.metric("spire_fallbacks_total") == before
    told = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert sum(figures["num_draft_tokens"] for figures in told) > 2 * 40
    for answer in answers:
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 40
        assert all(-30 < logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"])
