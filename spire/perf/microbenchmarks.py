"""Microbenchmarks for the performance model: each part of a step alone, at the widths of a given target and draft.

The parts are a layer's matrix products by rows, memory reads, attention over far more than the processor's cache, a
model without these, and sampling. `spire.perf.calibrator` runs all microbenchmarks.
Shapes: B sequences, T new positions, N draft layers, D width, V vocabulary. Nothing is fitted to a whole model's run.
Does not know: how parts slow each other down, or overlap on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import cast

# Imported before torch, because this module sets how OpenMP waits, as in the services.
import spire.service.process  # noqa: F401

# isort: split
import torch
from torch import Tensor, nn

from spire.decoding.drafting import Drafted, DraftingRound, RoundInputs, draft_tokens
from spire.decoding.sampling import SamplingRows
from spire.decoding.verification import SparseDistribution
from spire.kernels import Kernels
from spire.model.backends.cpu.fused_layer import FusedLayer, kernels_of
from spire.model.backends.cpu.fused_sampling import KernelSampling, draw
from spire.model.backends.placed import backend_for, draft_backend_for
from spire.model.backends.reference import BlockBatch, Model, Reference
from spire.model.cache.placed import cache_for
from spire.model.cache.target_cache import BatchView
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.layers import Layer, Rotation
from spire.model.placement import draft_threads
from spire.model.target import Target
from spire.perf.hardware import Cost, Curve, Hardware, Measured, ModelCosts
from spire.perf.perf_model import draft_seconds, verify_seconds
from spire.perf.shapes import DraftShape, Shape
from spire.perf.stand_ins import Unread, draft_shell, without_layers
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_BLOCK, Sampling

_ROWS = (1, 4, 16, 64, 256, 1024)
# (sequences, tokens) between which costs are assumed linear: one sequence decoding, sixteen verifying four tokens.
_FEW, _MANY, _DEPTH = (1, 1), (16, 5), 4
# New tokens per sequence: attention is bound by memory for few tokens, and by arithmetic for many.
_VERIFIED = (1, 3, 5, 9)
_BEYOND_ANY_CACHE = 256 * 2**20
_SKELETON_LAYERS = 8
# Bound on the parameters of a model whose layers keep their weights.
_MOST_PARAMETERS = 32_000_000
_SKELETON_VOCABULARY = 256
_WHOLE_Q = 4096


@dataclass(frozen=True)
class Bench:
    """A timer of functions on a device in a dtype. A measurement takes at least `least_seconds`.

    `narrow`: bfloat16 holds the weights exactly, as those of a checkpoint in bfloat16.
    """

    device: torch.device
    dtype: torch.dtype
    least_seconds: float = 0.2
    narrow: bool = False

    def served(self, model: Model) -> Model:
        """Return a model in the bench's dtype, on its device."""
        rounded = model.to(torch.bfloat16) if self.narrow else model
        return rounded.to(self.device, self.dtype).requires_grad_(False)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of a call of `work`, over at least 3 calls after 2 warm-up calls."""
        return self.by_turns(work)[0]

    def by_turns(self, *works: Callable[[], object]) -> list[float]:
        """Return the median seconds per call of each function. Calls alternate, so that disturbances affect all."""
        for work in works * 2:
            self._timed(work)
        times: list[list[float]] = []
        until = time.perf_counter() + len(works) * self.least_seconds
        while len(times) < 3 or time.perf_counter() < until:
            times.append([self._timed(work) for work in works])
        return [statistics.median(of_one) for of_one in zip(*times, strict=True)]

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def products(config: ModelConfig, bench: Bench, fp8: bool = False) -> tuple[tuple[int, float], ...]:
    """Measure (rows, FLOP/s) of the seven matrix products of one layer, packed as served, with weights in fp8 if asked.

    The time includes the operations between the products. Weights of a small layer stay in the processor's cache.
    """
    alone = config.model_copy(update={"num_hidden_layers": 1, "vocab_size": _SKELETON_VOCABULARY})
    model = bench.served(Target(alone))
    flops_per_row = sum(2 * one.weight.numel() for one in model.layers.modules() if isinstance(one, nn.Linear))
    kernels = kernels_of(config, bench.randn(0)) if fp8 else None
    if kernels:
        layer: Layer = FusedLayer(cast(Layer, model.layers[0]), kernels, fp8)
    else:
        layer = cast(Layer, backend_for(bench.device).pack(model).layers[0])

    def compute(input_1RD: Tensor, attended_1HRK: Tensor, rope: Rotation) -> None:
        layer.queries_keys_values(input_1RD, rope)
        layer.behind(input_1RD, attended_1HRK)

    def speed(rows: int) -> float:
        rope = model.rope(torch.arange(rows, device=bench.device)[None], bench.dtype)
        input_1RD = bench.randn(1, rows, config.hidden_size)
        attended_1HRK = bench.randn(1, config.num_attention_heads, rows, config.head_dim)
        return flops_per_row * rows / bench.seconds(partial(compute, input_1RD, attended_1HRK, rope))

    return tuple((rows, speed(rows)) for rows in _ROWS)


def read_bandwidth(bench: Bench) -> float:
    """Measure the bytes per second of reading memory, over a range far larger than any cache."""
    numbers = torch.ones(_BEYOND_ANY_CACHE // 4, device=bench.device)
    return numbers.nbytes / bench.seconds(numbers.sum)


def kv_read_cost(config: ModelConfig, bench: Bench) -> Curve:
    """Measure attention of 16 sequences over 2,048 positions: seconds per byte of keys and values, by new tokens."""
    sequences, positions = _MANY[0], 2048
    per_layer = sequences * positions * 2 * config.num_key_value_heads * config.head_dim * bench.dtype.itemsize
    layers = max(1, -(-_BEYOND_ANY_CACHE // per_layer))
    cache = cache_for(
        config.model_copy(update={"num_hidden_layers": layers}), sequences, positions - 1, bench.dtype, bench.device
    )
    for keys_RK, values_RK in cache.pools:  # untouched zeros share one physical page, which is always in cache
        keys_RK.normal_()
        values_RK.normal_()
    slots = [cache.allocate() for _ in range(sequences)]
    cache.commit(slots, [positions - max(_VERIFIED) - 1] * sequences)

    def reading(tokens: int) -> Callable[[], None]:
        queries = bench.randn(sequences, config.num_attention_heads, tokens, config.head_dim)
        new = bench.randn(sequences, config.num_key_value_heads, tokens, config.head_dim)

        def read() -> None:
            view = cache.view(slots, tokens, decoding=True)
            for layer in range(layers):
                view.attend(layer, queries, new, new)

        return read

    seconds = bench.by_turns(*map(reading, _VERIFIED))
    return Curve(
        tuple((tokens, of_all / (layers * per_layer)) for tokens, of_all in zip(_VERIFIED, seconds, strict=True))
    )


def target_layer_cost(config: ModelConfig, bench: Bench) -> Cost:
    """Measure seconds per layer, by rows, of a target forward without matrix products and without cache reads."""
    layers = min(config.num_hidden_layers, _SKELETON_LAYERS)
    with torch.device("meta"):
        model = Target(config.model_copy(update={"num_hidden_layers": layers, "vocab_size": _SKELETON_VOCABULARY}))
    model = without_layers(model, prod(_MANY), bench.dtype, bench.device)
    return _of_forward(model, Reference(), bench, lambda view: Unread(view, bench.dtype), lambda batch, tokens: 0.0)


def fused_target_layer_cost(
    config: ModelConfig, matmul: tuple[tuple[int, float], ...], bandwidth: float, bench: Bench, width: int
) -> Cost:
    """Measure `target_layer_cost` for fused layers: seconds of a forward less predicted seconds of matrix products.

    `width`: bytes of a weight's value.
    """
    alone = config.model_copy(update={"num_hidden_layers": 1})
    fitting = max(1, _MOST_PARAMETERS // Shape.of(alone).body_parameters)
    layers = min(config.num_hidden_layers, _SKELETON_LAYERS, fitting)
    small = config.model_copy(update={"num_hidden_layers": layers, "vocab_size": _SKELETON_VOCABULARY})
    backend = backend_for(bench.device)
    model = backend.pack(bench.served(Target(small)))
    body, products = replace(Shape.of(small), vocab_size=0), _only_products(matmul, bandwidth, bench, width)
    return _of_forward(
        model,
        backend,
        bench,
        lambda view: view,
        lambda batch, tokens: verify_seconds(body, batch, 0, tokens - 1, products),
    )


def draft_costs(config: ModelConfig, draft: DraftConfig, bench: Bench) -> tuple[Cost, Cost]:
    """Measure a SPIRe draft without matrix products: seconds per layer and pass, and per round, by sequences.

    The seconds of a round do not include its passes. The draft's memory is full, and each pass reads this memory.
    """
    with torch.device("meta"):
        model = draft_shell(config, draft, _SKELETON_VOCABULARY)
    memory = DraftMemory(without_layers(model, prod(_MANY), bench.dtype, bench.device), _MANY[0])
    return _of_layer_and_round(memory, bench, lambda batch: 0.0)


def fused_draft_costs(
    config: ModelConfig,
    draft: DraftConfig,
    matmul: tuple[tuple[int, float], ...],
    bandwidth: float,
    bench: Bench,
    width: int,
) -> tuple[Cost, Cost]:
    """Measure `draft_costs` for fused draft passes: seconds of a pass less predicted seconds of matrix products.

    `width`: bytes of a weight's value.
    """
    model = bench.served(draft_shell(config, draft, _SKELETON_VOCABULARY))
    shape, alone = DraftShape("spire", Shape.of(model.config)), _only_products(matmul, bandwidth, bench, width)
    backend = draft_backend_for(bench.device, bench.dtype)
    memory = backend.memory(backend.pack(model), _MANY[0])
    return _of_layer_and_round(memory, bench, lambda batch: draft_seconds(shape, batch, 0, 1, alone))


def draft_sampling_cost(config: ModelConfig, draft: DraftConfig, bench: Bench) -> Cost:
    """Measure the seconds of sampling draft tokens from logits, by the number of logits."""
    vocabulary, kernels = draft.vocabulary or config.vocab_size, kernels_of(config, bench.randn(0))
    candidates = _candidates(config, draft)

    def seconds(batch: int) -> float:
        if kernels and candidates is None:
            return bench.seconds(_drawing(kernels, logits[:batch].float(), bench))
        return bench.seconds(lambda: _draft(batch, _DEPTH, logits, candidates, bench)) / _DEPTH

    logits = bench.randn(_MANY[0], vocabulary)
    return _line((vocabulary, seconds(1)), (_MANY[0] * vocabulary, seconds(_MANY[0])))


def verify_sampling_cost(config: ModelConfig, draft: DraftConfig, bench: Bench) -> Cost:
    """Measure verification by the block rule: seconds from logits to committed tokens, by the number of logits."""
    backend, vocabulary, candidates = backend_for(bench.device), config.vocab_size, _candidates(config, draft)

    def seconds(batch: int, tokens: int) -> float:
        k, rows = tokens - 1, _sampling_rows(batch, bench)
        logits_BTV = bench.randn(batch, tokens, vocabulary)
        counts_B = torch.full((batch,), k, device=bench.device)
        draft_BK, q = torch.empty(batch, 0, dtype=torch.int64, device=bench.device), None
        if k:
            drafted = _draft(batch, k, logits_BTV[:, 0, : draft.vocabulary], candidates, bench)
            assert drafted.probs_BKM is not None  # the block rule needs q
            draft_BK, q = drafted.tokens_BK, SparseDistribution(drafted.ids_BKM, drafted.probs_BKM)
            if drafted.ids_BKM is None:
                width = drafted.probs_BKM.shape[-1]
                among_M = torch.arange(width, device=bench.device) if width < vocabulary else None
                q = SparseDistribution.whole(list(drafted.probs_BKM), k, width, bench.device, among_M)

        def sample() -> None:
            logits = logits_BTV.to(torch.float32, copy=True)
            backend.judge(logits, BlockBatch(draft_BK, counts_B, q, rows, counts_B))[0].tokens_BT.tolist()

        return bench.seconds(sample)

    few, many = ((vocabulary * prod(size), seconds(*size)) for size in (_FEW, _MANY))
    return _line(few, many)


def threads_of(config: ModelConfig, draft: DraftConfig) -> int:
    """Return the number of threads with which a draft of this size is served."""
    with torch.device("meta"):
        return (
            draft_threads(Draft(config.model_copy(update={"num_hidden_layers": len(draft.tapped_layers)}), draft))
            or torch.get_num_threads()
        )


def _of_forward(
    model: Target,
    backend: Reference,
    bench: Bench,
    seen: Callable[[BatchView], BatchView | Unread],
    products: Callable[[int, int], float],
) -> Cost:
    """Measure the seconds per layer of a forward on the view `seen(view)`, less `products(batch, tokens)`, by rows."""
    layers = model.config.num_hidden_layers
    cache = cache_for(model.config, _MANY[0], _MANY[1], bench.dtype, bench.device)
    slots = [cache.allocate() for _ in range(_MANY[0])]

    def seconds(batch: int, tokens: int) -> float:
        tokens_BT = torch.ones(batch, tokens, dtype=torch.int64, device=bench.device)

        def forward() -> None:
            view = seen(cache.view(slots[:batch], tokens, decoding=True))
            backend.forward(model, tokens_BT, view, (layers - 1,))

        of_all = bench.seconds(forward)
        return max(0.0, of_all - products(batch, tokens))

    return _line((prod(_FEW), seconds(*_FEW)), (prod(_MANY), seconds(*_MANY)), layers)


def _of_layer_and_round(memory: DraftMemory, bench: Bench, products: Callable[[int], float]) -> tuple[Cost, Cost]:
    """Measure seconds per layer and draft pass, less `products(batch)`, and per round without passes, by sequences."""
    few, many = _FEW[0], _MANY[0]
    once = {batch: bench.seconds(_draft_round(memory, batch, 0, bench)) for batch in (few, many)}

    def one_pass(batch: int) -> float:
        passes = bench.seconds(_draft_round(memory, batch, _DEPTH, bench)) - once[batch]
        return max(0.0, passes / _DEPTH - products(batch))

    layer = _line((few, one_pass(few)), (many, one_pass(many)), memory.draft.config.num_hidden_layers)
    return layer, _line((few, once[few]), (many, once[many]))


def _draft_round(memory: DraftMemory, batch: int, passes: int, bench: Bench) -> Callable[[], None]:
    """Return a function that stores `_DEPTH` positions per sequence, begins a round, and runs `passes` draft passes."""
    draft, config = memory.draft.draft, memory.draft.config
    slots, base = list(range(batch)), draft.sink + draft.window
    tokens_B = torch.ones(batch, dtype=torch.int64, device=bench.device)
    slots_R = torch.arange(batch, device=bench.device).repeat_interleave(_DEPTH)
    positions_R = torch.arange(base - _DEPTH, base, device=bench.device).repeat(batch)
    taps_RND = bench.randn(batch * _DEPTH, config.num_hidden_layers, config.hidden_size)

    def run() -> None:
        memory.absorb(slots_R, positions_R, taps_RND)
        round_ = memory.round(slots, [base] * batch, _DEPTH)
        for _ in range(passes):
            round_.next_logits(tokens_B)

    return run


def _drawing(kernels: Kernels, logits_BV: Tensor, bench: Bench) -> Callable[[], None]:
    """Return a function that draws a token per row with one kernel. Each call overwrites `logits_BV`, its input."""
    (B, V), probs_BV = logits_BV.shape, logits_BV.bfloat16()
    uniforms_B, (base_B, tokens_B) = torch.rand(B).double(), torch.zeros(2, B, dtype=torch.int64)
    sampling = KernelSampling.of(_sampling_rows(B, bench), base_B, V)
    return lambda: draw(kernels, logits_BV, sampling, 0, uniforms_B, tokens_B, probs_BV)


def _candidates(config: ModelConfig, draft: DraftConfig) -> int | None:
    return None if draft.vocabulary or config.vocab_size <= _WHOLE_Q else _WHOLE_Q


def _draft(batch: int, k: int, logits_BV: Tensor, candidates: int | None, bench: Bench) -> Drafted:
    newest_B = torch.zeros(batch, dtype=torch.int64, device=bench.device)
    given = cast(DraftingRound, SimpleNamespace(next_logits=lambda _: logits_BV[:batch].float(), hidden_BD=logits_BV))
    return draft_tokens(given, RoundInputs(newest_B, newest_B, k, _sampling_rows(batch, bench), candidates))


def _only_products(matmul: tuple[tuple[int, float], ...], bandwidth: float, bench: Bench, width: int) -> Hardware:
    """Return hardware with this device's costs of matrix products, and no other costs."""
    costs = ModelCosts(matmul, Cost(), Cost(), width)
    measured = Measured(target=costs, draft=costs, kv_read=Curve(((1, 0.0),)), draft_round=Cost(), wire=Cost())
    return Hardware("", 1.0, bandwidth, bench.dtype.itemsize, measured=measured)


def _sampling_rows(B: int, bench: Bench) -> SamplingRows:
    return from_protos([Sampling(temperature=1, top_p=1, seed=b, rule=RULE_BLOCK) for b in range(B)], bench.device)


def _line(few: tuple[float, float], many: tuple[float, float], share: float = 1.0) -> Cost:
    """Return the line through two measurements (n, seconds), divided by `share`; slope and offset are at least 0."""
    each = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
    return Cost(max(0.0, few[1] - few[0] * each) / share, each / share)
