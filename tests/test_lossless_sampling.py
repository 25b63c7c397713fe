"""Sampled output has the target's distribution: chi-square through the services, on a target whose p is exact.

100,800 draws in 12,600 continuations of 8 tokens, all from one start token. Each transition is one draw from a known
row. 10 tests a cell at a false-alarm rate of 1e-5 each: 1e-4 for a cell. Seeds are fixed. A verifier that accepts
everything must fail by a wide margin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from tests.markov import VOCABULARY, logits_after_each_token, write_markov_pair
from tests.services import Services, running

CHOICES, REQUESTS, LENGTH, START = 15, 840, 8, 3
FALSE_ALARM = 1e-5
LOSSY = str(Path(__file__).parent / "lossy_verifier.py")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_markov_pair(tmp_path_factory.mktemp("markov"))


@pytest.fixture(params=["4096", "5"], ids=["q over the whole vocabulary", "q over its top 5"])
def services(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Services]:
    with running(*pair, draft_options=["--top-m", request.param]) as services:
        yield services


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    ],
    ids=["temperature 1", "temperature 0.7, top_k 9, top_p 0.9"],
)
def test_output_has_the_targets_distribution(
    services: Services, pair: tuple[Path, Path], sampling: dict[str, float]
) -> None:
    p = reference(logits_after_each_token(pair[0]).numpy(), **sampling)
    drawn, accepted = generate(services.url, sampling)
    assert accepted > len(drawn), "the draft must have taken part"
    p_values = fit(drawn, p)
    assert min(p_values.values()) > FALSE_ALARM, p_values


def test_a_target_that_drafts_for_itself_keeps_its_distribution(pair: tuple[Path, Path]) -> None:
    """It guesses from its own top 5, so that guesses have to be rejected now and then. A quarter of the draws."""
    with running(pair[0], "magicdec", verifier_options=["--self-top-m", "5"]) as services:
        drawn, accepted = generate(services.url, {"temperature": 1.0}, REQUESTS // 4)
    assert len(drawn) < accepted < drawn.size * 3 // 4
    p_values = fit(drawn, reference(logits_after_each_token(pair[0]).numpy(), temperature=1.0))
    assert min(p_values.values()) > FALSE_ALARM, p_values


def test_a_verifier_that_accepts_everything_fails(pair: tuple[Path, Path]) -> None:
    with running(*pair, verifier=[LOSSY]) as lossy:
        drawn, _ = generate(lossy.url, {"temperature": 1.0})
    p_values = fit(drawn, reference(logits_after_each_token(pair[0]).numpy(), temperature=1.0))
    assert p_values["pooled"] < FALSE_ALARM**2
    assert p_values["joint over two"] < FALSE_ALARM**2


def generate(url: str, sampling: dict[str, float], requests: int = REQUESTS) -> tuple[NDArray[np.int64], int]:
    """Token ids [continuations, LENGTH] and how many of them the draft guessed."""

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, seed: int) -> dict:
        body = {"prompt": [START], "max_tokens": LENGTH, "n": CHOICES, "seed": seed, "return_token_ids": True}
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
    logits: NDArray[np.float32], temperature: float, top_k: int = VOCABULARY, top_p: float = 1.0
) -> NDArray[np.float64]:
    """The distribution after each token, written down apart from the product's pipeline."""
    rows = []
    for row in logits.astype(np.float64):
        weights = np.exp((row - row.max()) / temperature)
        order = np.argsort(-weights)[:top_k]
        kept = weights[order] / weights[order].sum()
        kept = kept[: int(np.searchsorted(np.cumsum(kept), top_p - 1e-9)) + 1]
        p = np.zeros_like(row)
        p[order[: len(kept)]] = kept / kept.sum()
        rows.append(p)
    return np.array(rows)


def fit(drawn: NDArray[np.int64], p: NDArray[np.float64]) -> dict[str, float]:
    """p-values: each position given the token before it, all positions pooled, and two tokens jointly."""
    walk = np.concatenate((np.full((len(drawn), 1), START), drawn), axis=1)
    before, after = walk[:, :-1], walk[:, 1:]
    p_values = {f"position {at}": goodness_of_fit(before[:, at], after[:, at], p) for at in range(LENGTH)}
    p_values["pooled"] = goodness_of_fit(before.ravel(), after.ravel(), p)
    # Pairs do not overlap, so that they are independent draws given the token before them.
    first, second = walk[:, 1:-1:2].ravel(), walk[:, 2::2].ravel()
    joint = (p[:, :, None] * p[None, :, :]).reshape(VOCABULARY, -1)
    p_values["joint over two"] = goodness_of_fit(walk[:, 0:-2:2].ravel(), first * VOCABULARY + second, joint)
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
