"""The performance model (paper sections 2 and 5): predicts where speculation gains or loses, before anything runs.

    multiplier = τ / Δt,   Δt = (k · draft pass + verification) / plain step
    cost of a forward = max(FLOPs, bytes read · HOI),   HOI = FLOP/s over bytes/s of the hardware

`paper_multiplier` is the paper's formula; `multiplier` adds every known cost, none of which is fitted to a whole run.
Pure arithmetic: no torch, no files, no clock. `spire perf-model` runs the model.

Does not know: prefill, queues, the gateway's own work, and whether weights and caches fit (see `memory_need`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spire.errors import InvalidRequest
from spire.perf.hardware import Hardware, ModelCosts
from spire.perf.shapes import DraftKind, DraftShape, Shape
from spire.perf.wire import Wire, plain_wire_seconds, wire_of, wire_seconds

# The paper's evaluation: section 4, Table 1 at context 512.
PAPER_K = 4
PAPER_TAU: dict[DraftKind, float] = {"vanilla": 2.647, "magicdec": 3.891, "spire": 3.401}


@dataclass(frozen=True)
class AcceptanceModel:
    """Acceptance of a draft: `prefix[i]` is the share of rounds whose first i + 1 draft tokens are all accepted."""

    prefix: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(0 <= b <= a <= 1 for a, b in zip((1.0, *self.prefix), self.prefix, strict=False))
        if not self.prefix or not falling:
            raise InvalidRequest(f"prefix acceptance {self.prefix} must be shares between 1 and 0 that never rise")

    @classmethod
    def of_tau(cls, tau: float, k: int) -> AcceptanceModel:
        """Return the acceptance a, a², … that yields τ = `tau` at depth k. Raises InvalidRequest if none exists."""
        if k < 1 or not 1 <= tau <= k + 1:
            raise InvalidRequest(f"τ is {tau} at k = {k}: it lies between 1 and k + 1, and k is at least 1")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < tau else (low, middle)
        return cls(tuple(high**i for i in range(1, k + 1)))

    def tau(self, k: int) -> float:
        """Return τ, the mean tokens per round, at depth k. Beyond `prefix`, its last conditional acceptance is used."""
        known = self.prefix[:k]
        before_last = self.prefix[-2] if len(self.prefix) > 1 else 1.0
        rate = self.prefix[-1] / before_last if before_last else 0.0
        return 1 + sum(known) + sum(self.prefix[-1] * rate**i for i in range(1, k - len(known) + 1))


def paper_multiplier(
    target: Shape, draft: DraftShape, batch: float, context: int, k: int, tau: float, hardware: Hardware
) -> float:
    """Return the speedup τ / Δt by the paper's formula, where Δt counts only the layers' time at the device's peak.

    Raises InvalidRequest for an empty batch.
    """
    _check(batch, context, k)
    if k == 0:
        return 1.0
    plain, verify = (_roofline(target, batch, tokens, context, hardware) for tokens in (1, k + 1))
    one = _roofline(draft.shape, batch, 1, draft.cached_positions(context), hardware, draft.memory_flops)
    return tau * plain / (k * one + verify)


def _roofline(
    shape: Shape, batch: float, tokens: int, cached: int, hardware: Hardware, more_flops: float = 0.0
) -> float:
    flops = (2 * shape.body_parameters * tokens + more_flops) * batch
    values = shape.body_parameters + batch * cached * shape.kv_values_per_position
    return max(flops / hardware.flops_per_second, values * hardware.bytes_per_value / hardware.bytes_per_second)


def _check(batch: float, context: int, k: int) -> None:
    if batch <= 0 or context <= 0 or k < 0:
        raise InvalidRequest(f"batch {batch}, context {context}, k {k}: batch and context are above 0, k at least 0")


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one round of a batch: k draft passes, one verification, and the transfers in between.

    With a draft on its own device the batch is one of `lanes` groups that share the sequences in flight.
    """

    draft: float
    verify: float
    wire: float
    lanes: int = 1

    @property
    def seconds(self) -> float:
        """Seconds between two verifications; with two lanes, one lane is drafted while the other is verified."""
        return max(self.draft + self.wire, self.verify) if self.lanes == 2 else self.draft + self.verify + self.wire


