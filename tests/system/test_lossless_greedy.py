"""Greedy text through REST with speculation is the target's own: 64 prompts of mixed lengths, 128 tokens each, batched
(`make test`: three prompts).

fp32 must agree token for token with plain decoding and with `transformers` on the same checkpoint. In bf16 two orders
of summation may part where two tokens are as good as equal, and only there; kernels of ours have one order for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import spire.cli.paths
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.checkpoints.weights import load_target
from spire.kernels import kernels_for
from spire.model.target import Target, WholeSequence
from tests.greedy import by_transformers, complete
from tests.marks import thoroughly
from tests.services import Services, running

# Thousands of tokens, on whatever machine.
pytestmark = pytest.mark.timeout(1200)

LENGTHS, GENERATED = (5, 33, 64, 130, 257, 400, 700, 1000), 128
MODEL = spire.cli.paths.BUNDLED / "target"
DRAFT = spire.cli.paths.BUNDLED / "draft"


@pytest.fixture(scope="module", params=[(1, LENGTHS[1::3]), thoroughly((8, LENGTHS))], ids=["few", "many"])
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    count, lengths = request.param
    source = PromptSource(MODEL, [BUNDLED_TEXT])
    cut = [source.cut(count, length, seed=length) for length in lengths]
    # Neighbours in the batch differ in length.
    return [group[index] for index in range(count) for group in cut]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with running(MODEL, DRAFT) as services:
        yield services


@pytest.fixture(scope="module")
def plain(services: Services, prompts: list[list[int]]) -> list[list[int]]:
    """What the target alone says in fp32."""
    continued = complete(services.url, prompts, GENERATED, speculation={"draft": "off"})
    assert continued.accepted == 0
    return continued.texts


def test_speculation_changes_no_greedy_token(
    services: Services, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    speculated = complete(services.url, prompts, GENERATED)
    assert speculated.accepted > sum(map(len, plain)) // 3
    assert speculated.texts == plain
    assert speculated.texts == by_transformers(MODEL, prompts, GENERATED)


@pytest.fixture(scope="module")
def in_bfloat16(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """With speculation and without."""
    with running(MODEL, DRAFT, dtype="bfloat16") as services:
        speculated = complete(services.url, prompts, GENERATED)
        assert speculated.accepted
        return speculated.texts, complete(services.url, prompts, GENERATED, speculation={"draft": "off"}).texts


@pytest.mark.thorough
def test_in_bfloat16_texts_part_only_where_two_tokens_are_as_good_as_equal(
    prompts: list[list[int]], plain: list[list[int]], in_bfloat16: tuple[list[list[int]], list[list[int]]]
) -> None:
    speculated, rounded = in_bfloat16
    for other, name in ((rounded, "plain decoding in bf16"), (plain, "plain decoding in fp32")):
        partings, tokens = first_partings(prompts, speculated, other)
        print(f"speculation in bf16 against {name}: {1000 * len(partings) / tokens:.2f} partings per 1,000 tokens")
        assert all(gap <= 2 * error for gap, error in partings), partings


@pytest.mark.skipif(not kernels_for(torch.bfloat16), reason="no compiler at installation, or none for this processor")
def test_speculation_with_our_kernels_keeps_every_bfloat16_greedy_token(
    in_bfloat16: tuple[list[list[int]], list[list[int]]],
) -> None:
    speculated, rounded = in_bfloat16
    assert speculated == rounded


def first_partings(
    prompts: list[list[int]], ones: list[list[int]], others: list[list[int]]
) -> tuple[list[tuple[float, float]], int]:
    """What `parting` says of each pair of texts that differ, and how many tokens were compared."""
    precise, rounded = (load_target(MODEL, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    tokens, partings = 0, []
    for prompt, one, other in zip(prompts, ones, others, strict=True):
        same = next((at for at in range(GENERATED) if one[at] != other[at]), GENERATED)
        tokens += min(same + 1, GENERATED)
        if same < GENERATED:
            partings.append(parting(precise, rounded, prompt + one[:same]))
    return partings, tokens


def parting(precise: Target, rounded: Target, tokens: list[int]) -> tuple[float, float]:
    """The gap between the two best fp32 logits after `tokens`, and the largest difference of a bf16 logit there."""
    logits = [last_logits(model, tokens) for model in (precise, rounded)]
    best = logits[0].topk(2).values
    return float(best[0] - best[1]), float((logits[0] - logits[1]).abs().max())


@torch.inference_mode()
def last_logits(model: Target, tokens: list[int]) -> Tensor:
    tokens_1T = torch.tensor([tokens])
    return model.unembed(model(tokens_1T, WholeSequence(tokens_1T)).hidden_BTD[0, -1])
