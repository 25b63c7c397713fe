"""Predicts the speedup by speculation with the performance model, for the served models on a calibrated machine.

Model shapes come from the handshakes; batch, context, draft tokens k and tokens per round τ from the rounds. Nothing is
fitted to measured round times. Does not know: whether the calibration is of the machine that serves, and whether the
verifier and the draft share a host (the wire is counted as if they did).
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import structlog

from gateway.rounds.round_times import Load
from spire.perf import calibration
from spire.perf.perf_model import multiplier
from spire.perf.shape_messages import shape_from_wire
from spire.perf.shapes import DraftKind, DraftShape
from spire.v1 import verifier_pb2

log = structlog.get_logger("gateway")


class RoundModel:
    """Predicts the speedup by speculation (multiplier) for the machine that a calibration file describes.

    Raises SpireError, which says how to calibrate, if the file is no calibration.
    """

    def __init__(self, file: Path):
        self._measured = calibration.load(file)
        self._warned = False

    def multiplier(
        self, target: verifier_pb2.GetInfoResponse, draft: verifier_pb2.DraftInfo, load: Load, k: int, tau: float
    ) -> float | None:
        """Return the predicted speedup over plain decoding at depth k, or None if a model's shape is unknown."""
        if not (target.HasField("shape") and draft.HasField("shape")):
            return None
        shape = shape_from_wire(target.shape)
        if shape != self._measured.target and not self._warned:
            self._warned = True
            log.warning("calibrated with another target", calibrated=str(self._measured.target), served=str(shape))
        drafting = DraftShape(cast(DraftKind, draft.kind), shape_from_wire(draft.shape), draft.window, draft.sink)
        return multiplier(shape, drafting, load.sequences, max(1, round(load.context)), k, tau, self._measured.hardware)