def plain_cost(target: Shape, batch: float, context: int, hardware: Hardware) -> RoundCost:
    """Return the cost of a step without speculation. Raises InvalidRequest if `hardware.relative` (has no seconds)."""
    wire = wire_of(hardware.carrier, hardware)
    return RoundCost(0.0, verify_seconds(target, batch, context, 0, hardware), plain_wire_seconds(batch, wire))


def round_cost(
    target: Shape, draft: DraftShape, batch: float, context: int, k: int, tau: float, hardware: Hardware
) -> RoundCost:
    """Return the cost of a round with draft and target on one device. Raises InvalidRequest if `hardware.relative`."""
    wire = wire_of(hardware.carrier, hardware)
    return RoundCost(
        draft_seconds(draft, batch, context, k, hardware),
        verify_seconds(target, batch, context, k, hardware),
        wire_seconds(target, draft, batch, k, tau, hardware.bytes_per_value, wire),
    )


def multiplier(
    target: Shape, draft: DraftShape, batch: float, context: int, k: int, tau: float, hardware: Hardware
) -> float:
    """Return τ / Δt with all known costs: throughput of speculation relative to plain decoding, on one device.

    Besides the layers, costs are unembedding and wire and, on a measured machine, sampling and launches. Raises
    InvalidRequest for an empty batch, and if `hardware.relative`: then only `paper_multiplier` can be computed.
    """
    _check(batch, context, k)
    plain = plain_cost(target, batch, context, hardware)
    if k == 0:
        return 1.0
    return tau * plain.seconds / round_cost(target, draft, batch, context, k, tau, hardware).seconds


def verify_seconds(target: Shape, batch: float, context: int, k: int, hardware: Hardware) -> float:
    """Return the seconds of a target forward over k + 1 tokens per sequence, sampling included if measured."""
    costs = hardware.measured.target if hardware.measured else None
    return _forward_seconds(target, batch, k + 1, context, hardware, costs, 0)


def draft_seconds(draft: DraftShape, batch: float, context: int, k: int, hardware: Hardware) -> float:
    """Return the seconds of k draft passes, sampling included if measured.

    A pass of MagicDec is a plain step of the target over sink and window.
    """
    measured, cached = hardware.measured, draft.cached_positions(context)
    if draft.kind == "magicdec":
        return k * verify_seconds(draft.shape, batch, cached, 0, hardware)
    if measured is None or draft.kind == "vanilla":
        costs = measured.vanilla if measured else None
        return k * _forward_seconds(draft.shape, batch, 1, cached, hardware, costs, draft.memory_flops)
    # The measured cost of a SPIRe draft's layer includes reading its memory, whose size is constant.
    one = _forward_seconds(draft.shape, batch, 1, 0, hardware, measured.draft, draft.memory_flops)
    return measured.draft_round.at(batch) + k * one


def _forward_seconds(
    shape: Shape, batch: float, tokens: int, cached: int, hardware: Hardware, costs: ModelCosts | None, more_flops: int
) -> float:
    """Return the seconds of a forward: the sum over operations, each of which overlaps only its own reads and FLOPs."""
    rows, width = batch * tokens, hardware.bytes_per_value
    flops, unembedding = 2 * shape.body_parameters * rows + more_flops * batch, shape.vocab_size * shape.hidden_size
    speed = costs.flops_per_second(rows) if costs else hardware.flops_per_second
    of_weight = costs.bytes_per_weight if costs and costs.bytes_per_weight else width
    products = max(flops / speed, shape.body_parameters * of_weight / hardware.bytes_per_second)
    logits = max(2 * unembedding * rows / speed, unembedding * of_weight / hardware.bytes_per_second)
    kv_bytes = batch * cached * shape.kv_values_per_position * width
    if costs is None or hardware.measured is None:
        return products + logits + kv_bytes / hardware.bytes_per_second
    attention = kv_bytes * hardware.measured.kv_read.at(tokens)
    rest = shape.layers * costs.layer.at(rows) + costs.sampling.at(rows * shape.vocab_size)
    return products + logits + attention + rest


