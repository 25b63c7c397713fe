"""The sampling pipeline: numbers that are uniform and independent, truncation that is exact, draws that are safe."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from spire.decoding.randomness import Purpose, uniform, uniforms_behind
from spire.decoding.sampling import SamplingRows, draw, pick, probabilities, top_m
from spire.rpc.sampling import from_protos
from spire.v1 import tensor_pb2 as pb
from tests.marks import thoroughly

# A test that is right fails once in a million runs; the numbers are fixed, so it fails always or never.
ALPHA = 1e-6


def rows(*parameters: tuple[float, ...]) -> SamplingRows:
    """(temperature, top_k, top_p, min_p) of each row; what is not given keeps everything."""
    messages = []
    for seed, given in enumerate(parameters):
        temperature, top_k, top_p, min_p = (*given, *(1, 0, 1, 0)[len(given) :])
        messages.append(pb.Sampling(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, seed=seed))
    return from_protos(messages)


def numbers(count: int, *, seed: int = 1, choice: int = 0, purpose: Purpose = Purpose.SAMPLE) -> Tensor:
    return uniform(torch.tensor(seed), torch.tensor(choice), torch.arange(count), purpose)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_numbers_are_uniform_along_positions(seed: int) -> None:
    assert stats.kstest(numbers(20_000, seed=seed).numpy(), "uniform").pvalue > ALPHA


def test_numbers_are_uniform_along_seeds_and_choices() -> None:
    along_seeds = uniform(torch.arange(20_000), torch.tensor(0), torch.tensor(7), Purpose.DRAFT)
    along_choices = uniform(torch.tensor(3), torch.arange(20_000), torch.tensor(7), Purpose.DRAFT)
    for values in (along_seeds, along_choices):
        assert stats.kstest(values.numpy(), "uniform").pvalue > ALPHA


def test_what_differs_in_one_key_is_uncorrelated() -> None:
    """Neighbours in seed, choice, position and purpose: correlation of n pairs has standard deviation 1/sqrt(n)."""
    n = 50_000
    variants = [
        numbers(n),
        numbers(n + 1)[1:],
        numbers(n, seed=2),
        numbers(n, choice=1),
        numbers(n, purpose=Purpose.ACCEPT),
        numbers(n, purpose=Purpose.DRAFT),
    ]
    for a, b in itertools.combinations(variants, 2):
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5.5 / n**0.5


def test_every_seed_bit_matters() -> None:
    seeds = torch.tensor([0, *(1 << bit for bit in range(63)), -(1 << 63)])
    assert len(uniform(seeds, torch.tensor(0), torch.tensor(0), Purpose.SAMPLE).unique()) == len(seeds)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("purpose", Purpose)
def test_a_kernels_uniform_numbers_are_those_of_tensors(purpose: Purpose, count: int) -> None:
    generator = torch.Generator().manual_seed(purpose)
    seed_B = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    choice_B, base_B = (torch.randint(2**31 - 20, (40,), generator=generator) for _ in range(2))
    salted_B = torch.arange(40) % 2
    position_BT = base_B[:, None] + 1 + torch.arange(count)
    salt_B = torch.where(salted_B == 1, base_B + 1, 0)
    expected_BT = uniform(seed_B[:, None], choice_B[:, None], position_BT, purpose, salt_B[:, None])
    found_BT = uniforms_behind(base_B, count, purpose, seed_B, choice_B, salted_B)
    assert torch.equal(found_BT, expected_BT)


def test_seeds_beyond_int64_come_over_the_wire() -> None:
    seeds = from_protos([pb.Sampling(seed=2**64 - 1), pb.Sampling(seed=2**63)]).seed_B
    assert seeds.tolist() == [-1, -(2**63)]


def test_temperature_is_softmax_of_scaled_logits() -> None:
    logits_BTV = torch.randn(2, 3, 50)
    probs_BTV = probabilities(logits_BTV, rows((1, 0, 1), (0.5, 0, 1)))
    expected = torch.stack((logits_BTV[0].softmax(-1), (logits_BTV[1] / 0.5).softmax(-1)))
    torch.testing.assert_close(probs_BTV, expected)


def test_greedy_is_one_hot_also_beside_sampled_rows() -> None:
    logits_BTV = torch.randn(2, 3, 50)
    for parameters in (((0, 0, 1), (0, 5, 0.1)), ((0, 3, 0.5), (1, 0, 1))):
        probs_BTV = probabilities(logits_BTV, rows(*parameters))
        assert probs_BTV[0].max(dim=-1).values.tolist() == [1, 1, 1]
        assert torch.equal(probs_BTV[0].argmax(dim=-1), logits_BTV[0].argmax(dim=-1))
        assert probs_BTV[0].count_nonzero() == 3


def truncated_slowly(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> dict[int, float]:
    """The pipeline by its definition, one token at a time."""
    probs = (torch.tensor(logits) / temperature).softmax(-1).double().tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or None]
    total = sum(probs[token] for token in order)
    kept, reached = {}, 0.0
    for token in order:
        if (reached >= top_p and top_p < 1) or probs[token] < min_p * max(probs) or not probs[token]:
            break
        kept[token] = probs[token] / total
        reached += kept[token]
    return {token: p / sum(kept.values()) for token, p in kept.items()}


def assert_truncated(logits_BTV: Tensor, *parameters: tuple[float, ...]) -> None:
    """Each row by its own parameters, whatever its neighbours ask for."""
    probs_BTV = probabilities(logits_BTV, rows(*parameters))
    for row, of_row in enumerate(parameters):
        for position, logits_V in enumerate(logits_BTV[row]):
            expected = truncated_slowly(logits_V.tolist(), *of_row)  # type: ignore[arg-type]
            found_V = probs_BTV[row, position]
            assert set(found_V.nonzero().flatten().tolist()) == set(expected)
            for token, p in expected.items():
                assert float(found_V[token]) == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize("scale", [0.1, 2, 20])
@pytest.mark.parametrize("V", [60, 3000])
def test_top_k_then_top_p_then_min_p(V: int, scale: float) -> None:
    """Flat and peaked, so that the tokens worth a look hold everything, something, or nothing."""
    parameters = [(1, 5), (1, 0, 0.7), (0.7, 9, 0.5), (2, 1), (1, 0, 1e-6), (1, 400, 0.999), (1.0,)]
    parameters += [(1, 0, 1, 0.1), (1.5, 20, 0.9, 0.01), (1, 0, 0.95, 0.5), (1, 0, 1, 1)]
    logits_BTV = torch.randn(len(parameters), 2, V, generator=torch.Generator().manual_seed(3)) * scale
    assert_truncated(logits_BTV, *parameters)


def test_of_equally_probable_tokens_the_lower_ids_stay() -> None:
    """Logits in bfloat16 are often the same."""
    flat_BTV = torch.zeros(4, 1, 2000)
    probs_BTV = probabilities(flat_BTV, rows((1, 7), (1, 0, 0.0101), (1, 2000), (1, 0, 0.9, 1)))
    assert [int(row.count_nonzero()) for row in probs_BTV] == [7, 21, 2000, 1800]
    assert probs_BTV[0, 0, :7].count_nonzero() == 7
    tied_BTV = torch.tensor([[[1.0, 2, 0, 2, 1, 1, 1, 0]]])
    assert probabilities(tied_BTV, rows((1, 4)))[0, 0].nonzero().flatten().tolist() == [0, 1, 3, 4]


def test_what_a_row_keeps_does_not_depend_on_the_other_rows() -> None:
    parameters = [(1, 3), (1, 50, 0.9), (1, 0, 0.5), (1, 0, 0.999), (0,), (1, 0, 1, 0.2)]
    logits_BTV = torch.randn(6, 3, 500, generator=torch.Generator().manual_seed(1)).bfloat16().float() * 3
    together = probabilities(logits_BTV, rows(*parameters))
    for row, of_row in enumerate(parameters):
        assert torch.equal(probabilities(logits_BTV[row : row + 1], rows(of_row))[0], together[row])


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    logits_BTV = torch.randn(1, 4, 50) * 30
    probs_BTV = probabilities(logits_BTV, rows((1e-45, 0, 1)))
    assert torch.equal(probs_BTV.argmax(-1), logits_BTV.argmax(-1))
    assert probs_BTV.max(-1).values.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("scale", [1.0, 0.9999, 1.0001, 1e-20])
def test_a_token_of_probability_zero_is_never_drawn(u: float, scale: float) -> None:
    probs_BV = (
        torch.tensor([[0, 0, 0.5, 0, 0.5, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1.0]]) * scale
    )
    ids_B = draw(probs_BV, torch.full((4,), u, dtype=torch.float64))
    assert ids_B.tolist() == [2 if u < 0.5 else 4, 1, 0, 5]


def test_draws_follow_the_distribution() -> None:
    probs_V = torch.rand(20, generator=torch.Generator().manual_seed(0))
    n = 100_000
    ids = draw(probs_V.expand(n, -1), numbers(n))
    expected = probs_V.double() / probs_V.double().sum() * n
    assert stats.chisquare(ids.bincount(minlength=20).numpy(), expected.numpy()).pvalue > ALPHA


def test_top_m_keeps_the_most_probable_and_renormalises() -> None:
    probs_BV = torch.randn(3, 40).softmax(-1)
    ids_BM, kept_BM = top_m(probs_BV, 8)
    assert ids_BM.shape == (3, 8)
    torch.testing.assert_close(kept_BM.sum(-1), torch.ones(3))
    torch.testing.assert_close(kept_BM * probs_BV.gather(1, ids_BM).sum(1, keepdim=True), probs_BV.gather(1, ids_BM))
    assert top_m(probs_BV, 100)[0].shape == (3, 40)


def picks(probs_V: Tensor, count: int) -> Tensor:
    """What the invariant rule draws for `count` seeds."""
    samplings = from_protos([pb.Sampling(temperature=1, top_p=1, rule=pb.RULE_INVARIANT, seed=n) for n in range(count)])
    return pick(probs_V.expand(count, -1), samplings, torch.full((count,), 9))


@pytest.mark.parametrize("V", [5, thoroughly(300), thoroughly(2000), 20_001])
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_picks_follow_the_distribution_of_likely_and_of_unlikely_tokens(V: int, scale: float) -> None:
    probs_V = (torch.randn(V, generator=torch.Generator().manual_seed(V)) * scale).softmax(-1)
    count = min(10_000, 60_000_000 // V)
    found_V = picks(probs_V, count).bincount(minlength=V)
    # Chi-square wants five of a kind: unlikely tokens are counted by the hundred.
    groups_V = torch.where(probs_V * count >= 5, torch.arange(V), V + torch.arange(V) // 100)
    expected = torch.zeros(2 * V).index_add(0, groups_V, probs_V * count)
    found = torch.zeros(2 * V).index_add(0, groups_V, found_V.float())
    real = expected > 0
    expected, found = expected[real].double(), found[real].double()
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > ALPHA


def test_picks_change_no_more_than_the_distribution_does() -> None:
    """Rounding may part two texts of a seed only as often as it changes probabilities: also among rare tokens."""
    V, count, noise = 20_001, 600, 1e-3  # every token is rare
    generator = torch.Generator().manual_seed(1)
    probs_V = torch.full((V,), 1 / V)
    moved_V = (probs_V * (1 + noise * torch.randn(V, generator=generator))).clamp(min=0)
    distance = float((moved_V / moved_V.sum() - probs_V).abs().sum() / 2)
    # Winners of noise part at most twice as often as distributions differ; there are two steps.
    most = stats.poisson.isf(ALPHA, count * 4 * distance)
    assert int((picks(probs_V, count) != picks(moved_V, count)).sum()) <= most
    numbers_N = numbers(count)
    by_cdf = draw(probs_V.expand(count, -1), numbers_N) != draw(moved_V.expand(count, -1), numbers_N)
    assert int(by_cdf.sum()) > most, "a control: an inverse CDF fails this"


def test_a_token_of_probability_zero_is_never_picked() -> None:
    probs_V = torch.tensor([0.0, 1e-6, 0.0, 1 - 1e-6, 0.0])
    assert set(picks(probs_V, 5000).tolist()) <= {1, 3}
    assert set(picks(torch.tensor([0.0, 0.0, 1.0]), 100).tolist()) == {2}
