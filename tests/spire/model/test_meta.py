"""Within a graph nothing comes from the host and nothing goes there: the work runs on tensors that have no numbers.

An operation on a meta tensor and a tensor of the host raises an error, and so does reading a number of a meta tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spire.decoding.drafting import RoundInputs
from spire.decoding.verification import SparseDistribution, verify
from spire.model.backends.gpu.backend import GpuBackend, PaddedMemory
from spire.model.backends.gpu.graphs import Outputs
from spire.model.backends.reference import BlockBatch
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft, prune
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


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> GpuBackend:
    """With all kernels that fit, none of which has been tried: their launches are operators that do nothing here."""
    for chooser in ("spire.model.backends.gpu.kernels", "spire.model.attention.triton_kernels"):
        monkeypatch.setattr(f"{chooser}.load_kernels", lambda module, *given: importlib.import_module(module))
    return GpuBackend(Checked())


def new_target(layers: int = 3, dtype: torch.dtype = torch.float32) -> Target:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": V}
    with META:
        return Target(ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **sizes)).to(dtype)


def new_draft(layers: int = 2, dtype: torch.dtype = torch.float32) -> Draft:
    tapped = tuple(range(layers))
    with META:
        return prune(new_target(4, dtype), DraftConfig(target_fingerprint="", tapped_layers=tapped, window=8), tapped)


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
    assert found.hidden_BTD.shape == (B, tokens, 64)
    assert found.taps_BTND is not None
    assert found.taps_BTND.shape == (B, tokens, 2, 64)


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
        found = backend.verdict(target, torch.empty(B, T, 64, device=META), blocks, verify)
    assert works(backend) == 1
    assert found.verdict.tokens_BT.shape == (B, T)


@pytest.mark.parametrize("kind", MIXES)
@pytest.mark.parametrize("candidates", [None, 8], ids=["whole q", "candidates"])
def test_a_draft_s_round_asks_nothing_of_the_host(backend: GpuBackend, kind: str, candidates: int | None) -> None:
    draft = backend.pack(new_draft())
    memory, numbers = backend.memory(draft, B), torch.empty(B, dtype=torch.int64, device=META)
    rows = from_protos([MIXES[kind][row % len(MIXES[kind])] for row in range(B)], META)
    for _ in range(2):
        round_ = memory.round(list(range(B)), [9] * B, T)
        found = backend.draft(round_, RoundInputs(numbers, numbers, T, rows, candidates), lambda shape: None)
    assert works(backend) == 1
    assert found.tokens_BK.shape == (B, T)


def test_absorbing_activations_asks_nothing_of_the_host(backend: GpuBackend) -> None:
    draft = backend.pack(new_draft())
    memory, numbers_R = backend.memory(draft, B), torch.empty(5, dtype=torch.int64, device=META)
    for _ in range(2):
        memory.absorb(numbers_R, numbers_R, torch.empty(5, 2, 64, device=META))
    assert works(backend) == 1


class Launches(TorchDispatchMode):
    """Names operations that launch a kernel: all but views and allocations."""

    NO_LAUNCH = (
        "view", "reshape", "transpose", "empty", "empty_like", "new_empty", "empty_strided", "expand", "slice",
        "select", "t", "unbind", "detach", "unsqueeze", "flatten", "unflatten", "squeeze", "permute", "alias", "split",
        "_unsafe_view",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ not in self.NO_LAUNCH:
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))

    def kernels(self) -> set[str]:
        """The names of our own kernels among them."""
        return {name.removeprefix("spire.") for name in self.names if name.startswith("spire.")}


OF_LAYERS = {"add_norm", "rotate_and_store", "silu_mul"}


@pytest.mark.parametrize("tokens", [1, T], ids=["plain", "verifying"])
def test_a_layer_has_twelve_launches_at_most(backend: GpuBackend, tokens: int) -> None:
    counts: dict[int, int] = {}
    for layers in (2, 4):
        target = backend.pack(new_target(layers))
        cache = PagedCache(target.config, B, 300, device=META)
        view = cache.view([cache.allocate() for _ in range(B)], tokens, decoding=True)
        with Launches() as launches:
            backend._computed(target, torch.empty(B, tokens, dtype=torch.int64, device=META), view, ())
        assert launches.kernels() == OF_LAYERS | {"stretch", "join"}
        counts[layers] = len(launches.names)
    assert counts[4] - counts[2] <= 2 * 12, launches.names


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_a_draft_s_layer_has_twelve_launches_a_pass_fourteen_in_fp8(backend: GpuBackend, fp8: bool) -> None:
    backend._fp8 = fp8
    numbers, counts = torch.empty(B, dtype=torch.int64, device=META), {}
    for layers in (1, 3):
        memory = backend.memory(backend.pack(new_draft(layers, torch.bfloat16)), B)
        assert isinstance(memory, PaddedMemory)
        round_ = memory.begin(numbers, numbers, k=4)
        with Launches() as launches:
            round_.next_logits(numbers)
        assert launches.kernels() == OF_LAYERS | {"attend_memory"} | ({"quantise"} if fp8 else set())
        counts[layers] = len(launches.names)
    assert counts[3] - counts[1] <= 2 * (14 if fp8 else 12), launches.names


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
