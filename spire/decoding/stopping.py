"""When a draft should stop: with which probability a block must stand for one more draft token to be worth its time.

Does not know: what a token costs, and how probable it is that a block stands.
"""

from __future__ import annotations

import math


def standing_for(gain: float, rate: float, by_block: bool) -> float:
    """Return the probability s that a block must stand with for one more draft token to bring `gain` tokens.

    `rate`: the share of draft tokens that are accepted if all before them are. By the rejection rule a token brings
    s · rate. By the block rule (`by_block`) it brings the sum of min(q, s p) over the vocabulary, because a token that
    the target likes better than the draft makes up for those before it. This sum is concave in s, `rate` at s = 1 and s
    itself for small s; it is taken to be s - (1 - rate) s². More than any s brings gives 2 · gain.
    """
    if not by_block:
        return gain / rate
    return 2 * gain / (1 + math.sqrt(max(0.0, 1 - 4 * (1 - rate) * gain)))