@dataclass(frozen=True)
class BestDepth:
    """The best speculation depth, at least 1, and its multiplier. `k` is 0 (speculation off) if `multiplier` <= 1."""

    depth: int
    multiplier: float

    @property
    def k(self) -> int:
        return 0 if self.multiplier <= 1 else self.depth


def best_k(
    target: Shape,
    draft: DraftShape,
    batch: float,
    context: int,
    acceptance: AcceptanceModel,
    hardware: Hardware,
    max_k: int = 8,
) -> BestDepth:
    """Return the depth from 1 to `max_k` with the greatest multiplier (`paper_multiplier` if `hardware.relative`)."""
    gain = paper_multiplier if hardware.relative else multiplier
    choices = (
        BestDepth(k, gain(target, draft, batch, context, k, acceptance.tau(k), hardware)) for k in range(1, max_k + 1)
    )
    return max(choices, key=lambda choice: choice.multiplier)


def operational_intensity(target: Shape, batch: float, context: int, k: int, bytes_per_value: float = 1.0) -> float:
    """Return the FLOPs per byte of verifying k tokens per sequence (Figure 3, which counts k and not k + 1)."""
    kv_bytes = batch * context * target.kv_values_per_position * bytes_per_value
    return 2 * target.body_parameters * k * batch / (target.body_parameters * bytes_per_value + kv_bytes)


def critical_context(target: Shape, k: int, hardware: Hardware) -> int:
    """Return L_crit: the longest power-of-two context at which some batch makes verification compute-bound, or 0."""
    kv_bytes = target.kv_values_per_position * hardware.bytes_per_value
    # The intensity rises with the batch towards 2·N·k / (L · bytes of keys and values per position).
    longest = 2 * target.body_parameters * k / (kv_bytes * hardware.operational_intensity)
    return 2 ** (math.ceil(math.log2(longest)) - 1) if longest > 1 else 0


def critical_batch(target: Shape, context: int, k: int, hardware: Hardware) -> float | None:
    """Return B_crit: the batch from which verification is compute-bound at this context; None if there is none."""
    hoi, width = hardware.operational_intensity, hardware.bytes_per_value
    spare = 2 * target.body_parameters * k - hoi * context * target.kv_values_per_position * width
    return hoi * target.body_parameters * width / spare if spare > 0 else None


def units_saved(multiplier: float, training_units: float, decoding_units: float = 10.0) -> float:
    """Return the decoding cost saved, less the draft's training cost, in units of the target's training (section 5)."""
    return decoding_units * (1 - 1 / multiplier) - training_units


def training_units(draft: DraftShape, target: Shape) -> float:
    """Return the training cost of a draft relative to its target's, by body parameters; 0 for MagicDec."""
    return 0.0 if draft.kind == "magicdec" else draft.shape.body_parameters / target.body_parameters


def split_cost(
    target: Shape,
    draft: DraftShape,
    batch: float,
    context: int,
    k: int,
    tau: float,
    hardware: Hardware,
    draft_hardware: Hardware,
    wire: Wire,
    lanes: int = 2,
) -> RoundCost:
    """Return a round's cost for one of `lanes` groups, draft on its own device. Raises InvalidRequest for MagicDec."""
    if draft.kind == "magicdec":
        raise InvalidRequest("MagicDec drafts with the target's own weights and cache: it has no device of its own")
    if lanes not in (1, 2):
        raise InvalidRequest(f"{lanes} lanes: two devices can be kept busy by 2, and 1 takes turns")
    lane = batch / lanes
    return RoundCost(
        draft_seconds(draft, lane, context, k, draft_hardware),
        verify_seconds(target, lane, context, k, hardware),
        wire_seconds(target, draft, lane, k, tau, hardware.bytes_per_value, wire),
        lanes,
    )


def price_per_million_tokens(tokens_per_second: float, price_per_hour: float) -> float:
    """Return the price per million tokens, in the unit of `price_per_hour`, the price of all devices together."""
    return price_per_hour / 3600 / tokens_per_second * 1e6
