"""A target's layers on a GPU compute what its layers in torch do. Triton interprets the kernels here."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from spire.errors import CheckpointError
from spire.model.attention import triton_kernels
from spire.model.backends.gpu.backend import GpuBackend, PaddedRound
from spire.model.backends.gpu.draft_round import GpuRound
from spire.model.backends.gpu.fp8 import FP8, Fp8Linear, Rows8, rows8
from spire.model.backends.gpu.kernels import elementwise_kernels, layers_fit
from spire.model.backends.gpu.packed_layer import PackedLayer
from spire.model.backends.placed import draft_backend_for
from spire.model.cache.paged import PagedCache
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import prune
from spire.model.draft_memory import DraftMemory, RoundMemory
from spire.model.layers import Layer
from spire.model.target import Target, WholeSequence
from tests.marks import thoroughly
from tests.recorder import Recorder

triton = pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

each_dtype = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def near(found: Tensor, right: Tensor, bound: float) -> bool:
    """By the norm: CPUs order sums differently, and the error of a sum whose parts cancel has no bound of its own."""
    return bool((found.double() - right.double()).norm() <= bound * right.double().norm())


def test_kernels_are_tried_before_they_serve(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.try_out(torch.float32, torch.device("cpu"), 64, 16)
    monkeypatch.setattr(kernels, "silu_mul", lambda x: x)
    with pytest.raises(RuntimeError, match="do not give ones"):
        kernels.try_out(torch.float32, torch.device("cpu"), 64, 16)


def new_target(dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    target = Target(ModelConfig.model_validate(sizes | heads | changes))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return target.to(dtype).requires_grad_(False)


PACKED: list[dict[str, Any]] = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 4},
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
]


@pytest.mark.parametrize("changes", PACKED)
def test_packed_projections_are_the_projections(changes: dict[str, Any]) -> None:
    target, tokens_BT = new_target(**changes), torch.arange(12).view(2, 6)
    before = target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD
    memory, rope = torch.randn(1, 3, 64), target.rope(torch.arange(3)[None], torch.float32)
    right = cast(Layer, target.layers[0]).keys_values(memory, rope)
    target.layers = nn.ModuleList(PackedLayer(cast(Layer, layer)) for layer in target.layers)
    torch.testing.assert_close(target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD, before, atol=1e-5, rtol=1e-5)
    for found, expected in zip(cast(Layer, target.layers[0]).keys_values(memory, rope), right, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def backend(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> GpuBackend:
    """With all kernels that fit, interpreted, and graphs that a double records."""
    attention = importlib.import_module("spire.model.attention.paged_attention")
    fitting = "spire.model.backends.gpu.backend.elementwise_kernels"
    monkeypatch.setattr(fitting, lambda model: kernels if layers_fit(model.config) else None)
    monkeypatch.setattr("spire.model.cache.paged.attention_kernels", lambda pages, group: attention)
    of_drafts = importlib.import_module("spire.model.backends.gpu.draft_attention")
    monkeypatch.setattr("spire.model.backends.gpu.backend.draft_kernels", lambda draft: of_drafts)
    return GpuBackend(Recorder())


def test_elementwise_kernels_are_of_no_use_to_a_qwen3(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    monkeypatch.setattr("spire.model.backends.gpu.kernels.load_kernels", lambda *given: kernels)
    for model_type in ("llama", "mistral", "qwen2"):
        assert elementwise_kernels(new_target(model_type=model_type)) is kernels
    assert elementwise_kernels(new_target(model_type="qwen3")) is None


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_stack_gives_what_the_layers_give(backend: GpuBackend, model_type: str) -> None:
    right, target = new_target(model_type=model_type), backend.pack(new_target(model_type=model_type))
    assert (backend._stack is None) == (model_type == "qwen3")
    cache = PagedCache(target.config, 3, 200)
    slots, tokens_NL = [cache.allocate() for _ in range(3)], torch.randint(40, (3, 100))
    for slot, prompt in zip(slots, (70, 3, 64), strict=True):
        backend.forward(target, tokens_NL[slot, None, :prompt], cache.view([slot], prompt))
        cache.commit([slot], [prompt])
    for T in (1, 3, 3):
        starts = [cache.lengths[slot] for slot in slots]
        tokens_BT = torch.stack([tokens_NL[slot, start : start + T] for slot, start in zip(slots, starts, strict=True)])
        found = backend.forward(target, tokens_BT, cache.view(slots, T, decoding=True), (0, 2))
        assert found.taps_BTND is not None
        for slot, start in zip(slots, starts, strict=True):
            whole_1L = tokens_NL[slot, None, : start + T]
            expected = right(whole_1L, WholeSequence(whole_1L), (0, 2))
            assert expected.taps_BTND is not None
            assert near(found.hidden_BTD[slot], expected.hidden_BTD[0, start:], 1e-4)
            assert near(found.taps_BTND[slot], expected.taps_BTND[0, start:], 1e-4)
        cache.commit(slots, [T] * 3)


class Checking(TorchDispatchMode):
    """Checks of every launch of our kernels that it writes to nothing but what its operator names."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "spire":
            opcheck(func, args, kwargs, test_utils="test_schema")
            self.checked.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_launch_writes_to_nothing_but_what_it_names(backend: GpuBackend) -> None:
    target, spire = backend.pack(new_target()), DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=6)
    view = (cache := PagedCache(target.config, 2, 200)).view([cache.allocate(), cache.allocate()], 2, decoding=True)
    draft = backend.pack(prune(new_target(), spire, (1, 2)).requires_grad_(False))
    with Checking() as launches:
        backend._computed(target, torch.zeros(2, 2, dtype=torch.int64), view, ())
        backend.memory(draft, 2).round([0, 1], [3, 3], 4).next_logits(torch.tensor([1, 2]))
        with pytest.raises(Exception, match="x is not defined as mutable"):
            silently_written(torch.ones(3))
    # `opcheck` cannot compare numbers in fp8, so `quantise` is not checked.
    of_layers = {"add_norm", "rotate_and_store", "silu_mul"}
    assert launches.checked == of_layers | {"stretch", "join", "attend_memory"}


