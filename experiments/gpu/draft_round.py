"""Part 5: a draft's round for an 8B shape, and taking up what was verified. Weights are random, in bfloat16 and fp8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from draft_service.drafter import Drafter, Span, Verified
from experiments.gpu.expectation import draft_seconds
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.launches import in_words, launches
from experiments.gpu.machine_rates import copy_rate
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.bench.synthetic import config_of
from spire.checkpoints.random_weights import draw_weights
from spire.decoding.drafting import DraftItem
from spire.model.backends.placed import draft_backend_for
from spire.model.config import DraftConfig
from spire.model.draft import Draft, last_layers
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import trained_draft
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import Sampling

_BATCHES, _TINY_BATCHES = (32, 1), (2,)
_DEPTH, _VERIFIED, _CONTEXT, _TOP_M = 4, 3, 1024, 4096


@torch.inference_mode()
def measure(setting: Setting, findings: Findings) -> None:
    rate, shape = copy_rate(setting), shape_of(setting)
    expected = draft_seconds(trained_draft("spire", shape).shape, _DEPTH, rate)
    for name in ("bfloat16",) if setting.tiny else ("bfloat16", "fp8"):
        with findings.attempt(name):
            fp8 = name == "fp8"
            backend = draft_backend_for(setting.device, torch.bfloat16, "fp8" if fp8 else "none")
            draft = backend.pack(_draft(setting))
            for batch in _TINY_BATCHES if setting.tiny else _BATCHES:
                drafter = Drafter(draft, batch, _TOP_M, _CONTEXT, backend)
                _fill(drafter, batch)
                what = f"a draft's round, {batch} sequences, k = {_DEPTH}, {name}"
                findings.add(_found(setting, what, partial(_round, drafter, batch), expected / 2 if fp8 else expected))
                what = f"taking up {_VERIFIED} positions of each of {batch}, {name}"
                findings.add(_found(setting, what, partial(_take_up, drafter, batch)))


def _draft(setting: Setting) -> Draft:
    shape = shape_of(setting)
    rule, config = trained_draft("spire", shape), config_of(shape, _CONTEXT + 2 * _DEPTH)
    tapped = last_layers(config, rule.shape.layers)
    spire = DraftConfig(target_fingerprint="", tapped_layers=tapped, window=rule.window or 0, sink=rule.sink)
    of_draft = config.model_copy(update={"num_hidden_layers": len(tapped)})
    return draw_weights(lambda: Draft(of_draft, spire), torch.bfloat16, setting.device)


def _found(setting: Setting, what: str, work: Callable[[], object], expected: float | None = None) -> Finding:
    milliseconds = 1000 * Bench(setting.device, torch.bfloat16, setting.least_seconds).seconds(work)
    counted = launches(work, setting.device)
    return Finding(what, milliseconds, "ms", expected and 1000 * expected, in_words(counted), counted)


def _fill(drafter: Drafter, batch: int) -> None:
    for row in range(batch):
        drafter.absorb(_verified(drafter, [Span(str(row), 0, _CONTEXT, reset=True)]))


def _take_up(drafter: Drafter, batch: int) -> None:
    drafter.absorb(_verified(drafter, [Span(str(row), _CONTEXT, _VERIFIED, reset=False) for row in range(batch)]))
    for row in range(batch):
        drafter.absorbed[str(row)] = _CONTEXT


def _verified(drafter: Drafter, spans: list[Span]) -> Verified:
    config, tapped = drafter.draft.config, drafter.draft.draft.tapped_layers
    rows = sum(span.count for span in spans), len(tapped), config.hidden_size
    return Verified(spans, torch.randn(rows, dtype=drafter.dtype, device=drafter.device), [])


def _round(drafter: Drafter, batch: int) -> None:
    rows = from_protos([Sampling(temperature=1, top_p=1)] * batch, drafter.device)
    drafter.propose([DraftItem(str(row), _CONTEXT, row) for row in range(batch)], _DEPTH, rows)
