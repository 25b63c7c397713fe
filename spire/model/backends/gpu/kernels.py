"""The Triton kernels for a model. Each function returns a module, or None if torch has to compute.

The functions raise errors after which this process can no longer use its GPU.
"""

from __future__ import annotations

from types import ModuleType

from spire.model.attention.triton_kernels import load_kernels
from spire.model.config import ModelConfig
from spire.model.draft import Draft
from spire.model.layers import Decoder


def layers_fit(config: ModelConfig) -> bool:
    """True if the module `elementwise` has all kernels for the layers of such a model.

    Triton's ranges are powers of two, and no kernel computes the norms of queries and keys.
    """
    return config.head_dim & (config.head_dim - 1) == 0 and not config.qk_norm


def computed_by(config: ModelConfig) -> str:
    """Name, for people, what computes a model with this config on a GPU for which Triton compiles kernels."""
    return "Triton, CUDA graphs" if layers_fit(config) else "torch's own for layers, CUDA graphs"


def elementwise_kernels(model: Decoder) -> ModuleType | None:
    """Return the module `elementwise` if its kernels can serve this model."""
    weight, config = model.embed_tokens.weight, model.config
    if not layers_fit(config):
        return None
    sizes = weight.dtype, weight.device, config.hidden_size, config.head_dim
    return load_kernels(f"{__package__}.elementwise", weight, lambda kernels: kernels.try_out(*sizes))


def draft_kernels(draft: Draft) -> ModuleType | None:
    """Return the module `draft_attention` if its kernel can serve this draft."""
    config, weight = draft.config, draft.embed_tokens.weight
    heads = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    given = draft.draft, *heads, config.head_dim, weight
    return load_kernels(f"{__package__}.draft_attention", weight, lambda kernels: kernels.try_out(*given))
