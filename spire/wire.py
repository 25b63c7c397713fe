"""How a round travels between verifier, draft and gateway, and what each way costs.

Three carriers: `cuda_ipc` on one GPU (activations stay in its memory), `shared_memory` on one host, `grpc` between
hosts. A draft on the target's device is reached by `Hardware.carrier`, MagicDec through the gateway. Pure arithmetic:
no torch, no files, no clock.

What it does not know: a copy between a GPU and the host, and the line of one host, by which a message takes less than
by the stream that is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spire.errors import InvalidRequest
from spire.hardware import Carrier, Cost, Hardware
from spire.shapes import Draft, Shape

# A gRPC stream between two processes of one machine, for want of a measurement: see `spire.rpc.loopback`.
STREAM = Cost(fixed=0.14e-3, each=1 / 1.7e9)

# Seconds a byte takes through a ring in shared memory: 14.4 MB of rows take 0.74 ms longer than 0.06 MB
# (experiments/results/carrier.json, by experiments/carrier.py).
RING_BYTE = (1.050e-3 - 0.311e-3) / (14_417_920 - 55_296)

# How q travels by default: up to this many tokens whole in bfloat16, of a larger vocabulary the top ones with ids and
# in fp32. Greedy requests send none.
_Q_TOP_M = 4096
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Wire:
    """Seconds of a message there and back, of a byte of activations, and of a byte of tokens and q."""

    carrier: Carrier
    round_trip: float
    activations: float
    guesses: float

    def with_stream(self, round_trip: float | None, byte: float | None) -> Wire:
        """As it is, but for what is known better, in seconds."""
        wire = self if round_trip is None else replace(self, round_trip=round_trip)
        return wire if byte is None else replace(wire, activations=byte, guesses=byte)


def near(draft: Draft, hardware: Hardware) -> Carrier:
    """How a draft on the target's device is reached. MagicDec's guesses go to the gateway and back by gRPC."""
    return "grpc" if draft.kind == "magicdec" else hardware.carrier


def wire_of(carrier: Carrier, hardware: Hardware) -> Wire:
    """The cost of a carrier. Messages take what was measured with the hardware, else STREAM.

    Raises InvalidRequest for hardware without seconds.
    """
    if hardware.relative:
        raise InvalidRequest(f"{hardware.name} has no seconds that a wire's could be added to: name a device")
    stream = hardware.measured.wire if hardware.measured else STREAM
    if carrier == "grpc":
        return Wire(carrier, stream.fixed, stream.each, stream.each)
    # A copy within a GPU's memory reads and writes each byte.
    rows = 2 / hardware.bytes_per_second if carrier == "cuda_ipc" else RING_BYTE
    return Wire(carrier, stream.fixed, rows, RING_BYTE)


def answer_bytes(batch: float, tau: float) -> float:
    """Tokens of a round, from verifier to gateway."""
    return batch * tau * _TOKEN_BYTES


def guess_bytes(target: Shape, draft: Draft, batch: float, k: int) -> float:
    """Drafted tokens of a round and their q, from draft to verifier; twice where they pass the gateway."""
    q_row = target.vocab_size * 2 if target.vocab_size <= _Q_TOP_M else _Q_TOP_M * (_TOKEN_BYTES + 4)
    return batch * k * (_TOKEN_BYTES + q_row) * (2 if draft.kind == "magicdec" else 1)


def activation_bytes(draft: Draft, batch: float, tau: float, bytes_per_value: float) -> float:
    """Bytes of activations that a draft is sent for the tokens that a round has committed."""
    return batch * tau * draft.activations_per_token * bytes_per_value


def wire_bytes(target: Shape, draft: Draft, batch: float, k: int, tau: float, bytes_per_value: float) -> float:
    """All of a round of speculation."""
    drafted = guess_bytes(target, draft, batch, k) + activation_bytes(draft, batch, tau, bytes_per_value)
    return drafted + answer_bytes(batch, tau)


def plain_wire_seconds(batch: float, wire: Wire) -> float:
    """One round trip from gateway to verifier, and the tokens."""
    return wire.round_trip + answer_bytes(batch, 1) * wire.guesses


def wire_seconds(
    target: Shape, draft: Draft, batch: float, k: int, tau: float, bytes_per_value: float, wire: Wire
) -> float:
    """A round trip from gateway to verifier and one from verifier to draft, with the bytes of both."""
    rows = activation_bytes(draft, batch, tau, bytes_per_value) * wire.activations
    guesses = (guess_bytes(target, draft, batch, k) + answer_bytes(batch, tau)) * wire.guesses
    return 2 * wire.round_trip + rows + guesses
