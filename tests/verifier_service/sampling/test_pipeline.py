"""Logits are adjusted by the history that each position would have if the draft tokens before it stood."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spire.errors import InvalidRequest
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from verifier_service.sampling.histories import check_adjustments
from verifier_service.sampling.pipeline import Distributions, Pipeline

V = 12
CPU = torch.device("cpu")


@dataclass
class Asked:
    """One sequence's wishes, its prompt, what it has written, and a draft."""

    prompt: list[int]
    output: list[int]
    draft: list[int]
    adjustments: pb.Adjustments = field(default_factory=pb.Adjustments)
    temperature: float = 1.0
    logprobs: int | None = None

    @property
    def start(self) -> pb.Start:
        sampling = tensor_pb2.Sampling(temperature=self.temperature, top_p=1)
        return pb.Start(
            tokens=self.prompt + self.output,
            prompt_tokens=len(self.prompt),
            sampling=sampling,
            adjustments=self.adjustments,
            logprobs=self.logprobs,
        )

    def adjusted_slowly(self, logits_V: list[float], drafted: int) -> list[float]:
        """By the definition: one token after the other, with the history of one position."""
        a, output = self.adjustments, self.output + self.draft[:drafted]
        counts, repetition = Counter(output), a.repetition_penalty or 1
        adjusted = []
        for token, logit in enumerate(logits_V):
            logit += a.logit_bias.get(token, 0.0)
            if token in self.prompt + output:
                logit = logit / repetition if logit > 0 else logit * repetition
            logit -= a.presence_penalty * (counts[token] > 0) + a.frequency_penalty * counts[token]
            banned = bool(a.allowed_tokens) and token not in a.allowed_tokens
            too_early = len(output) < a.min_tokens and token in a.end_tokens
            adjusted.append(-math.inf if banned or too_early else logit)
        return adjusted


tokens = st.lists(st.integers(0, V - 1), max_size=6)
penalties = st.floats(-2, 2, width=32)
adjustments = st.builds(
    pb.Adjustments,
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5, width=32), max_size=4),
    allowed_tokens=st.just([]) | st.lists(st.integers(0, V - 1), min_size=5, unique=True),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.just(0) | st.floats(0.5, 2, width=32),
    min_tokens=st.integers(0, 8),
    end_tokens=st.lists(st.integers(0, V - 1), max_size=2),
)
asked = st.builds(
    Asked,
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
    output=tokens,
    draft=st.lists(st.integers(0, V - 1), min_size=3, max_size=3),
    adjustments=adjustments,
)


def distributions_of(batch: list[Asked], logits_BTV: Tensor) -> tuple[Pipeline, Distributions]:
    """As in a round: each output was written in this life, but for its first token."""
    slots = list(range(len(batch)))
    pipeline = Pipeline(len(batch), V, CPU)
    for slot, one in zip(slots, batch, strict=True):
        start = one.start
        del start.tokens[len(one.prompt) + 1 :]
        pipeline.assign(slot, start, None)
    pipeline.advance(slots, [one.output[1:] for one in batch])
    base_B = torch.tensor([len(one.prompt) + len(one.output) - 1 for one in batch])
    draft_BK = torch.tensor([one.draft for one in batch])
    counts = [len(one.draft) for one in batch]
    return pipeline, pipeline.distributions(slots, pipeline.of(slots), logits_BTV.clone(), draft_BK, counts, base_B)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(asked, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_each_position_is_adjusted_by_its_own_history(batch: list[Asked], seed: int) -> None:
    logits_BTV = torch.randn(len(batch), 4, V, generator=torch.Generator().manual_seed(seed)) * 3
    _, found = distributions_of(batch, logits_BTV)
    possible_BT = torch.ones(len(batch), 4, dtype=torch.bool) if found.possible_BT is None else found.possible_BT
    for row, one in enumerate(batch):
        for position in range(4):
            expected_V = torch.tensor(one.adjusted_slowly(logits_BTV[row, position].tolist(), position))
            possible = bool(expected_V.isfinite().any())
            assert bool(possible_BT[row, position]) == possible
            if possible:
                torch.testing.assert_close(found.logits_BTV[row, position], expected_V, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found.p_BTV[row, position], expected_V.softmax(-1), rtol=1e-4, atol=1e-5)


def test_a_slot_forgets_what_its_last_sequence_asked_for() -> None:
    pipeline = Pipeline(2, V, CPU)
    biased = pb.Start(tokens=[1], sampling=tensor_pb2.Sampling(temperature=1, top_p=1), logprobs=2)
    biased.adjustments.logit_bias[3] = 50
    plain = pb.Start(tokens=[1], sampling=tensor_pb2.Sampling(temperature=1, top_p=1))
    for start, likely in ((biased, 3), (plain, 5), (biased, 3)):
        logits_BTV = torch.zeros(1, 1, V)
        logits_BTV[..., 5] = 9
        pipeline.assign(0, start, None)
        none_BK, base_B = torch.empty(1, 0, dtype=torch.int64), torch.tensor([0])
        rows = pipeline.of([0])
        found = pipeline.distributions([0], rows, logits_BTV, none_BK, [0], base_B)
        assert int(found.p_BTV.argmax()) == likely
        assert (pipeline.logprobs([0], rows, found, [[5]])[0] is None) == (start is plain)
        pipeline.release(0)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_are_those_sampled_from_or_at_temperature_1_when_greedy(temperature: float) -> None:
    one = Asked([1, 2], [3], [4, 4], pb.Adjustments(frequency_penalty=1), temperature, logprobs=3)
    logits_BTV = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0))
    pipeline, found = distributions_of([one], logits_BTV)
    message = pipeline.logprobs([0], pipeline.of([0]), found, [[4, 7]])[0]
    assert message is not None
    for position, token in enumerate((4, 7)):
        adjusted_V = torch.tensor(one.adjusted_slowly(logits_BTV[0, position].tolist(), position))
        expected_V = (adjusted_V / (temperature or 1)).log_softmax(-1)
        top = expected_V.topk(3)
        got = [torch.frombuffer(bytearray(t.data), dtype=d) for t, d in _tensors(message)]
        assert float(got[0][position]) == pytest.approx(float(expected_V[token]), abs=1e-4)
        assert got[1].view(2, 3)[position].tolist() == top.indices.tolist()
        torch.testing.assert_close(got[2].view(2, 3)[position], top.values, rtol=1e-4, atol=1e-4)


