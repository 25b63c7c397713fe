"""Costs of the messages of a round between verifier, draft and gateway, by carrier.

A draft on the target's device is reached by `Hardware.carrier`; MagicDec drafts in the verifier. Pure arithmetic: no
torch, no files, no clock. Does not know: a copy between GPU and host.
"""

from __future__ import annotations

from dataclasses import dataclass

from spire.errors import InvalidRequest
from spire.perf.hardware import Carrier, Cost, Hardware
from spire.perf.shapes import DraftShape, Shape

# Assumed cost of a gRPC stream between two processes of one machine if not measured: see `spire.perf.loopback`.
STREAM = Cost(fixed=0.14e-3, each=1 / 1.7e9)

# Seconds per byte through a ring in shared memory: the time difference of two messages over their size difference
# (experiments/results/carrier.json, by experiments/carrier.py).
RING_BYTE = (1.050e-3 - 0.311e-3) / (14_417_920 - 55_296)

# A vocabulary of up to this many tokens, or of the draft's own, sends q whole in bfloat16; a larger one sends the top
# tokens with ids in fp32. Greedy requests send no q.
_Q_TOP_M = 4096
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Wire:
    """Seconds per round trip of a message, per byte of activations, and per byte of tokens and q (`guesses`)."""

    carrier: Carrier
    round_trip: float
    activations: float
    guesses: float


def wire_of(carrier: Carrier, hardware: Hardware) -> Wire:
    """Return the costs of a carrier. gRPC costs are those measured on `hardware` or, if not measured, STREAM.

    Raises InvalidRequest if `hardware.relative`: its costs are not in seconds.
    """
    if hardware.relative:
        raise InvalidRequest(f"{hardware.name} has no seconds that a wire's could be added to: name a device")
    stream = hardware.measured.wire if hardware.measured else STREAM
    if carrier == "grpc":
        return Wire(carrier, stream.fixed, stream.each, stream.each)
    # A copy within a GPU's memory reads and writes each byte.
    byte = 2 / hardware.bytes_per_second if carrier == "cuda_ipc" else RING_BYTE
    return Wire(carrier, stream.fixed, byte, byte)


def answer_bytes(batch: float, tau: float) -> float:
    """Return the bytes of a round's tokens from verifier to gateway."""
    return batch * tau * _TOKEN_BYTES


def guess_bytes(target: Shape, draft: DraftShape, batch: float, k: int) -> float:
    """Return the bytes of a round's draft tokens and q from draft to verifier; 0 for MagicDec."""
    if draft.kind == "magicdec":
        return 0.0
    tokens = draft.shape.vocab_size
    whole = tokens <= _Q_TOP_M or tokens < target.vocab_size
    q_row = tokens * 2 if whole else _Q_TOP_M * (_TOKEN_BYTES + 4)
    return batch * k * (_TOKEN_BYTES + q_row)


def activation_bytes(draft: DraftShape, batch: float, tau: float, bytes_per_value: float) -> float:
    """Return the bytes of activations sent to the draft for the tokens committed in a round."""
    return batch * tau * draft.activations_per_token * bytes_per_value


def wire_bytes(target: Shape, draft: DraftShape, batch: float, k: int, tau: float, bytes_per_value: float) -> float:
    """Return the bytes sent in a round of speculation: draft tokens, q, activations and committed tokens."""
    drafted = guess_bytes(target, draft, batch, k) + activation_bytes(draft, batch, tau, bytes_per_value)
    return drafted + answer_bytes(batch, tau)


def plain_wire_seconds(batch: float, wire: Wire) -> float:
    """Return the seconds of all transfers of a plain step: a round trip between gateway and verifier, and tokens."""
    return wire.round_trip + answer_bytes(batch, 1) * wire.guesses


def wire_seconds(
    target: Shape, draft: DraftShape, batch: float, k: int, tau: float, bytes_per_value: float, wire: Wire
) -> float:
    """Return the seconds of all transfers of a round: gateway-verifier and, except for MagicDec, verifier-draft."""
    rows = activation_bytes(draft, batch, tau, bytes_per_value) * wire.activations
    guesses = (guess_bytes(target, draft, batch, k) + answer_bytes(batch, tau)) * wire.guesses
    return (1 if draft.kind == "magicdec" else 2) * wire.round_trip + rows + guesses
