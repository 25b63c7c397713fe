"""What the performance model says of a pair on a calibrated machine. Nothing is fitted to a run.

Acceptance is the record kept with the draft (`spire eval acceptance`); of a draft without one the τ of the run itself,
and `tau_modelled_from` says which. Costs are microbenchmarks' (`spire doctor --calibrate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spire.bench.acceptance import RECORD, read_record
from spire.hardware import Hardware
from spire.model.config import load_draft_config, load_model_config
from spire.perf_model import Acceptance, best_k, multiplier
from spire.shapes import Draft, DraftKind, Shape, trained_draft

# As deep as any service speculates.
_POSITIONS = 16


@dataclass(frozen=True)
class Model:
    """A target with a draft of its own, or one that drafts for itself where `draft` is None, on `hardware`."""

    target: Path
    draft: Path | None
    hardware: Hardware
    # Of every draft token, where that is made up.
    accept_rate: float | None = None

    def predict(self, batch: int, context: int, k: int | None, tau: float | None) -> dict[str, Any]:
        """`multiplier_modelled` of k draft tokens, of the model's own best k for None; with the τ that it took.

        `context` is the mean of a run's positions, `tau` what the run gave.
        """
        known = self._known(context)
        if known is None and (k is None or tau is None):
            return {"multiplier_modelled": None}
        shape = Shape.of(load_model_config(self.target))
        draft = served_draft(self.draft) if self.draft else trained_draft("magicdec", shape)
        if k is None:
            assert known is not None
            choice = best_k(shape, draft, batch, context, known, self.hardware)
            modelled, k = max(1.0, choice.multiplier), choice.k
            tau = known.tau(k)
        else:
            tau = known.tau(k) if known else tau or 1.0
            modelled = multiplier(shape, draft, batch, context, k, tau, self.hardware)
        told = {"multiplier_modelled": modelled, "k_modelled": k, "delta_t_modelled": tau / modelled}
        return told | {"tau_modelled_from": self._source(known)}

    def _source(self, known: Acceptance | None) -> str:
        if self.accept_rate is not None:
            return "the accept rate"
        return "record" if known else "this run"

    def _known(self, context: int) -> Acceptance | None:
        """What is made up, or was measured of the draft before at the nearest context."""
        if self.accept_rate is not None:
            return Acceptance(tuple(self.accept_rate**position for position in range(1, _POSITIONS + 1)))
        if self.draft is None or not (file := self.draft / RECORD).is_file():
            return None
        nearest = min(read_record(file), key=lambda cell: abs(math.log(cell.context / context)))
        return Acceptance(tuple(nearest.prefix_acceptance))


def served_draft(directory: Path) -> Draft:
    """The costs of the draft in this directory, as it is served."""
    config = load_draft_config(directory)
    # A draft without the target's activations keeps its whole past, whatever part of it is attended.
    kind: DraftKind = "spire" if config.tapped_layers else "vanilla"
    return Draft(kind, Shape.of(load_model_config(directory)), config.window, config.sink)
