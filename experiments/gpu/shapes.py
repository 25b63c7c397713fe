"""The shape that is measured: Llama-3's 8B, or one that a CPU takes no time for."""

from __future__ import annotations

from experiments.gpu.part import Setting
from spire.perf.shapes import LLAMA_3_8B, Shape

_TINY = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=512)


def shape_of(setting: Setting) -> Shape:
    return _TINY if setting.tiny else LLAMA_3_8B
