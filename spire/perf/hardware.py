"""A device as the performance model sees it: the paper's single number, a data sheet, or a measured machine.

`spire doctor --calibrate` measures a machine. Pure arithmetic: no torch, no files, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from spire.errors import InvalidRequest

# Transport of activations from verifier to draft: GPU memory, a ring in shared memory on one host, a gRPC stream.
Carrier = Literal["cuda_ipc", "shared_memory", "grpc"]


@dataclass(frozen=True)
class Cost:
    """Seconds that grow linearly with a count n: `fixed` + n · `each`."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, n: float) -> float:
        return self.fixed + n * self.each


@dataclass(frozen=True)
class Curve:
    """Measured (n, seconds) in ascending order of n, interpolated and extrapolated linearly from the nearest two."""

    points: tuple[tuple[float, float], ...]

    def at(self, n: float) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        stretches = list(pairwise(self.points))
        (x_0, y_0), (x_1, y_1) = next((stretch for stretch in stretches if n <= stretch[1][0]), stretches[-1])
        return max(0.0, y_0 + (n - x_0) * (y_1 - y_0) / (x_1 - x_0))


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a forward of one model, on the threads or the device on which the model is served."""

    # (rows, FLOP/s) of a layer's matrix products, in ascending order of rows.
    matmul: tuple[tuple[int, float], ...]
    # Seconds of a layer by rows, without its matrix products and, for a target, without reading the cache.
    layer: Cost
    # Seconds from logits to tokens, by the number of logits (rows · vocabulary).
    sampling: Cost
    # Bytes of a weight's value; None: as many as those of other values.
    bytes_per_weight: int | None = None

    def flops_per_second(self, rows: float) -> float:
        """Return the FLOP/s at `rows`: log-log interpolation between measured rows, constant outside."""
        below = max((point for point in self.matmul if point[0] <= rows), default=self.matmul[0])
        above = min((point for point in self.matmul if point[0] >= rows), default=self.matmul[-1])
        if below[0] == above[0]:
            return below[1]
        share = math.log(rows / below[0]) / math.log(above[0] / below[0])
        return below[1] * (above[1] / below[1]) ** share


@dataclass(frozen=True)
class Measured:
    """Costs beyond a roofline, measured by microbenchmarks for one machine and the widths of one target and draft."""

    target: ModelCosts
    # Costs of a SPIRe draft.
    draft: ModelCosts
    # Seconds of attention per byte of keys and values, by the number of new tokens.
    kv_read: Curve
    # Seconds per round of a SPIRe draft, by sequences, for absorbing activations and laying out its memory.
    draft_round: Cost
    # Seconds of a round trip on a stream, by bytes.
    wire: Cost
    # Replaces `target.layer` in the passes of a vanilla draft, if these run layer by layer while the target's forward
    # does not.
    pass_layer: Cost | None = None

    @property
    def vanilla(self) -> ModelCosts:
        """Costs of passes of a vanilla draft: the target's, with layer cost `pass_layer` if measured."""
        return self.target if self.pass_layer is None else replace(self.target, layer=self.pass_layer)


@dataclass(frozen=True)
class Hardware:
    """A device as the performance model sees it. If `relative`, only ratios of costs are known, not seconds.

    `memory_bytes` is None if unknown. `carrier` is the transport from a target to a draft on the same device.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    bytes_per_value: float = 1.0
    relative: bool = False
    measured: Measured | None = None
    memory_bytes: float | None = None
    carrier: Carrier = "shared_memory"

    @classmethod
    def of_intensity(cls, flops_per_byte: float = 600.0, bytes_per_value: float = 1.0) -> Hardware:
        """Return the paper's hardware: only its HOI is known, so only ratios of costs are meaningful."""
        return cls(f"HOI {flops_per_byte:g}", flops_per_byte, 1.0, bytes_per_value, relative=True)

    @property
    def operational_intensity(self) -> float:
        """The hardware operational intensity (HOI) in FLOPs per byte."""
        return self.flops_per_second / self.bytes_per_second

    def times(self, devices: int) -> Hardware:
        """Return `devices` such devices as one, with the sum of their speeds. Raises InvalidRequest if measured."""
        if devices == 1:
            return self
        if self.measured:
            raise InvalidRequest(f"{self.name} was measured as one device; {devices} of it were not")
        return replace(
            self,
            name=f"{devices} × {self.name}",
            flops_per_second=self.flops_per_second * devices,
            bytes_per_second=self.bytes_per_second * devices,
            memory_bytes=self.memory_bytes and self.memory_bytes * devices,
        )


class Sheet(NamedTuple):
    """Values of a GPU's data sheet. `flops`: dense peak FLOP/s (half of those "with sparsity") by bytes per value."""

    bytes_per_second: float
    memory_bytes: float
    flops: dict[int, float]


# From NVIDIA's data sheets. Two bytes are BF16, one byte is FP8, or INT8 on the A100, which has no FP8. A GB of memory
# counts as 10⁹ bytes: the memory that a card has beyond that is left for the runtime, which no data sheet covers.
GPUS = {
    "a100": Sheet(2.039e12, 80e9, {2: 312e12, 1: 624e12}),  # A100 80GB SXM
    "h100": Sheet(3.35e12, 80e9, {2: 989.5e12, 1: 1979e12}),  # H100 SXM
    "h200": Sheet(4.8e12, 141e9, {2: 989.5e12, 1: 1979e12}),  # H200 SXM
    "l4": Sheet(300e9, 24e9, {2: 121e12, 1: 242.5e12}),  # L4
}


def gpu(name: str, bytes_per_value: int = 2) -> Hardware:
    """Return a GPU with its data-sheet peaks. Raises InvalidRequest for an unknown name or `bytes_per_value`."""
    if name not in GPUS:
        raise InvalidRequest(f"hardware {name!r} is not known: choose one of {', '.join(GPUS)}")
    sheet = GPUS[name]
    if bytes_per_value not in sheet.flops:
        raise InvalidRequest(f"{name} with {bytes_per_value} bytes a value is not known: choose {sorted(sheet.flops)}")
    peaks = (sheet.flops[bytes_per_value], sheet.bytes_per_second)
    return Hardware(name, *peaks, bytes_per_value, memory_bytes=sheet.memory_bytes, carrier="cuda_ipc")