@torch.library.custom_op("spire::silently_written", mutates_args=())
def silently_written(x: Tensor) -> None:
    x.zero_()


def scaled_mm(
    values_RD: Tensor, weight_DE: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """As torch's product of fp8 matrices on a GPU, with scales of rows and of outputs, but not rounded to bfloat16."""
    assert out_dtype == torch.bfloat16
    assert values_RD.dtype == weight_DE.dtype == FP8
    assert scale_a.shape == (len(values_RD), 1)
    assert scale_b.shape == (1, weight_DE.shape[1])
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    return (values_RD.float() * scale_a) @ (weight_DE.float() * scale_b)


def wide(rows: Rows8) -> Tensor:
    return rows.values_RD.float() * rows.scale_R1


@pytest.fixture
def rounds_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter halves numbers that round up to a power of two."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != triton.language.float8e4nv:
            return convert(data, source, target, mode)
        assert source == triton.language.float32
        return torch.from_numpy(data).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.usefixtures("rounds_to_fp8")
@pytest.mark.parametrize("width", [64, thoroughly(96), thoroughly(4096)])
def test_rows_in_fp8_are_torch_s(kernels: ModuleType, width: int) -> None:
    torch.manual_seed(width)
    x_RD, more_RD, weight_D = torch.randn(5, width), torch.randn(5, width), torch.rand(width)
    x_RD[3] = more_RD[3] = 0
    given = x_RD, more_RD, weight_D, 1e-5
    for found, exact in (
        (kernels.quantise(x_RD), x_RD),
        (kernels.norm(x_RD, weight_D, 1e-5, fp8=True), kernels.norm(x_RD, weight_D, 1e-5)),
        (kernels.add_norm(*given, fp8=True)[1], kernels.add_norm(*given)[1]),
    ):
        torch.testing.assert_close(found.scale_R1, rows8(exact).scale_R1, rtol=1e-5, atol=0)
        # A number next to the middle of two may be rounded to either.
        same = (found.values_RD.float() == rows8(exact).values_RD.float()).float().mean()
        assert same > 0.99
        assert ((wide(found) - exact).abs() <= exact.abs() / 16 + found.scale_R1 * 2**-9).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_fp8_is_near_the_product(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).bfloat16().requires_grad_(False)
    x_BTD, right_of = torch.randn(2, 3, 64).bfloat16(), copy.deepcopy(linear).double()
    fp8 = Fp8Linear(linear)
    assert linear.weight is None
    assert fp8(x_BTD).shape == (2, 3, 96)
    assert near(fp8(x_BTD), right_of(x_BTD.double()), 0.05)
    torch.testing.assert_close(fp8(x_BTD, 32), fp8(x_BTD)[..., 32:])
    rows = rows8(x_BTD.flatten(0, 1))
    assert torch.equal(fp8(rows), fp8(x_BTD).flatten(0, 1))


@pytest.mark.usefixtures("rounds_to_fp8")
def test_a_round_in_fp8_by_kernels_is_the_one_by_torch(backend: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 between the products: Triton's interpreter has no products in bfloat16."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    backend._fp8, contexts, k = True, [2, 30, 9], 4
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=6)
    draft = backend.pack(prune(new_target(), spire, (1, 2)).requires_grad_(False))
    layers = cast(list[PackedLayer], list(draft.layers))
    assert all(isinstance(part, Fp8Linear) for part in (layers[0].o_proj, layers[1].down_proj))
    assert isinstance(draft.lm_head, nn.Linear), "40 ids are no multiple of 16"
    memory = absorbed(backend.memory(draft, 3), contexts)
    rounds = [DraftMemory.round(memory, [2, 0, 1], [9, 2, 30], k), memory.round([2, 0, 1], [9, 2, 30], k)]
    for tokens_B in torch.randint(40, (k, 3)):
        right, found = (round_.next_logits(tokens_B) for round_ in rounds)
        assert near(found, right, 0.02)
    assert isinstance(cast(PaddedRound, rounds[1])._begun, GpuRound)


def test_a_draft_whose_sizes_fp8_has_no_products_for_is_refused() -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=6)
    draft = prune(new_target(intermediate_size=88), spire, (1, 2)).requires_grad_(False)
    with pytest.raises(CheckpointError, match="64 × 88: leave it out"):
        GpuBackend(Recorder(), fp8=True).pack(draft)