def test_what_adjusting_makes_infinite_is_refused_and_not_drawn_from() -> None:
    sound, wrong = pb.Adjustments(repetition_penalty=1.5), pb.Adjustments(repetition_penalty=1e-40)
    batch = [Asked([1], [2], [3], sound), Asked([1], [2], [3], wrong)]
    _, found = distributions_of(batch, torch.ones(2, 2, V))
    assert [refusal is not None for refusal in found.refusals(torch.tensor([0, 0]))] == [False, True]
    assert bool(found.p_BTV.isfinite().all())


@pytest.mark.parametrize(("top_k", "excluded"), [(0, False), (3, True)])
def test_logprobs_are_minus_infinity_for_excluded_tokens_not_unlikely_ones(top_k: int, excluded: bool) -> None:
    """At temperature 0.1 it takes little for a p that no float holds: of a prompt's tokens, or of one with a bias."""
    logits_TV = torch.randn(2, V, generator=torch.Generator().manual_seed(1)) * 8
    pipeline, least = Pipeline(1, V, CPU), logits_TV.argmin(dim=-1)
    sampling = tensor_pb2.Sampling(temperature=0.1, top_p=1, top_k=top_k)
    pipeline.assign(0, pb.Start(tokens=[1, 2, 3], sampling=sampling, logprobs=0), None)
    expected_T = (logits_TV.double() / 0.1).log_softmax(-1)[torch.arange(2), least].float()
    found_T = pipeline.score(0, logits_TV, least.tolist()).tokens_n
    assert float(expected_T.max()) < -150
    torch.testing.assert_close(found_T, torch.full((2,), -torch.inf) if excluded else expected_T, rtol=1e-5, atol=1e-3)


def _tensors(message: pb.Logprobs) -> list[tuple[tensor_pb2.Tensor, torch.dtype]]:
    return [(message.tokens, torch.float32), (message.top_ids, torch.int32), (message.top, torch.float32)]


@pytest.mark.parametrize(
    ("adjustments", "says"),
    [
        (pb.Adjustments(logit_bias={V: 1.0}), "logit_bias has token 12; ids end at 11"),
        (pb.Adjustments(logit_bias={1: math.inf}), "logit_bias of token 1 is inf"),
        (pb.Adjustments(allowed_tokens=[99]), "allowed_tokens has token 99"),
        (pb.Adjustments(end_tokens=[99]), "end_tokens has token 99"),
        (pb.Adjustments(presence_penalty=math.nan), "presence_penalty is nan"),
        (pb.Adjustments(repetition_penalty=-1), "repetition_penalty is -1"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(adjustments: pb.Adjustments, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_adjustments(adjustments, V)


class Slow:
    """A matcher whose grammar takes so many seconds for each token."""

    def __init__(self, token_seconds: float):
        self.token_seconds = token_seconds

    def advance(self, tokens: list[int]) -> None:
        pass

    def too_slow(self) -> InvalidRequest:
        return InvalidRequest("too ambiguous", "grammar")


def test_the_slowest_grammars_of_a_batch_are_refused() -> None:
    pipeline = Pipeline(9, V, CPU)
    seconds = [0.0015, 0.004, 0.0001, 0.006, 0.002]
    for slot, of_token in enumerate(seconds):
        pipeline.assign(slot, pb.Start(tokens=[1], sampling=tensor_pb2.Sampling(top_p=1)), Slow(of_token))  # type: ignore[arg-type]
    slots = list(range(len(seconds)))
    pipeline.advance(slots, [[1]] * len(slots))
    assert pipeline._problems.keys() == {3}
    pipeline.advance(slots[:3], [[1]] * 3)
    assert pipeline._problems.keys() == {3}
