"""Within a graph nothing comes from the host and nothing goes there: the work runs on tensors that have no numbers.

An operation on a meta tensor and a tensor of the host raises an error, and so does reading a number of a meta tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spire.decoding.drafting import RoundInputs
from spire.decoding.verification import SparseDistribution, verify
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.backends.gpu.graphs import Outputs
from spire.model.backends.reference import BlockBatch
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import prune
from spire.model.target import Target
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_BLOCK, RULE_INVARIANT, Sampling
from tests.recorder import not_waiting, nothing_from_outside

META = torch.device("meta")
V, B, T = 64, 3, 4


class Checked:
    """In the place of a CUDA graph: runs the work once and refuses what a graph cannot do."""

    def __init__(self) -> None:
        self.works = 0

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        self.works += 1
        with nothing_from_outside(), not_waiting():
            outputs = work()
        return (lambda: None), outputs


def rotate_and_store(projected: Tensor, *rest: Any) -> Tensor:
    heads, new_tokens, K = rest[-2], rest[-1], rest[3].shape[1]
    return projected.new_empty(len(projected) // new_tokens, heads, new_tokens, K)


# Kernels as operators without an implementation: what goes in is not looked at, and shapes come out.
FAKES = SimpleNamespace(
    norm=lambda x, weight, eps, fp8=False: torch.empty_like(x),
    add_norm=lambda x, more, weight, eps, out=None, fp8=False: (torch.empty_like(x), torch.empty_like(x)),
    rotate_and_store=rotate_and_store,
    silu_mul=lambda x: x[:, : x.shape[1] // 2].contiguous(),
)
ATTENTION = SimpleNamespace(attends=lambda *sizes: True, attend=lambda queries, *rest: torch.empty_like(queries))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> GpuBackend:
    monkeypatch.setattr("spire.model.backends.gpu.backend.elementwise_kernels", lambda model: FAKES)
    monkeypatch.setattr("spire.model.backends.gpu.backend.draft_kernels", lambda draft: ATTENTION)
    monkeypatch.setattr("spire.model.cache.paged.attention_kernels", lambda pages, group: ATTENTION)
    return GpuBackend(Checked())


def new_target() -> Target:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": V}
    with META:
        return Target(ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **sizes))


def works(backend: GpuBackend) -> int:
    record = backend._graphs._record
    assert isinstance(record, Checked), "an operation was refused"
    return record.works


MIXES = {
    "greedy": [Sampling(temperature=0, top_p=1)],
    "rejection": [Sampling(temperature=0.7, top_p=1)],
    "all kinds": [
        Sampling(temperature=1, top_p=0.9, top_k=5, rule=RULE_BLOCK),
        Sampling(temperature=1, top_p=1, rule=RULE_INVARIANT),
        Sampling(temperature=0, top_p=1),
    ],
}


@pytest.mark.parametrize("tokens", [1, T], ids=["plain", "verifying"])
def test_a_forward_asks_nothing_of_the_host(backend: GpuBackend, tokens: int) -> None:
    target = backend.pack(new_target())
    cache = PagedCache(target.config, B, 300, device=META)
    slots = [cache.allocate() for _ in range(B)]
    assert cache.reserve(slots, 100)
    cache.commit(slots, [100] * B)
    view = cache.view(slots, tokens, decoding=True)
    for _ in range(2):
        found = backend.forward(target, torch.empty(B, tokens, dtype=torch.int64, device=META), view, (0, 2))
    assert works(backend) == 1
    assert found.hidden_BTD.shape == (B, tokens, 32)
    assert found.taps_BTND is not None
    assert found.taps_BTND.shape == (B, tokens, 2, 32)


@pytest.mark.parametrize("kind", MIXES)
@pytest.mark.parametrize("q_of", [None, V, 8], ids=["no q", "whole q", "candidates"])
def test_a_verdict_asks_nothing_of_the_host(backend: GpuBackend, kind: str, q_of: int | None) -> None:
    target = backend.pack(new_target())
    numbers = torch.empty(B, dtype=torch.int64, device=META)
    q = None
    if q_of:
        probs = torch.empty(B, T - 1, q_of, device=META)
        q = SparseDistribution(None if q_of == V else probs.long(), probs)
    rows = from_protos([MIXES[kind][row % len(MIXES[kind])] for row in range(B)], META)
    blocks = BlockBatch(torch.empty(B, T - 1, dtype=torch.int64, device=META), numbers, q, rows, numbers)
    for _ in range(2):
        found = backend.verdict(target, torch.empty(B, T, 32, device=META), blocks, verify)
    assert works(backend) == 1
    assert found.verdict.tokens_BT.shape == (B, T)


@pytest.mark.parametrize("kind", MIXES)
@pytest.mark.parametrize("candidates", [None, 8], ids=["whole q", "candidates"])
def test_a_draft_s_round_asks_nothing_of_the_host(backend: GpuBackend, kind: str, candidates: int | None) -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=8)
    with META:
        draft = backend.pack(prune(new_target(), spire, (1, 2)))
    memory, numbers = backend.memory(draft, B), torch.empty(B, dtype=torch.int64, device=META)
    rows = from_protos([MIXES[kind][row % len(MIXES[kind])] for row in range(B)], META)
    for _ in range(2):
        round_ = memory.round(list(range(B)), [9] * B, T)
        found = backend.draft(round_, RoundInputs(numbers, numbers, T, rows, candidates), lambda shape: None)
    assert works(backend) == 1
    assert found.tokens_BK.shape == (B, T)


def test_absorbing_activations_asks_nothing_of_the_host(backend: GpuBackend) -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=8)
    with META:
        draft = backend.pack(prune(new_target(), spire, (1, 2)))
    memory, numbers_R = backend.memory(draft, B), torch.empty(5, dtype=torch.int64, device=META)
    for _ in range(2):
        memory.absorb(numbers_R, numbers_R, torch.empty(5, 2, 32, device=META))
    assert works(backend) == 1


X = torch.empty(1, device=META)
FORBIDDEN: dict[str, Callable[[], Outputs]] = {
    "reads a number": lambda: (X + float(X[0]),),
    "has a shape of numbers": lambda: (X.nonzero(),),
    "mixes in what the host has": lambda: (X + torch.ones(3),),
    "copies from the host": lambda: (X + torch.tensor([1.0], device=META),),
}


@pytest.mark.parametrize("work", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_check_would_see_what_a_graph_cannot_do(work: Callable[[], Outputs]) -> None:
    with pytest.raises(RuntimeError):
        Checked()(work)