def test_fp8_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="needs a GPU or a CPU, not mps"):
        draft_backend_for(torch.device("mps"), torch.bfloat16, "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(CheckpointError, match=r"NVIDIA A100 has 8\.0"):
        draft_backend_for(torch.device("cuda"), torch.bfloat16, "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(CheckpointError, match="--dtype"):
        draft_backend_for(torch.device("cuda"), torch.float32, "fp8")


DRAFTS: list[Any] = [
    {},
    {"feedback": False},
    thoroughly({"attends_self": False}),
    thoroughly({"window": 40, "sink": 3}),
]


def absorbed(memory: DraftMemory, contexts: list[int]) -> DraftMemory:
    sink, window = memory.draft.draft.sink, memory.draft.draft.window
    for slot, context in enumerate(contexts):
        positions = [p for p in range(context) if p < sink or p >= context - window]
        taps_RND = torch.randn(len(positions), 2, 64, generator=torch.Generator().manual_seed(context))
        position_R = torch.tensor(positions)
        memory.absorb(torch.full_like(position_R, slot), position_R, taps_RND)
    return memory


@pytest.mark.parametrize("changes", DRAFTS)
@pytest.mark.parametrize("kv_heads", [2, thoroughly(1)])
def test_a_round_by_kernels_is_the_round(backend: GpuBackend, changes: dict[str, Any], kv_heads: int) -> None:
    contexts, k = [2, 30, 9], 4
    draft = prune(
        new_target(num_key_value_heads=kv_heads),
        DraftConfig.model_validate({"target_fingerprint": "", "tapped_layers": (1, 2), "window": 6} | changes),
        (1, 2),
    ).requires_grad_(False)
    right = absorbed(DraftMemory(copy.deepcopy(draft), 3), contexts).round([2, 0, 1], [9, 2, 30], k)
    round_ = absorbed(backend.memory(backend.pack(draft), 3), contexts).round([2, 0, 1], [9, 2, 30], k)
    tokens_KB = torch.randint(40, (k, 3))
    for tokens_B in tokens_KB:
        assert near(round_.next_logits(tokens_B), right.next_logits(tokens_B), 1e-4)
    assert isinstance(round_, PaddedRound)
    assert isinstance(round_._begun, GpuRound)


@pytest.mark.parametrize(("model_type", "kind"), [("qwen2", GpuRound), ("qwen3", RoundMemory)])
def test_a_round_of_another_family_is_by_kernels_where_they_fit(
    backend: GpuBackend, model_type: str, kind: type[Any]
) -> None:
    spire = DraftConfig(target_fingerprint="", tapped_layers=(1, 2), window=6)
    draft = prune(new_target(model_type=model_type), spire, (1, 2)).requires_grad_(False)
    right = absorbed(DraftMemory(copy.deepcopy(draft), 2), [2, 30]).round([1, 0], [30, 2], 3)
    round_ = absorbed(backend.memory(backend.pack(draft), 2), [2, 30]).round([1, 0], [30, 2], 3)
    for tokens_B in torch.randint(40, (3, 2)):
        assert near(round_.next_logits(tokens_B), right.next_logits(tokens_B), 1e-4)
    assert isinstance(round_, PaddedRound)
    assert isinstance(round_._begun, kind)


def test_without_kernels_the_packed_layers_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "on_gpu", lambda tensor: True)

    def fails(name: str) -> ModuleType:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_kernels.importlib, "import_module", fails)
    backend, tokens_BT = GpuBackend(Recorder()), torch.arange(6)[None]
    target = backend.pack(new_target())
    found = backend.forward(target, tokens_BT, WholeSequence(tokens_BT)).hidden_BTD
    plain = new_target()
    torch.testing.assert_close(found, plain(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD)
