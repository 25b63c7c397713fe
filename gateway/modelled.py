"""What the performance model says of the rounds that are run: on a machine that was calibrated, for the models served.

Shapes are the handshakes', batch, context, k and τ those of the rounds; nothing is fitted to how long the rounds took.
What it does not know: whether the calibration is of the machine that serves, and whether verifier and draft share a
host: the wire that is counted is one host's.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import structlog

from gateway.depth import Load
from spire import calibration
from spire.hardware import Hardware
from spire.perf_model import multiplier
from spire.rpc.shapes import shape_from_wire
from spire.shapes import Draft, DraftKind, Shape
from spire.v1 import draft_pb2, verifier_pb2

log = structlog.get_logger("gateway")


class RoundModel:
    """`widths` are those of the target that the machine was calibrated with."""

    def __init__(self, hardware: Hardware, widths: Shape):
        self._hardware, self._widths = hardware, widths
        self._warned = False

    @classmethod
    def of(cls, file: Path) -> RoundModel:
        """Raises SpireError, saying how to measure, for a file that is no calibration."""
        found = calibration.load(file)
        return cls(found.hardware, found.target)

    def multiplier(
        self,
        target: verifier_pb2.GetInfoResponse,
        draft: draft_pb2.DraftGetInfoResponse,
        load: Load,
        k: int,
        tau: float,
    ) -> float | None:
        """Of k draft tokens under this load; None where a service does not tell its model's shape."""
        if not (target.HasField("shape") and draft.HasField("shape")):
            return None
        shape = shape_from_wire(target.shape)
        self._warn_of_other_widths(shape)
        guessing = Draft(cast(DraftKind, draft.kind), shape_from_wire(draft.shape), draft.window, draft.sink)
        return multiplier(shape, guessing, load.sequences, max(1, round(load.context)), k, tau, self._hardware)

    def _warn_of_other_widths(self, shape: Shape) -> None:
        if shape != self._widths and not self._warned:
            self._warned = True
            log.warning("calibrated with another target", calibrated=str(self._widths), served=str(shape))
