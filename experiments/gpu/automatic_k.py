"""Part 10: tokens a second through REST with automatic k over those of plain decoding, from small loads to large ones.

As in part 6, weights are random and acceptance is made up. A run that is ended goes on in the next: `--resume`.
"""

from __future__ import annotations

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from experiments.gpu.through_rest import Cell, synthetic

# Sequences and positions of each.
_SHAPES = tuple((batch, context) for context in (512, 2048, 8000) for batch in (1, 8, 32))
_TINY_SHAPES = ((1, 24), (2, 24))
_GENERATE, _TINY_GENERATE = 512, 24


def measure(setting: Setting, findings: Findings) -> None:
    generate = _TINY_GENERATE if setting.tiny else _GENERATE
    chosen = _TINY_SHAPES if setting.tiny else _SHAPES
    shapes = {f"{batch} × {context:,}, automatic k": (batch, context) for batch, context in chosen}
    left = {what: shape for what, shape in shapes.items() if not findings.known(what)}
    if not left:
        return
    with synthetic(setting, findings, [Cell(*shape, generate, 0) for shape in shapes.values()]) as run:
        for what, shape in left.items():
            with findings.attempt(what):
                plain, automatic = (run(Cell(*shape, generate, k)).decode_tokens_per_second for k in (0, None))
                if plain is None or automatic is None:
                    raise RuntimeError("the first request ended before the last one began")
                note = f"of plain decoding, {plain:,.0f} tokens/s; {automatic:,.0f} with automatic k"
                findings.add(Finding(what, automatic / plain, "×", 1, note))
