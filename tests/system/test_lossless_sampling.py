"""Sampled output has the target's distribution: chi-square through the services, on a target whose p is exact.

A cell is 6,300 continuations of 8 tokens, all from one start token: 50,400 draws, each from a known row. The cells
combine rule, temperature, truncation or penalty, k and what q holds. 11 tests a cell at a false-alarm rate of 1e-5
each: 1.5e-3 for all cells. Seeds are fixed. A verifier that accepts everything must fail by a wide margin.
`make test` runs one cell for each rule with a sixth of the draws.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2, chisquare

from tests.markov import VOCABULARY, logits_after_each_token, write_markov_pair
from tests.marks import thoroughly
from tests.services import Services, running

# Thousands of tokens, on whatever machine.
pytestmark = pytest.mark.timeout(1200)

CHOICES, LENGTH, START = 15, 8, 3
FEW, MANY = 70, 420
FALSE_ALARM = 1e-5
LOSSY = ["-m", "tests.lossy_verifier"]
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4}
# By how many tokens q holds: rule, k, and how the request samples.
CELLS: dict[int, list[tuple[str, int, dict[str, float]]]] = {
    4096: [
        ("rejection", 3, {"temperature": 1.0}),
        ("block", 1, {"temperature": 0.6, "min_p": 0.05}),
        ("invariant", 5, {"temperature": 1.5, "top_p": 0.8}),
        ("rejection", 5, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}),
    ],
    5: [
        ("block", 5, {"temperature": 1.0}),
        ("rejection", 1, {"temperature": 1.5, "top_p": 0.8}),
        ("block", 3, {"temperature": 1.5, "top_k": 9}),
        ("invariant", 3, {"temperature": 0.6, "min_p": 0.05}),
        ("rejection", 5, {"temperature": 1.0} | PENALTIES),
    ],
    1: [
        ("invariant", 1, {"temperature": 1.0, "top_k": 9}),
        ("rejection", 3, {"temperature": 1.5, "min_p": 0.1}),
        ("block", 5, {"temperature": 0.6, "top_p": 0.8}),
        ("block", 3, {"temperature": 1.5} | PENALTIES),
        ("invariant", 5, {"temperature": 1.0} | PENALTIES),
    ],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_markov_pair(tmp_path_factory.mktemp("markov"))


@pytest.fixture(scope="module")
def logits(pair: tuple[Path, Path]) -> NDArray[np.float64]:
    """Row x: the target's logits for the token after x."""
    return logits_after_each_token(pair[0]).detach().numpy().astype(np.float64)


