"""On a GPU kernels and graphs give what torch gives in float64, and graphs what launches one by one give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from spire.decoding.drafting import RoundInputs
from spire.model.backends.gpu.backend import GpuBackend, PaddedRound
from spire.model.backends.gpu.draft_round import GpuRound
from spire.model.backends.gpu.fp8 import Fp8Linear
from spire.model.backends.gpu.graphs import Outputs
from spire.model.backends.placed import draft_backend_for
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import prune
from spire.model.draft_memory import DraftMemory
from spire.model.target import Target, WholeSequence
from spire.rpc.sampling import ONE_OF_EACH, from_protos

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

V, LENGTHS, PROMPT = 512, (1500, 70, 3, 64, 1023), 40
each_dtype = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def new_target(dtype: torch.dtype, heads: int, kv_heads: int) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": V}
    target = Target(ModelConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, **sizes))
    for parameter in target.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return target.to(dtype).requires_grad_(False)


def error(found: Tensor, right: Tensor) -> float:
    found, right = found.double().cpu(), right.double().cpu()
    return float((found - right).norm() / right.norm())


def refuses(work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    raise RuntimeError("launched one by one in this test")


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("T", [1, 5, 9])
def test_a_step_gives_what_whole_sequences_give(
    dtype: torch.dtype, bound: float, heads: int, kv_heads: int, T: int
) -> None:
    """Prompts in chunks, then the same step three times: launched, recorded, replayed."""
    exact = new_target(dtype, heads, kv_heads).double()
    backend = GpuBackend()
    target = backend.pack(new_target(dtype, heads, kv_heads).cuda())
    assert backend._stack is not None
    cache = PagedCache(target.config, len(LENGTHS), 2000, dtype, "cuda")
    assert cache.kernels is not None
    slots = [cache.allocate() for _ in LENGTHS]
    tokens_NL = torch.randint(V, (len(LENGTHS), 2000))
    for slot, length in zip(slots, LENGTHS, strict=True):
        for at in range(0, length, 700):
            chunk = tokens_NL[slot, None, at : min(at + 700, length)].cuda()
            backend.forward(target, chunk, cache.view([slot], chunk.shape[1]))
            cache.commit([slot], [chunk.shape[1]])
    tokens_BT = torch.stack([tokens_NL[slot, n : n + T] for slot, n in zip(slots, LENGTHS, strict=True)])
    for _ in range(3):
        found = backend.forward(target, tokens_BT.cuda(), cache.view(slots, T, decoding=True), (0, 2))
        assert found.taps_BTND is not None
        for slot, n in zip(slots, LENGTHS, strict=True):
            whole_1L = tokens_NL[slot, None, : n + T]
            right = exact(whole_1L, WholeSequence(whole_1L), (0, 2))
            assert right.taps_BTND is not None
            assert error(found.hidden_BTD[slot], right.hidden_BTD[0, n:]) < bound
            assert error(found.taps_BTND[slot], right.taps_BTND[0, n:]) < bound
    assert len(backend._graphs._recorded) == 1


@each_dtype
@pytest.mark.parametrize("changes", [{}, {"feedback": False}, {"attends_self": False}, {"window": 40, "sink": 3}])
def test_a_draft_s_passes_give_what_its_layers_give(
    dtype: torch.dtype, bound: float, changes: dict[str, object]
) -> None:
    spire = DraftConfig.model_validate({"target_fingerprint": "", "tapped_layers": (1, 2)} | changes)
    draft = prune(new_target(dtype, 8, 2), spire, (1, 2)).to(dtype).requires_grad_(False)
    exact, backend = copy.deepcopy(draft).double(), GpuBackend()
    served = backend.pack(draft.cuda())
    memories = [DraftMemory(exact, 3), backend.memory(served, 3)]
    bases, order, k = [2, 90, 9], [2, 0, 1], 5
    for slot, base in enumerate(bases):
        positions = torch.tensor([p for p in range(base) if p < spire.sink or p >= base - spire.window])
        taps_RND = torch.randn(len(positions), 2, 256, generator=torch.Generator().manual_seed(slot)).to(dtype)
        for memory in memories:
            on = memory.keys_NXGSK
            memory.absorb(torch.full_like(positions, slot).to(on.device), positions.to(on.device), taps_RND.to(on))
    rounds = [memory.round(order, [bases[slot] for slot in order], k) for memory in memories]
    for step in range(k):
        tokens_B = torch.tensor([step, 7 * step, 100 + step])
        right, found = rounds[0].next_logits(tokens_B), rounds[1].next_logits(tokens_B.cuda())
        assert error(found, right) < bound
    assert isinstance(rounds[1], PaddedRound)
    assert isinstance(rounds[1]._begun, GpuRound)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no products in fp8"
)
def test_a_draft_s_passes_in_fp8_are_near_those_in_bfloat16() -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2))
    draft = prune(new_target(torch.bfloat16, 8, 2), spire, (1, 2)).bfloat16().requires_grad_(False)
    exact, backend = copy.deepcopy(draft).double(), draft_backend_for(torch.device("cuda"), torch.bfloat16, "fp8")
    served = backend.pack(draft.cuda())
    assert isinstance(served.lm_head, Fp8Linear)
    memories = [DraftMemory(exact, 1), backend.memory(served, 1)]
    taps_RND, positions = torch.randn(9, 2, 256, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.arange(9)
    for memory in memories:
        on = memory.keys_NXGSK
        memory.absorb(torch.zeros(9, dtype=torch.int64).to(on.device), positions.to(on.device), taps_RND.to(on))
    rounds = [memory.round([0], [9], 4) for memory in memories]
    for token in (5, 6, 7, 8):
        right, found = rounds[0].next_logits(torch.tensor([token])), rounds[1].next_logits(torch.tensor([token]).cuda())
        assert error(found, right) < 0.2
    assert isinstance(rounds[1], PaddedRound)
    assert isinstance(rounds[1]._begun, GpuRound)


def test_a_round_by_a_graph_draws_what_its_launches_draw() -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2))
    draft = prune(new_target(torch.float32, 8, 2), spire, (1, 2)).requires_grad_(False)
    rows = from_protos(ONE_OF_EACH, "cuda")
    slots, bases = list(range(len(ONE_OF_EACH))), [9] * len(ONE_OF_EACH)
    newest_B, base_B = (torch.tensor(numbers, device="cuda") for numbers in (slots, bases))
    drawn = []
    for backend in (GpuBackend(), GpuBackend(refuses)):
        served = backend.pack(copy.deepcopy(draft).cuda())
        memory = backend.memory(served, len(slots))
        taps_RND = torch.randn(9, 2, 256, generator=torch.Generator().manual_seed(1)).cuda()
        for slot in slots:
            memory.absorb(torch.full((9,), slot, device="cuda"), torch.arange(9, device="cuda"), taps_RND)
        for _ in range(3):
            found = backend.draft(
                memory.round(slots, bases, 4), RoundInputs(newest_B, base_B, 4, rows, None), lambda shape: None
            ).tokens_BK
            drawn.append(found.tolist())
    assert all(tokens == drawn[0] for tokens in drawn)
