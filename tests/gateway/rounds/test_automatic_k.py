"""Who decides k, through the real services: a request, else the gateway's option, else what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.sequence import DEEPEST
from tests.draft_service.test_carrier import activation_bytes
from tests.gateway.conftest import Api, eventually
from tests.gateway.rounds.test_resilience import revive
from tests.marks import thoroughly
from tests.services import Services, running
from tests.verifier_service.harness import free_port

CROWDED = ["-m", "tests.crowded_verifier"]
PROMPT_GATEWAY, TARDY_GATEWAY = ["-m", "gateway"], ["-m", "tests.tardy_gateway"]
PROMPT = "Once upon a time"
# Two tapped layers of stories260K in float32.
BYTES_OF_A_POSITION = 2 * 64 * 4
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "return_metrics": True}


@pytest.fixture(scope="module")
def crowded(stories_dir: Path) -> Iterator[tuple[Services, Api]]:
    """A target that drafts well for itself, on a machine where that pays for few sequences only."""
    window = ["--self-window", "200"]
    with running(stories_dir, "magicdec", k=None, verifier=CROWDED, verifier_options=window) as services:
        yield services, Api(services.url)


def complete_together(api: Api, requests: int, **more: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(requests) as pool:
        prompts = [PROMPT + " there" * at for at in range(requests)]
        return list(pool.map(lambda prompt: api.complete(prompt, **LONG | more), prompts))


def rounds_at(api: Api) -> dict[int, float]:
    families = text_string_to_metric_families(api.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {int(s.labels["k"]): s.value for s in samples if s.name == "spire_rounds_at_depth_total" and s.value}


def rounds_of(api: Api, requests: int, **more: Any) -> dict[int, float]:
    """How many rounds of these requests had which depth."""
    before = rounds_at(api)
    complete_together(api, requests, **more)
    return {k: rounds - before.get(k, 0) for k, rounds in rounds_at(api).items() if rounds > before.get(k, 0)}


def mean_depth(rounds: dict[int, float]) -> float:
    return sum(k * count for k, count in rounds.items()) / sum(rounds.values())


@pytest.mark.thorough
def test_k_follows_the_load_down_to_0_and_back(crowded: tuple[Services, Api]) -> None:
    _, api = crowded
    for _ in range(2):
        rounds_of(api, 1)
        rounds_of(api, 8)
    few, many, few_again = rounds_of(api, 1), rounds_of(api, 8), rounds_of(api, 1)
    assert mean_depth(few) > 2
    assert mean_depth(few_again) > 2
    # Where some have begun or ended already it drafts for the others.
    assert max(many, key=many.__getitem__) == 0


def test_the_gauges_tell_of_the_k_that_is_chosen(crowded: tuple[Services, Api]) -> None:
    """What most readings tell while one sequence is decoded: a single round may look at another depth."""
    _, api = crowded
    for _ in range(2):
        rounds_of(api, 1)
    names = ["spire_speculation_depth", "spire_tau", "spire_multiplier_measured"]
    with ThreadPoolExecutor(1) as pool:
        decoding, readings = pool.submit(rounds_of, api, 1), []
        while not decoding.done():
            readings.append([api.metric(name) for name in names])
    depth, tau, multiplier = (statistics.median(values) for values in zip(*readings, strict=True))
    assert depth >= 1
    assert 1.5 < tau <= 1 + DEEPEST
    assert multiplier > 1.1


@pytest.mark.thorough
def test_a_request_that_says_k_gets_it_among_others_that_do_not(crowded: tuple[Services, Api]) -> None:
    _, api = crowded
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(api.complete, PROMPT, **LONG) for _ in range(2)]
        said = pool.submit(api.complete, PROMPT, **LONG, speculation={"k": 5})
        figures = said.result()["metrics"]["speculative_decoding"]
        assert all(other.result()["usage"]["completion_tokens"] == 100 for other in others)
    # Every round of 5 but the last ones, which had room for fewer.
    assert len(figures["full_depth_histogram"]) <= 6
    full = sum(figures["full_depth_histogram"])
    assert full >= figures["num_spec_steps"] - 5
    assert 5 * full <= figures["num_draft_tokens"] <= 5 * figures["num_spec_steps"]


def test_a_request_without_a_draft_stays_plain(crowded: tuple[Services, Api]) -> None:
    _, api = crowded
    answers = complete_together(api, 1, speculation={"draft": "off"}) + complete_together(api, 1, speculation={"k": 0})
    assert all(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0 for answer in answers)


@pytest.mark.parametrize("k", [thoroughly(0), 3])
def test_the_option_fixes_k(stories_dir: Path, stories_draft_dir: Path, k: int) -> None:
    with running(stories_dir, stories_draft_dir, k=k) as services:
        api = Api(services.url)
        rounds = rounds_of(api, 2)
        assert max(rounds) == k
        assert rounds[k] > 0.9 * sum(rounds.values())
        (card,) = api.http.get("/v1/models").json()["data"]
        assert card["draft"]["k"] == k


@pytest.mark.parametrize("gateway", [PROMPT_GATEWAY, thoroughly(TARDY_GATEWAY)], ids=["prompt", "tardy"])
def test_a_draft_that_guesses_badly_is_soon_asked_no_more_and_told_little(
    stories_dir: Path, stories_draft_dir: Path, gateway: list[str]
) -> None:
    port = free_port()
    metrics = ["--metrics-port", str(port)]
    with running(stories_dir, stories_draft_dir, k=None, gateway=gateway, draft_options=metrics) as services:
        api = Api(services.url)
        rounds_of(api, 4)
        told = sum(activation_bytes(port).values())
        rounds = rounds_of(api, 4, max_tokens=400)
        told = sum(activation_bytes(port).values()) - told
        assert rounds[0] > 0.75 * sum(rounds.values())
        assert told < 0.75 * 4 * 400 * BYTES_OF_A_POSITION
        (card,) = api.http.get("/v1/models").json()["data"]
        assert card["draft"]["k"] == "auto"


@pytest.mark.thorough
def test_a_draft_that_dies_and_returns_leaves_the_choice_as_it_was(stories_dir: Path, tmp_path: Path) -> None:
    """With the target itself as a vanilla draft, so that guesses are good."""
    draft = self_draft(stories_dir, tmp_path)
    with running(stories_dir, draft, k=None, verifier=CROWDED) as services:
        api = Api(services.url)
        for _ in range(4):
            rounds_of(api, 1)
        before = rounds_of(api, 1)
        assert mean_depth(before) > 2
        assert services.draft is not None
        services.draft.kill()
        eventually(lambda: api.ready()["status"] == "degraded")
        assert set(rounds_of(api, 1)) == {0}
        services.draft = revive(services.draft, services.directory)
        eventually(lambda: api.ready()["status"] == "ready", within=20)
        # A text has a dozen rounds, some of which look at other depths.
        assert mean_depth(rounds_of(api, 1)) > 0.5 * mean_depth(before)


def self_draft(model: Path, directory: Path) -> Path:
    """A vanilla draft with the target's own layers."""
    import torch

    from spire.checkpoints.weights import load_target, save_draft
    from spire.model.config import DraftConfig
    from spire.model.draft import prune

    target, fingerprint = load_target(model)
    layers = tuple(range(target.config.num_hidden_layers))
    config = DraftConfig(kind="vanilla", target_fingerprint=fingerprint, tapped_layers=(), window=256, feedback=False)
    save_draft(directory / "self", prune(target, config, layers), torch.float32)
    return directory / "self"