@pytest.fixture(scope="module", params=[thoroughly(4096), 5, thoroughly(1)], ids=lambda m: f"q of {m}")
def services(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[tuple[int, Services]]:
    with running(*pair, draft_options=["--top-m", str(request.param)]) as services:
        yield request.param, services


@pytest.mark.parametrize(("cell", "requests"), [(0, FEW), *(thoroughly(cell, MANY) for cell in range(5))])
def test_output_has_the_targets_distribution(
    services: tuple[int, Services], logits: NDArray[np.float64], cell: int, requests: int
) -> None:
    m, system = services
    if cell >= len(CELLS[m]):
        pytest.skip("no such cell")
    rule, k, sampling = CELLS[m][cell]
    drawn, accepted = generate(system.url, sampling, {"rule": rule, "k": k}, requests)
    assert accepted > len(drawn) // 2, "the draft must have taken part"
    p_values = fit_penalised(drawn, logits, **sampling) if PENALTIES.items() <= sampling.items() else None
    p_values = p_values or fit(drawn, reference(logits, **sampling))
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.parametrize("requests", [FEW, thoroughly(MANY)])
def test_a_target_that_drafts_for_itself_keeps_its_distribution(
    pair: tuple[Path, Path], logits: NDArray[np.float64], requests: int
) -> None:
    """It guesses from its own top 5, so that guesses have to be rejected now and then."""
    with running(pair[0], "magicdec", verifier_options=["--self-top-m", "5"]) as services:
        drawn, accepted = generate(services.url, {"temperature": 1.0}, {"rule": "rejection"}, requests)
    assert len(drawn) < accepted < drawn.size * 3 // 4
    p_values = fit(drawn, reference(logits, temperature=1.0))
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.parametrize(
    ("rule", "requests"), [("block", FEW), *(thoroughly(rule, MANY) for rule in ("block", "rejection"))]
)
def test_tokens_that_a_draft_cannot_propose_come_as_often_as_they_should(
    rule: str, requests: int, tmp_path: Path
) -> None:
    """A draft with a vocabulary of its own, half of the target's."""
    model, draft = write_markov_pair(tmp_path, vocabulary=64, own=32)
    with running(model, draft) as services:
        drawn, accepted = generate(services.url, {"temperature": 1.0}, {"rule": rule, "k": 3}, requests)
    assert accepted > len(drawn) // 2, "the draft must have taken part"
    assert (drawn % 2).mean() > 0.2, "tokens must have come that the draft cannot propose"
    rows = logits_after_each_token(model).detach().numpy().astype(np.float64)
    p_values = fit(drawn, reference(rows, temperature=1.0))
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.parametrize(
    ("rule", "requests"),
    [
        ("block", FEW),
        ("rejection", FEW),
        *(thoroughly(rule, MANY) for rule in ("block", "rejection", "invariant")),
    ],
)
def test_a_draft_that_stops_when_it_likes_changes_no_distribution(rule: str, requests: int, tmp_path: Path) -> None:
    """Its head is random: where it stops depends on what it has drafted, and on nothing that the target says."""
    model, draft = write_markov_pair(tmp_path, stops=True)
    stopping = {"rule": rule, "k": 6, "stop": "threshold"}
    with running(model, draft, gateway_options=["--stop-threshold", "0.8"]) as services:
        drawn, accepted = generate(services.url, {"temperature": 1.0}, stopping, requests)
        told = httpx.get(f"{services.url}/metrics").text
    blocks, drafted = (
        sum(map(float, re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", told, re.MULTILINE)))
        for name in ("vllm:spec_decode_num_drafts", "spire_draft_tokens")
    )
    assert 1.05 * blocks < drafted < 4.5 * blocks, "some blocks must stop early, and others go on"
    assert accepted > len(drawn) // 2, "the draft must have taken part"
    rows = logits_after_each_token(model).detach().numpy().astype(np.float64)
    p_values = fit(drawn, reference(rows, temperature=1.0))
    assert min(p_values.values()) > FALSE_ALARM, p_values


@pytest.mark.parametrize("requests", [FEW, thoroughly(MANY)])
def test_a_verifier_that_accepts_everything_fails(
    pair: tuple[Path, Path], logits: NDArray[np.float64], requests: int
) -> None:
    with running(*pair, verifier=LOSSY) as lossy:
        drawn, _ = generate(lossy.url, {"temperature": 1.0}, {"rule": "rejection"}, requests)
        penalised, _ = generate(lossy.url, {"temperature": 1.0} | PENALTIES, {"rule": "rejection"}, requests)
    for p_values in (fit(drawn, reference(logits, temperature=1.0)), fit_penalised(penalised, logits, **PENALTIES)):
        assert p_values["pooled"] < FALSE_ALARM**2
        assert p_values["joint over two"] < FALSE_ALARM**2
        assert p_values["joint over three"] < FALSE_ALARM**2


def generate(
    url: str, sampling: dict[str, float], speculation: dict[str, Any], requests: int
) -> tuple[NDArray[np.int64], int]:
    """Token ids [continuations, LENGTH] and how many of them the draft guessed."""

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, seed: int) -> dict:
        body = {"prompt": [START], "max_tokens": LENGTH, "n": CHOICES, "seed": seed, "return_token_ids": True}
        body |= {"speculation": speculation}
        async with gate:
            response = await client.post("/v1/completions", json=body | sampling)
        assert response.status_code == 200, response.text
        return response.json()

    async def everything() -> list[dict]:
        gate = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await asyncio.gather(*(one(client, gate, seed) for seed in range(requests)))

    answers = asyncio.run(everything())
    rows = [choice["token_ids"] for answer in answers for choice in answer["choices"]]
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    return np.array(rows), sum(detail["accepted_prediction_tokens"] for detail in details)


def reference(
    logits: NDArray[np.float64], temperature: float, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """The distribution after each token, written down apart from the product's pipeline."""
    rows = []
    for row in logits:
        weights = np.exp((row - row.max()) / temperature)
        order = np.argsort(-weights)[:top_k]
        kept = weights[order] / weights[order].sum()
        kept = kept[: int(np.searchsorted(np.cumsum(kept), top_p - 1e-9)) + 1]
        kept = kept[kept >= min_p * kept[0]]
        p = np.zeros_like(row)
        p[order[: len(kept)]] = kept / kept.sum()
        rows.append(p)
    return np.array(rows)


def fit_penalised(
    drawn: NDArray[np.int64],
    logits: NDArray[np.float64],
    presence_penalty: float,
    frequency_penalty: float,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Every draw has a distribution of its own, which depends on all before it. Where in it the draw fell, spread over
    the token's own stretch, is uniform, and independent of the draws before it."""
    spread = np.random.default_rng(0).random(drawn.shape)
    counts, before, fell = np.zeros((len(drawn), VOCABULARY)), np.full(len(drawn), START), np.zeros(drawn.shape)
    rows = np.arange(len(drawn))
    for at in range(LENGTH):
        adjusted = logits[before] - presence_penalty * (counts > 0) - frequency_penalty * counts
        p = np.exp((adjusted - adjusted.max(axis=1, keepdims=True)) / temperature)
        p /= p.sum(axis=1, keepdims=True)
        before = drawn[:, at]
        fell[:, at] = p.cumsum(axis=1)[rows, before] - p[rows, before] * spread[:, at]
        counts[rows, before] += 1
    tenths = np.minimum(fell * 10, 9).astype(np.int64)
    p_values = {f"position {at}": even(tenths[:, at], 10) for at in range(LENGTH)}
    p_values["pooled"] = even(np.minimum(fell * 100, 99).astype(np.int64).ravel(), 100)
    p_values["joint over two"] = even((tenths[:, 0::2] * 10 + tenths[:, 1::2]).ravel(), 100)
    p_values["joint over three"] = even(tenths[:, 0] * 100 + tenths[:, 1] * 10 + tenths[:, 2], 1000)
    return p_values


def even(outcome: NDArray[np.int64], kinds: int) -> float:
    """Chi-square of outcomes that are all as likely."""
    return float(chisquare(np.bincount(outcome, minlength=kinds)).pvalue)


def fit(drawn: NDArray[np.int64], p: NDArray[np.float64]) -> dict[str, float]:
    """p-values: each position given the token before it, all positions pooled, and two tokens jointly."""
    walk = np.concatenate((np.full((len(drawn), 1), START), drawn), axis=1)
    before, after = walk[:, :-1], walk[:, 1:]
    p_values = {f"position {at}": goodness_of_fit(before[:, at], after[:, at], p) for at in range(LENGTH)}
    p_values["pooled"] = goodness_of_fit(before.ravel(), after.ravel(), p)
    # Pairs do not overlap, so that they are independent draws given the token before them.
    first, second = walk[:, 1:-1:2].ravel(), walk[:, 2::2].ravel()
    joint = (p[:, :, None] * p[None, :, :]).reshape(len(p), -1)
    p_values["joint over two"] = goodness_of_fit(walk[:, 0:-2:2].ravel(), first * len(p) + second, joint)
    # Tokens in four kinds, or there were more outcomes than draws.
    kinds = np.eye(4)[np.arange(len(p)) % 4]
    three = np.einsum("a,ab,bc,ai,bj,ck->ijk", p[START], p, p, kinds, kinds, kinds).reshape(1, -1)
    outcome = (drawn[:, :3] % 4) @ np.array([16, 4, 1])
    p_values["joint over three"] = goodness_of_fit(np.zeros(len(drawn), dtype=np.int64), outcome, three)
    return p_values


def goodness_of_fit(given: NDArray[np.int64], outcome: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Pearson's chi-square over all rows of p; outcomes expected less than 5 times are put together."""
    statistic, freedom = 0.0, 0
    for token in range(len(p)):
        observed = np.bincount(outcome[given == token], minlength=p.shape[1])
        expected = observed.sum() * p[token]
        assert not observed[p[token] == 0].any(), "a token came that p excludes"
        rare = expected < 5
        cells = [*zip(observed[~rare], expected[~rare], strict=True), (observed[rare].sum(), expected[rare].sum())]
        cells = [(o, e) for o, e in cells if e >= 1]
        statistic += sum((o - e) ** 2 / e for o, e in cells)
        freedom += max(0, len(cells) - 1)
    return float(chi2.sf(statistic, freedom))
