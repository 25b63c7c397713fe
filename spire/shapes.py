"""What a model's costs depend on: its shape, that of a draft for it, and the shapes that are known by name.

Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from spire.model.config import ModelConfig

DraftKind = Literal["vanilla", "magicdec", "spire"]

SERVED_SINK, SERVED_WINDOW = 1, 64


@dataclass(frozen=True)
class Shape:
    """What a Llama-architecture model's costs depend on. `vocab_size` 0: not known, so unembedding costs nothing."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.vocab_size,
        )

    @property
    def body_parameters(self) -> int:
        """N: the layers with their norms; without embedding, unembedding and final norm, as the paper counts."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        swiglu = 3 * self.hidden_size * self.intermediate_size
        return self.layers * (attention + swiglu + 2 * self.hidden_size)

    def parameters(self, tied: bool = False) -> int:
        """All of them. `tied`: embedding and unembedding are one matrix."""
        return self.body_parameters + self.hidden_size * (1 + self.vocab_size * (1 if tied else 2))

    @property
    def kv_values_per_position(self) -> int:
        """Key and value numbers that one position keeps, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Draft:
    """A draft's cost: its shape and what it caches. `window` None is the paper's W = L/8; vanilla caches everything."""

    kind: DraftKind
    shape: Shape
    window: int | None = SERVED_WINDOW
    sink: int = SERVED_SINK

    def cached_positions(self, context: int) -> int:
        """Positions whose keys and values one draft pass reads, per sequence."""
        if self.kind == "vanilla":
            return context
        return min(context, self.sink + (context // 8 if self.window is None else self.window))

    @property
    def memory_flops(self) -> int:
        """FLOPs per sequence and pass beyond the forward: SPIRe projects one memory vector per layer."""
        return 2 * self.shape.hidden_size * self.shape.kv_values_per_position if self.kind == "spire" else 0

    @property
    def activations_per_token(self) -> int:
        """Target activations that the draft is sent for each committed token: one per layer and unit of width."""
        return self.shape.layers * self.shape.hidden_size if self.kind == "spire" else 0


def quarter_of(layers: int) -> int:
    """Layers of a SPIRe draft for a target of `layers`, unless another number is asked for."""
    return max(1, round(layers / 4))


def trained_draft(kind: DraftKind, target: Shape, window: int | None = SERVED_WINDOW, sink: int = SERVED_SINK) -> Draft:
    """What `spire train draft` makes for a target: its last quarter of layers, or half of every size for vanilla.

    MagicDec is the target itself.
    """
    if kind == "vanilla":
        return Draft(kind, _halved(target))
    layers = target.layers if kind == "magicdec" else quarter_of(target.layers)
    return Draft(kind, replace(target, layers=layers), window, sink)


def paper_draft(kind: DraftKind, target: Shape, window: int | None = SERVED_WINDOW, sink: int = SERVED_SINK) -> Draft:
    """The paper's: as `trained_draft`, but Llama-3-8B is the vanilla draft of Llama-3-70B."""
    if kind == "vanilla" and target == LLAMA_3_70B:
        return Draft(kind, LLAMA_3_8B)
    return trained_draft(kind, target, window, sink)


def _halved(target: Shape) -> Shape:
    """Half the layers, and half of every width: an eighth of the parameters."""
    return replace(
        target,
        layers=max(1, target.layers // 2),
        hidden_size=target.hidden_size // 2,
        intermediate_size=target.intermediate_size // 2,
        head_dim=target.head_dim // 2,
    )


SEQAX_67M = Shape(layers=8, hidden_size=512, intermediate_size=4096, heads=8, kv_heads=8, head_dim=128)
LLAMA_3_70B = Shape(80, 8192, 28672, heads=64, kv_heads=8, head_dim=128, vocab_size=128256)
LLAMA_3_8B = Shape(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128256)
QWEN3_8B = Shape(36, 4096, 12288, heads=32, kv_heads=8, head_dim=128, vocab_size=151936)


@dataclass(frozen=True)
class Known:
    """A shape by name. `longest` is the most positions of a sequence.

    None for the paper's two, which it evaluates at contexts that no such model was trained on.
    """

    shape: Shape
    longest: int | None


SHAPES = {
    "seqax-67m": Known(SEQAX_67M, None),
    "llama-3-70b": Known(LLAMA_3_70B, None),
    "llama-3-8b": Known(LLAMA_3_8B, 8192),
    "llama-3.1-8b": Known(LLAMA_3_8B, 131072),
    "qwen3-8b": Known(QWEN3_8B, 40960),
}
