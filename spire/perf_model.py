"""The performance model (paper sections 2 and 5): what speculation gains, and where it loses, before anything runs.

    multiplier = τ / Δt,   Δt = (k · draft pass + verification) / plain step
    cost of a forward = max(FLOPs, bytes read · HOI),   HOI = FLOP/s over bytes/s of the hardware

Pure arithmetic: no torch, no files, no clock. `Hardware.of_intensity(600)` is the paper's, `gpu("h100")` a data
sheet's; what `spire doctor --calibrate` measures adds unembedding, sampling, launches and the wire, never fitted to a
whole run. `best_k` answers where to switch speculation off. By hand: `spire perf-model --help`.

What it does not know: whether weights and cache fit the device, prefill, queues, and a gateway's own work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from spire.errors import InvalidRequest
from spire.hardware import Cost, Hardware, ModelCosts
from spire.model.config import ModelConfig

DraftKind = Literal["vanilla", "magicdec", "spire"]

# The paper's evaluation: section 4, Table 1 at context 512.
PAPER_K = 4
PAPER_TAU: dict[DraftKind, float] = {"vanilla": 2.647, "magicdec": 3.891, "spire": 3.401}

SERVED_SINK, SERVED_WINDOW = 1, 64

# How q travels by default: up to this many tokens whole in bfloat16, of a larger vocabulary the top ones with ids and
# in fp32. Greedy requests send none.
_Q_TOP_M = 4096
_TOKEN_BYTES = 4


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a Llama-architecture model's costs depend on. `vocab_size` 0: not known, so unembedding costs nothing."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.vocab_size,
        )

    @property
    def body_parameters(self) -> int:
        """N: the layers with their norms; without embedding, unembedding and final norm, as the paper counts."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        swiglu = 3 * self.hidden_size * self.intermediate_size
        return self.layers * (attention + swiglu + 2 * self.hidden_size)

    @property
    def kv_values_per_position(self) -> int:
        """Key and value numbers that one position keeps, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Draft:
    """A draft's cost: its shape and what it caches. `window` None is the paper's W = L/8; vanilla caches everything."""

    kind: DraftKind
    shape: Shape
    window: int | None = SERVED_WINDOW
    sink: int = SERVED_SINK

    def cached_positions(self, context: int) -> int:
        """Positions whose keys and values one draft pass reads, per sequence."""
        if self.kind == "vanilla":
            return context
        return min(context, self.sink + (context // 8 if self.window is None else self.window))

    @property
    def memory_flops(self) -> int:
        """FLOPs per sequence and pass beyond the forward: SPIRe projects one memory vector per layer."""
        return 2 * self.shape.hidden_size * self.shape.kv_values_per_position if self.kind == "spire" else 0

    @property
    def activations_per_token(self) -> int:
        """Target activations that the draft is sent for each committed token: one per layer and unit of width."""
        return self.shape.layers * self.shape.hidden_size if self.kind == "spire" else 0


def paper_draft(kind: DraftKind, target: Shape, window: int | None = SERVED_WINDOW, sink: int = SERVED_SINK) -> Draft:
    """The paper's draft for any target: an eighth of the body, the target itself, or its last quarter of layers."""
    if kind == "vanilla":
        return Draft(kind, LLAMA_3_8B if target == LLAMA_3_70B else _halved(target))
    layers = target.layers if kind == "magicdec" else max(1, round(target.layers / 4))
    return Draft(kind, replace(target, layers=layers), window, sink)


