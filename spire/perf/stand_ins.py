"""Stand-ins for parts of a model that a microbenchmark leaves out: layers without weights, a cache that is not read.

Shapes: B sequences, T new positions, R rows, D width, E outputs, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spire.model.backends.reference import Model
from spire.model.cache.target_cache import BatchView
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft
from spire.model.layers import Layer, Rope, Rotation, attend


class Unread:
    """A cache view that stores keys and values but never reads them: new positions attend to each other only."""

    def __init__(self, view: BatchView, dtype: torch.dtype):
        self._view, self.positions_BT, self.fused = view, view.positions_BT, ()
        B, T = view.positions_BT.shape
        self._mask = torch.zeros(B, 1, T, T, dtype=dtype, device=view.positions_BT.device)

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        self._view.store(layer, keys_BGTK, values_BGTK)
        return attend(queries_BHTK, keys_BGTK, values_BGTK, self._mask)


class GivenLayer(Layer):
    """A decoder layer that computes attention only; its other results are random tensors for up to `rows` tokens."""

    def __init__(self, config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device):
        nn.Module.__init__(self)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._kv_heads = config.num_key_value_heads
        self._projected = torch.randn(rows, heads, config.head_dim, dtype=dtype, device=device)
        self._out = torch.randn(rows, config.hidden_size, dtype=dtype, device=device)

    def queries_keys_values(self, input_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = input_BTD.shape
        heads = self._projected[: B * T].unflatten(0, (B, T)).transpose(1, 2)
        queries = heads.shape[1] - 2 * self._kv_heads
        return heads[:, :queries], heads[:, queries : -self._kv_heads], heads[:, -self._kv_heads :]

    def keys_values(self, memory_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        return self.queries_keys_values(memory_BTD, rope)[1:]

    def behind(self, input_BTD: Tensor, attended_BHTK: Tensor) -> Tensor:
        B, T, D = input_BTD.shape
        return self._out[: B * T].view(B, T, D)


def without_layers(model: Model, rows: int, dtype: torch.dtype, device: torch.device) -> Model:
    """Replace layers and unembedding by stand-ins without weights, so that a model of any size fits in memory."""
    model.layers = nn.ModuleList(GivenLayer(model.config, rows, dtype, device) for _ in model.layers)
    output_RE = torch.randn(rows, model.config.vocab_size, dtype=dtype, device=device)
    model.replace_head(lambda x: output_RE[: x.numel() // x.shape[-1]].view(*x.shape[:-1], -1))
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.normal_()
    model.rope = Rope(model.config.head_dim, model.config.rope)
    return model


def draft_shell(config: ModelConfig, draft: DraftConfig, vocabulary: int) -> Draft:
    update = {"num_hidden_layers": len(draft.tapped_layers), "vocab_size": vocabulary}
    return Draft(config.model_copy(update=update), draft.model_copy(update={"vocabulary": None}))
