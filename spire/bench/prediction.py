"""Predictions of the performance model for a target and draft on a calibrated machine. Costs are not fitted to a run.

Acceptance comes from the record kept with the draft (`spire eval acceptance`) or, without one, from the τ of the run;
`tau_modelled_from` names the source. Costs come from microbenchmarks (`spire doctor --calibrate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spire.bench.acceptance import RECORD, read_record
from spire.model.config import load_draft_config, load_model_config
from spire.perf.hardware import Hardware
from spire.perf.perf_model import AcceptanceModel, best_k, multiplier
from spire.perf.shapes import DraftKind, DraftShape, Shape, trained_draft

# The greatest k of any service.
_POSITIONS = 16


@dataclass(frozen=True)
class PairModel:
    """A target and its draft on `hardware`; with `draft` None the target drafts for itself (MagicDec)."""

    target: Path
    draft: Path | None
    hardware: Hardware
    # Acceptance probability of every draft token; set only for artificial acceptance.
    accept_rate: float | None = None
    temperature: float = 1.0

    def predict(self, batch: int, context: int, k: int | None, tau: float | None) -> dict[str, Any]:
        """Return the modelled speed-up and relative round time Δt at depth k or, if k is None, at the best modelled k.

        `context` is the mean context of a run, `tau` its measured τ. `multiplier_modelled` is None if τ is unknown.
        """
        known = None
        if self.draft and self.accept_rate is None:
            known = recorded_acceptance(self.draft, context, self.temperature)
        if self.accept_rate is not None:
            known = AcceptanceModel(tuple(self.accept_rate**position for position in range(1, _POSITIONS + 1)))
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
        source = "the accept rate" if self.accept_rate is not None else "record" if known else "this run"
        return told | {"tau_modelled_from": source}


def recorded_acceptance(draft: Path, context: int, temperature: float = 1.0) -> AcceptanceModel | None:
    """Return the acceptance recorded with a draft at the nearest temperature and, of these records, at the nearest
    context; None without a record. Raises DataError."""
    if not (file := draft / RECORD).is_file():
        return None
    nearest = min(
        read_record(file),
        key=lambda cell: (abs(cell.temperature - temperature), abs(math.log(cell.context / context))),
    )
    return AcceptanceModel(tuple(nearest.prefix_acceptance))


def served_draft(directory: Path) -> DraftShape:
    """Return the shape and cache sizes with which the draft in `directory` is served."""
    config = load_draft_config(directory)
    # A draft without the target's activations caches its whole past, even if it attends to a window only.
    kind: DraftKind = "spire" if config.tapped_layers else "vanilla"
    shape = Shape.of(load_model_config(directory), config.vocabulary)
    return DraftShape(kind, shape, config.window, config.sink)
