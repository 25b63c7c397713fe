"""Part 2: attention of an 8B shape's layer over pages, beside the time of reading keys and values once."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.machine_rates import copy_rate
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.model.layers import additive, attend
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import Shape

_BATCHES, _CONTEXTS, _TOKENS = (32, 8, 64), (8192, 4096, 1024), (1, 5, 9, 17)
# As much as no cache holds is read before a layer comes again.
_BEYOND_ANY_CACHE = 2**29
_AT_ONCE = 8
_SPLITS, _WARPS = (256, 512, 1024), (4, 8)


@torch.inference_mode()
def measure(setting: Setting, findings: Findings) -> None:
    """Without a GPU there is nothing that runs these kernels in any time: their tests interpret them."""
    if setting.tiny:
        findings.add(Finding("attention over pages", None, note="no GPU"))
        return
    rate, shape = copy_rate(setting), shape_of(setting)
    for batch in _BATCHES:
        for context in _CONTEXTS:
            cell = Layers(setting, shape, batch, context)
            with findings.attempt(f"{batch} × {context:,}"):
                for tokens in _TOKENS:
                    findings.add(cell.found(tokens, rate))
            if (batch, context) == (_BATCHES[0], _CONTEXTS[0]):
                with findings.attempt("tuning"):
                    for tokens in _TOKENS:
                        findings.add(cell.tuned(tokens, rate))


class Layers:
    """Keys and values of `batch` sequences of `context` positions, of as many layers as no cache holds."""

    def __init__(self, setting: Setting, shape: Shape, batch: int, context: int):
        from spire.model.attention import paged_attention

        self.kernels, self.shape, self.batch, self.context = paged_attention, shape, batch, context
        self.bench = Bench(setting.device, torch.bfloat16, setting.least_seconds / 3)
        self.bytes = 2 * 2 * batch * context * shape.kv_heads * shape.head_dim
        of_each = context // self.kernels.PAGE
        places = batch * of_each, shape.kv_heads, self.kernels.PAGE, shape.head_dim
        layers = max(2, _BEYOND_ANY_CACHE // self.bytes)
        self.layers = [(self.bench.randn(*places), self.bench.randn(*places)) for _ in range(layers)]
        # As they lie after a while: in no order.
        self.table_BP = torch.randperm(batch * of_each, device=setting.device).int().view(batch, of_each)

    def found(self, tokens: int, rate: float) -> Finding:
        queries, asked = self._asked(tokens)
        seconds = self._seconds(queries, asked, self.kernels.FASTEST)
        floor = self.bytes / rate
        error = self._error(queries, asked)
        more = {"floor_ms": 1000 * floor, "error": error}
        note = f"{floor / seconds:.0%} of the copy rate; relative error {error:.1e}"
        return Finding(
            f"{self.batch} × {self.context:,}, {tokens} queries", 1000 * seconds, "ms", 1000 * floor, note, more
        )

    def tuned(self, tokens: int, rate: float) -> Finding:
        """The best of all tunings."""
        queries, asked = self._asked(tokens)
        times = {
            f"{split} positions, {warps} warps": 1000 * self._seconds(queries, asked, self.kernels.Tuning(split, warps))
            for split in _SPLITS
            for warps in _WARPS
        }
        best = min(times, key=times.__getitem__)
        return Finding(f"{tokens} queries, best tuning", times[best], "ms", 1000 * self.bytes / rate, best, times)

    def _asked(self, tokens: int) -> tuple[Tensor, tuple[Any, ...]]:
        queries = self.bench.randn(self.batch, self.shape.heads, tokens, self.shape.head_dim)
        lengths_B = torch.full((self.batch,), self.context - tokens, dtype=torch.int32, device=queries.device)
        return queries, (self.table_BP, lengths_B)

    def _seconds(self, queries: Tensor, asked: tuple[Any, ...], tuning: Any) -> float:
        """Time one layer. Several run one behind the other, so that launches are hidden."""
        layers = cycle(self.layers)

        def attend_all() -> None:
            for _ in range(_AT_ONCE):
                self.kernels.attend(queries, *next(layers), *asked, tuning)

        return self.bench.seconds(attend_all) / _AT_ONCE

    def _error(self, queries: Tensor, asked: tuple[Any, ...]) -> float:
        """Return the error of the first sequence, relative to float64."""
        found = self.kernels.attend(queries, *self.layers[0], *asked)[:1].double()
        tokens = queries.shape[2]
        length = self.context - tokens
        in_order = (pages[self.table_BP[:1].long()].transpose(1, 2).flatten(2, 3) for pages in self.layers[0])
        keys, values = (of_all[:, :, : length + tokens].double() for of_all in in_order)
        columns = torch.arange(length + tokens, device=queries.device)
        visible_1TS = columns <= length + torch.arange(tokens, device=queries.device)[None, :, None]
        right = attend(queries[:1].double(), keys, values, additive(visible_1TS, torch.float64))
        return float((found - right).norm() / right.norm())
