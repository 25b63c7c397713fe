"""The Triton kernels for a model. Each function returns a module, or None if torch has to compute.

The functions raise errors after which this process can no longer use its GPU.
"""

from __future__ import annotations

from types import ModuleType

from spire.model.attention.triton_kernels import load_kernels
from spire.model.draft import Draft
from spire.model.layers import Decoder


def elementwise_kernels(model: Decoder) -> ModuleType | None:
    """Return the module `elementwise` if its kernels can serve this model."""
    weight, config = model.embed_tokens.weight, model.config
    if config.head_dim & (config.head_dim - 1):
        return None  # Triton's ranges are powers of two
    sizes = weight.dtype, weight.device, config.hidden_size, config.head_dim
    return load_kernels(f"{__package__}.elementwise", weight, lambda kernels: kernels.try_out(*sizes))


def draft_kernels(draft: Draft) -> ModuleType | None:
    """Return the module `draft_attention` if its kernel can serve this draft."""
    config, weight = draft.config, draft.embed_tokens.weight
    heads = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    given = draft.draft, *heads, config.head_dim, weight
    return load_kernels(f"{__package__}.draft_attention", weight, lambda kernels: kernels.try_out(*given))