def _halved(target: Shape) -> Shape:
    """Half the layers, and half of every width: an eighth of the parameters."""
    return replace(
        target,
        layers=max(1, target.layers // 2),
        hidden_size=target.hidden_size // 2,
        intermediate_size=target.intermediate_size // 2,
        head_dim=target.head_dim // 2,
    )


SEQAX_67M = Shape(layers=8, hidden_size=512, intermediate_size=4096, heads=8, kv_heads=8, head_dim=128)
LLAMA_3_70B = Shape(80, 8192, 28672, heads=64, kv_heads=8, head_dim=128, vocab_size=128256)
LLAMA_3_8B = Shape(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128256)


# --- acceptance -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """`prefix[i]` is the share of rounds whose first i + 1 draft tokens are all accepted."""

    prefix: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(0 <= b <= a <= 1 for a, b in zip((1.0, *self.prefix), self.prefix, strict=False))
        if not self.prefix or not falling:
            raise InvalidRequest(f"prefix acceptance {self.prefix} must be shares between 1 and 0 that never rise")

    @classmethod
    def of_tau(cls, tau: float, k: int) -> Acceptance:
        """The geometric acceptance a, a², … whose τ at depth k is `tau`. Raises InvalidRequest where none has it."""
        if k < 1 or not 1 <= tau <= k + 1:
            raise InvalidRequest(f"τ is {tau} at k = {k}: it lies between 1 and k + 1, and k is at least 1")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < tau else (low, middle)
        return cls(tuple(high**i for i in range(1, k + 1)))

    def tau(self, k: int) -> float:
        """Mean tokens of a round at depth k. Beyond what is known each further token fares like the last one."""
        known = self.prefix[:k]
        before_last = self.prefix[-2] if len(self.prefix) > 1 else 1.0
        rate = self.prefix[-1] / before_last if before_last else 0.0
        return 1 + sum(known) + sum(self.prefix[-1] * rate**i for i in range(1, k - len(known) + 1))


# --- the paper's formula, and its extensions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Seconds of one round of a batch: k draft passes, one verification, and what travels in between."""

    draft: float
    verify: float
    wire: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.wire


def round_cost(
    target: Shape,
    draft: Draft,
    batch: float,
    context: int,
    k: int,
    tau: float,
    hardware: Hardware,
    wire: Cost | None = None,
) -> Round:
    """One round of `batch` sequences at `context`, draft and target sharing a device. k = 0 is a plain step.

    `wire` None is the one that was measured with the hardware; the paper's formula has none.
    """
    if wire is None:
        wire = hardware.measured.wire if hardware.measured else Cost()
    return Round(
        draft_seconds(draft, batch, context, k, hardware),
        verify_seconds(target, batch, context, k, hardware),
        wire_seconds(target, draft, batch, k, tau, hardware, wire),
    )


def multiplier(
    target: Shape, draft: Draft, batch: float, context: int, k: int, tau: float, hardware: Hardware
) -> float:
    """τ / Δt: throughput of speculation over that of plain decoding. Raises InvalidRequest for an empty batch."""
    if batch <= 0 or context <= 0 or k < 0:
        raise InvalidRequest(f"batch {batch}, context {context}, k {k}: batch and context are above 0, k at least 0")
    if k == 0:
        return 1.0
    plain = round_cost(target, draft, batch, context, 0, 1, hardware)
    return tau * plain.seconds / round_cost(target, draft, batch, context, k, tau, hardware).seconds


def verify_seconds(target: Shape, batch: float, context: int, k: int, hardware: Hardware) -> float:
    """A target forward over k + 1 tokens per sequence, and its sampling."""
    costs = hardware.measured.target if hardware.measured else None
    return _forward_seconds(target, batch, k + 1, context, hardware, costs)


def draft_seconds(draft: Draft, batch: float, context: int, k: int, hardware: Hardware) -> float:
    """k draft passes with their sampling."""
    measured, cached = hardware.measured, draft.cached_positions(context)
    if k == 0:
        return 0.0
    if measured is None or draft.kind != "spire":
        costs = measured.passes if measured else None
        return k * _forward_seconds(draft.shape, batch, 1, cached, hardware, costs, draft.memory_flops)
    # What was measured of a SPIRe draft's layer includes reading its memory, which never grows.
    one = _forward_seconds(draft.shape, batch, 1, 0, hardware, measured.draft, draft.memory_flops)
    return measured.draft_round.at(batch) + k * one


def _forward_seconds(
    shape: Shape,
    batch: float,
    tokens: int,
    cached: int,
    hardware: Hardware,
    costs: ModelCosts | None,
    more_flops: float = 0.0,
) -> float:
    rows, width = batch * tokens, hardware.bytes_per_value
    flops = 2 * shape.body_parameters * rows + more_flops * batch
    weight_bytes = shape.body_parameters * width
    kv_bytes = batch * cached * shape.kv_values_per_position * width
    if costs is None or hardware.measured is None:
        return max(flops / hardware.flops_per_second, (weight_bytes + kv_bytes) / hardware.bytes_per_second)
    # One operation runs after the other: each overlaps its own reads with its arithmetic, never those of the next.
    unembedding, speed = shape.vocab_size * shape.hidden_size, costs.flops_per_second(rows)
    products = max(flops / speed, weight_bytes / hardware.bytes_per_second)
    logits = max(2 * unembedding * rows / speed, unembedding * width / hardware.bytes_per_second)
    attention = kv_bytes * hardware.measured.kv_read.at(tokens)
    rest = shape.layers * costs.layer.at(rows) + costs.sampling.at(rows * shape.vocab_size)
    return products + logits + attention + rest


def wire_bytes(target: Shape, draft: Draft, batch: float, k: int, tau: float, bytes_per_value: float) -> float:
    """Bytes of a round: tokens and q from draft to gateway to verifier, tokens back, activations to the draft."""
    q_row = target.vocab_size * 2 if target.vocab_size <= _Q_TOP_M else _Q_TOP_M * (_TOKEN_BYTES + 4)
    drafted = k * (_TOKEN_BYTES + q_row)
    activations = draft.activations_per_token * bytes_per_value if k else 0.0
    return batch * (2 * drafted + tau * (_TOKEN_BYTES + activations))


def wire_seconds(
    target: Shape, draft: Draft, batch: float, k: int, tau: float, hardware: Hardware, wire: Cost
) -> float:
    """One round trip to the verifier, one more to the draft where there is speculation, and the bytes of both."""
    trips = 2 if k else 1
    return trips * wire.fixed + wire_bytes(target, draft, batch, k, tau, hardware.bytes_per_value) * wire.each


# --- where to switch speculation off ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The best depth of at least 1 and its multiplier. Where that does not exceed 1, `k` is 0: speculation is off."""

    depth: int
    multiplier: float

    @property
    def off(self) -> bool:
        return self.multiplier <= 1

    @property
    def k(self) -> int:
        return 0 if self.off else self.depth


def best_k(
    target: Shape,
    draft: Draft,
    batch: float,
    context: int,
    acceptance: Acceptance,
    hardware: Hardware,
    max_k: int = 8,
) -> Choice:
    """The speculation depth with the greatest multiplier for this batch and context."""
    choices = (
        Choice(k, multiplier(target, draft, batch, context, k, acceptance.tau(k), hardware))
        for k in range(1, max_k + 1)
    )
    return max(choices, key=lambda choice: choice.multiplier)


# --- section 4 and 5 of the paper -------------------------------------------------------------------------------------


def operational_intensity(target: Shape, batch: float, context: int, k: int, bytes_per_value: float = 1.0) -> float:
    """FLOPs per byte of verifying k tokens per sequence (Figure 3, which counts k and not k + 1)."""
    kv_bytes = batch * context * target.kv_values_per_position * bytes_per_value
    return 2 * target.body_parameters * k * batch / (target.body_parameters * bytes_per_value + kv_bytes)


def critical_context(target: Shape, k: int, hardware: Hardware) -> int:
    """L_crit: the longest context, a power of two, with a batch at which verification is compute-bound; 0 for none."""
    kv_bytes = target.kv_values_per_position * hardware.bytes_per_value
    # The intensity rises with the batch towards 2·N·k / (L · bytes of keys and values a position).
    longest = 2 * target.body_parameters * k / (kv_bytes * hardware.operational_intensity)
    return 2 ** (math.ceil(math.log2(longest)) - 1) if longest > 1 else 0


def critical_batch(target: Shape, context: int, k: int, hardware: Hardware) -> float | None:
    """B_crit: the batch from which verification is compute-bound at this context; None where it never is."""
    hoi, width = hardware.operational_intensity, hardware.bytes_per_value
    spare = 2 * target.body_parameters * k - hoi * context * target.kv_values_per_position * width
    return hoi * target.body_parameters * width / spare if spare > 0 else None


def units_saved(multiplier: float, training_units: float, decoding_units: float = 10.0) -> float:
    """Section 5: what speculation saves of the decoding budget, less the draft's training. The target's costs 1."""
    return decoding_units * (1 - 1 / multiplier) - training_units


def training_units(draft: Draft, target: Shape) -> float:
    """A draft's training over its target's, by body parameters; MagicDec needs none."""
    return 0.0 if draft.kind == "magicdec" else draft.shape.body_parameters / target.body_parameters


# --- the draft on a device of its own ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A round of one lane when the draft has its own device. `lanes` groups share the sequences in flight."""

    draft: float
    verify: float
    wire: float
    lanes: int

    @property
    def seconds(self) -> float:
        """Between two verifications: with two lanes one is drafted while the other is verified."""
        return max(self.draft + self.wire, self.verify) if self.lanes == 2 else self.draft + self.wire + self.verify


def split_cost(
    target: Shape,
    draft: Draft,
    batch: float,
    context: int,
    k: int,
    tau: float,
    hardware: Hardware,
    draft_hardware: Hardware,
    wire: Cost,
    lanes: int = 2,
) -> Split:
    """`batch` sequences in flight in 1 or 2 lanes. Raises InvalidRequest for MagicDec, which drafts with the target."""
    if draft.kind == "magicdec":
        raise InvalidRequest("MagicDec drafts with the target's own weights and cache: it has no device of its own")
    if lanes not in (1, 2):
        raise InvalidRequest(f"{lanes} lanes: two devices can be kept busy by 2, and 1 takes turns")
    lane = batch / lanes
    return Split(
        draft_seconds(draft, lane, context, k, draft_hardware),
        verify_seconds(target, lane, context, k, hardware),
        wire_seconds(target, draft, lane, k, tau, hardware, wire),
        lanes,
    )


def price_per_million_tokens(tokens_per_second: float, price_per_hour: float) -> float:
    """In the unit of `price_per_hour`, which is that of all devices together."""
    return price_per_hour / 3600 / tokens_per_second * 1e6
