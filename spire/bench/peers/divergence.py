"""How often two texts of one seed differ under the `invariant` rule, where only rounding can make them differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """Result of comparing `texts` pairs, each up to its first difference: `partings` differences in `tokens` tokens.

    `per_1000_ci95` is the half-width of the 95 % interval of `per_1000`, as for a Poisson count.
    """

    what: str
    texts: int
    tokens: int
    partings: int

    @property
    def per_1000(self) -> float:
        return 1000 * self.partings / self.tokens

    @property
    def per_1000_ci95(self) -> float:
        return 1000 * 1.96 * math.sqrt(max(1, self.partings)) / self.tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"per_1000_tokens": self.per_1000, "per_1000_ci95": self.per_1000_ci95}


def divergence(what: str, ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Divergence:
    """Compare texts, given as token ids, pair by pair. Both texts of a pair have the same length."""
    tokens = partings = 0
    for one, other in zip(ones, others, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        partings += same is not None
        tokens += len(one) if same is None else same + 1
    return Divergence(what, len(ones), tokens, partings)
