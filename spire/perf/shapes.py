"""Shapes of targets and drafts, which determine their costs, and the shapes known by name.

Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spire.model.config import DraftConfig, ModelConfig

DraftKind = Literal["vanilla", "magicdec", "spire"]

SERVED_SINK, SERVED_WINDOW = 1, 64


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of any served family.

    `vocab_size` is the number of tokens that it unembeds to. 0 means unknown, so unembedding costs nothing.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: int | None = None) -> Shape:
        """Return the shape of a model, or of a draft that can propose only `vocabulary` tokens."""
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            vocabulary or config.vocab_size,
        )

    @property
    def body_parameters(self) -> int:
        """Number of parameters of the layers with their norms (the paper's N), without embeddings and final norm."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        swiglu = 3 * self.hidden_size * self.intermediate_size
        return self.layers * (attention + swiglu + 2 * self.hidden_size)

    def parameters(self, tied: bool = False) -> int:
        """Return the number of all parameters. `tied`: embedding and unembedding are one matrix."""
        return self.body_parameters + self.hidden_size * (1 + self.vocab_size * (1 if tied else 2))

    @property
    def kv_values_per_position(self) -> int:
        """Count of numbers in the keys and values of one position, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class DraftShape:
    """A draft's shape and cache sizes. `window` None is the paper's W = L/8; a vanilla draft caches all positions."""

    kind: DraftKind
    shape: Shape
    window: int | None = SERVED_WINDOW
    sink: int = SERVED_SINK

    def cached_positions(self, context: int) -> int:
        """Return the positions per sequence whose keys and values one draft pass reads."""
        if self.kind == "vanilla":
            return context
        return min(context, self.sink + (context // 8 if self.window is None else self.window))

    @property
    def memory_flops(self) -> int:
        """FLOPs per sequence and pass beyond the forward: a SPIRe draft projects one memory vector per layer."""
        return 2 * self.shape.hidden_size * self.shape.kv_values_per_position if self.kind == "spire" else 0

    @property
    def activations_per_token(self) -> int:
        """Count of numbers in the activations sent to the draft per committed token: layers · width; 0 unless SPIRe."""
        return self.shape.layers * self.shape.hidden_size if self.kind == "spire" else 0


def quarter_of(layers: int) -> int:
    """Return the default number of layers of a SPIRe draft for a target with `layers` layers."""
    return max(1, round(layers / 4))


def trained_draft(kind: DraftKind, target: Shape, window: int | None = SERVED_WINDOW) -> DraftShape:
    """Return the draft that `spire train draft` makes: a quarter of the layers, or half of every size for vanilla.

    A MagicDec draft is the target itself.
    """
    if kind == "vanilla":
        halves = {name: getattr(target, name) // 2 for name in ("hidden_size", "intermediate_size", "head_dim")}
        return DraftShape(kind, replace(target, layers=max(1, target.layers // 2), **halves))
    layers = target.layers if kind == "magicdec" else quarter_of(target.layers)
    return DraftShape(kind, replace(target, layers=layers), window)


def trained_config(target: ModelConfig, fingerprint: str = "") -> DraftConfig:
    """Return the configuration of the SPIRe draft that `spire train draft` makes for a target with this fingerprint."""
    rule, layers = trained_draft("spire", Shape.of(target)), target.num_hidden_layers
    tapped = tuple(range(layers - rule.shape.layers, layers))
    return DraftConfig(target_fingerprint=fingerprint, tapped_layers=tapped, window=SERVED_WINDOW, sink=SERVED_SINK)


def paper_draft(kind: DraftKind, target: Shape, window: int | None = SERVED_WINDOW) -> DraftShape:
    """Return the draft that the paper assumes: as `trained_draft`, but Llama-3-8B as vanilla draft of Llama-3-70B."""
    if kind == "vanilla" and target == LLAMA_3_70B:
        return DraftShape(kind, LLAMA_3_8B)
    return trained_draft(kind, target, window)


SEQAX_67M = Shape(layers=8, hidden_size=512, intermediate_size=4096, heads=8, kv_heads=8, head_dim=128)
LLAMA_3_70B = Shape(80, 8192, 28672, heads=64, kv_heads=8, head_dim=128, vocab_size=128256)
LLAMA_3_8B = Shape(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, vocab_size=128256)
QWEN3_8B = Shape(36, 4096, 12288, heads=32, kv_heads=8, head_dim=128, vocab_size=151936)


class Known(NamedTuple):
    """A model shape in the table of named shapes. `longest` is the maximum number of positions of a sequence.

    `longest` is None for the paper's two models, which the paper evaluates beyond their trained contexts.
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
