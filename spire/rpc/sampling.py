"""Convert sampling parameters from messages to tensors. Imports torch, so the gateway must not import this module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spire.decoding.sampling import Rule, SamplingRows
from spire.errors import InvalidRequest
from spire.v1 import tensor_pb2 as pb

# One set of parameters for each code path of sampling, the most common first.
ONE_OF_EACH = (
    pb.Sampling(temperature=1, top_p=1),
    pb.Sampling(temperature=0, top_p=1),
    pb.Sampling(temperature=1, top_k=40, top_p=0.9, min_p=0.05),
    pb.Sampling(temperature=1, top_p=1, rule=pb.RULE_BLOCK),
    pb.Sampling(temperature=1, top_p=1, rule=pb.RULE_INVARIANT),
)


def from_protos(samplings: Sequence[pb.Sampling], device: torch.device | str = "cpu") -> SamplingRows:
    """Convert sampling parameters to tensors with one row per message."""
    rows = SamplingRows(
        temperature_B=torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
        top_k_B=torch.tensor([s.top_k for s in samplings], dtype=torch.int64),
        top_p_B=torch.tensor([s.top_p for s in samplings], dtype=torch.float32),
        min_p_B=torch.tensor([s.min_p for s in samplings], dtype=torch.float32),
        seed_B=torch.tensor([_as_signed(s.seed) for s in samplings], dtype=torch.int64),
        choice_B=torch.tensor([s.choice for s in samplings], dtype=torch.int64),
        rule_B=torch.tensor([s.rule or Rule.REJECTION for s in samplings], dtype=torch.int64),
    )
    return rows.to(torch.device(device))


def check_sampling(sampling: pb.Sampling) -> None:
    """Raise InvalidRequest, naming the parameter, if a parameter is out of range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        message = f"temperature is {sampling.temperature}: it must be finite and not negative"
        raise InvalidRequest(message, "temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}: it must be above 0 and at most 1", "top_p")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest(f"min_p is {sampling.min_p}: it must be between 0 and 1", "min_p")
    if sampling.rule and sampling.rule not in list(Rule):
        known = ", ".join(f"{rule} ({rule.name.lower()})" for rule in Rule)
        raise InvalidRequest(f"rule is {sampling.rule}: known are {known}", "rule")


def _as_signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed
