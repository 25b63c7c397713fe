"""The parts: what each measures, how long it ought to take, when it is ended.

Numbers are those of the table in docs/gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """`module` of this package measures it, expected to take `estimate` seconds and ended after `limit`."""

    number: int
    module: str
    what: str
    estimate: int
    limit: int


PARTS = (
    Part(0, "machine_rates", "copy rate, products by rows, C compiler, CUDA IPC", 15, 90),
    Part(1, "greedy_equality", "greedy text, k = 0 against k = 4", 60, 120),
    Part(2, "attention_rates", "attention of an 8B shape's layer", 30, 120),
    Part(3, "step_time", "whole step of an 8B shape", 25, 180),
    Part(4, "verdict", "verdict on the blocks of a step, 8B vocabulary", 15, 90),
    Part(5, "draft_round", "a draft's round for an 8B shape", 15, 90),
    Part(6, "through_rest", "8B shape through REST, synthetic acceptance", 125, 240),
    Part(7, "bundled_pair", "bundled pair: τ on the GPU and on the CPU", 65, 120),
    Part(8, "peer", "transformers with paged continuous batching, same shape and batch", 90, 150),
    Part(9, "gpu_tests", "tests that need a GPU", 100, 180),
    Part(10, "automatic_k", "automatic k against plain decoding through REST", 170, 400),
)


def parts_named(text: str) -> list[Part]:
    """`0,1,6` as parts, all for an empty text. Raises ValueError naming the first that is none."""
    known = {str(part.number): part for part in PARTS}
    names = [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no part {unknown[0]!r}, only {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
