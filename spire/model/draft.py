"""The draft (paper section 3): layers that attend to memory vectors instead of their own past.

At position t, draft layer i computes queries from its own input, but keys and values from memory vectors of earlier
positions. In a SPIRe draft, the memory vector of a verified position is the *target's* activation entering the layer
that layer i was initialised from. The memory vector of a position drafted in this round is the draft's own feedback
memory. If all memory vectors are the layer's own input, the same forward is an ordinary decoder: the vanilla draft, and
an ablation of SPIRe. Training and serving run the same forward with different memories (`BlockRollouts` and `OwnPast`
here, `draft_memory` and `token_memory` while serving).

A draft may have a vocabulary of its own, the tokens that its target writes most often: the unembedding of a large
vocabulary costs more than a draft's layers. It is exact, because q is the distribution that tokens are drawn from.

Shapes: B sequences, T positions, S memories, N draft layers, D width, G key/value heads, K head width, V vocabulary of
the target, W vocabulary of the draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from spire.errors import DataError
from spire.model.config import DraftConfig, ModelConfig
from spire.model.layers import Decoder, Layer, Memory, additive, attend
from spire.model.stop_head import StopHead
from spire.model.target import Target, WholeSequence


class FeedbackMemory(Memory, Protocol):
    """The keys and values that a draft with feedback memory (SPIRe paper, section 3.3) attends to in a forward."""

    @property
    def passes_follow(self) -> bool:
        """True if this pass is not the last of its round. The last pass's feedback memory would never be read."""

    def replace(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        """Replace a layer's keys and values of this pass by those of the feedback memory, for later passes."""


class Draft(Decoder):
    """The draft model. Maps token ids to hidden states by attending to a memory, to which it adds the new positions.

    `vocabulary`: the tokens [W] that it can propose, ascending; None: all.
    """

    vocabulary: Tensor | None

    def __init__(self, config: ModelConfig, draft: DraftConfig):
        super().__init__(config, draft.vocabulary)
        self.draft, N = draft, config.num_hidden_layers
        self.register_buffer("vocabulary", None if draft.vocabulary is None else torch.arange(draft.vocabulary))
        if draft.feedback:
            # At first each layer's own input has a softmax weight of 0.9.
            self.memory_weights = nn.Parameter(torch.zeros(N, N + 1).fill_diagonal_(math.log(0.9 / (1 - 0.9) * N)))
        self.stop_head = StopHead(config.hidden_size, draft.stop_head) if draft.stop_head else None

    def forward(self, tokens_BT: Tensor, memory: Memory) -> Tensor:
        """Run one pass of the draft and return the hidden states [B, T, D] after the final norm, to be unembedded.

        A draft with feedback must be given a FeedbackMemory.
        """
        hidden_BTD = self.embed_tokens(tokens_BT)
        rope = self.rope(memory.positions_BT, hidden_BTD.dtype)
        passed = [hidden_BTD]
        for index, layer in enumerate(cast(Iterable[Layer], self.layers)):
            hidden_BTD = layer(hidden_BTD, rope, partial(memory.attend, index))
            passed.append(hidden_BTD)
        if self.draft.feedback and (feeding := cast(FeedbackMemory, memory)).passes_follow:
            feedback_NBTD = self.feedback(torch.stack(passed))
            for index, layer in enumerate(cast(Iterable[Layer], self.layers)):
                feeding.replace(index, *layer.keys_values(feedback_NBTD[index], rope))
        return self.norm(hidden_BTD)

    def unembed(self, hidden_D: Tensor) -> Tensor:
        """Return fp32 logits [..., V] of hidden states [..., D]; -inf for tokens that the draft cannot propose."""
        return self.spread(super().unembed(hidden_D))

    def spread(self, logits_W: Tensor) -> Tensor:
        """Return logits [..., V] for the target's vocabulary, given those for the draft's own, [..., W]."""
        if self.vocabulary is None:
            return logits_W
        logits_V = logits_W.new_full((*logits_W.shape[:-1], self.config.vocab_size), -torch.inf)
        return logits_V.index_copy_(-1, self.vocabulary, logits_W)

    def feedback(self, passed_LBTD: Tensor) -> Tensor:
        """Return each layer's feedback memory m^i = Σ_l softmax(w_i)_l · x^l, l = 0..N (section 3.3), [N, B, T, D]."""
        weights_NL = self.memory_weights.softmax(dim=-1).to(passed_LBTD.dtype)
        return (weights_NL @ passed_LBTD.flatten(1)).unflatten(1, passed_LBTD.shape[1:])

    def remembered(self, taps_BTND: Tensor, positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each draft layer's keys and values [B, G, T, K], computed from the target's tapped activations."""
        rope = self.rope(positions_BT, taps_BTND.dtype)
        layers = cast(Iterable[Layer], self.layers)
        return [layer.keys_values(taps_BTND[:, :, index], rope) for index, layer in enumerate(layers)]


def prune(
    target: Target, draft: DraftConfig, copied_layers: tuple[int, ...], vocabulary_W: Tensor | None = None
) -> Draft:
    """Create a draft from copies of the target's embedding, `copied_layers`, norm and unembedding (paper section 3.2).

    Embedding and unembedding are copied separately even if the target ties them: only the embedding will be scaled.
    `vocabulary_W` are the tokens that the draft can propose, ascending, as many as `draft.vocabulary` says.
    """
    update = {"num_hidden_layers": len(copied_layers), "tie_word_embeddings": False}
    pruned = Draft(target.config.model_copy(update=update), draft)
    for name in ("embed_tokens", "norm"):
        getattr(pruned, name).load_state_dict(getattr(target, name).state_dict())
    head_VD = target.lm_head.weight
    if vocabulary_W is not None:
        pruned.vocabulary = vocabulary_W
        head_VD = head_VD[vocabulary_W]
    pruned.lm_head.load_state_dict({"weight": head_VD})
    for mine, index in zip(pruned.layers, copied_layers, strict=True):
        mine.load_state_dict(target.layers[index].state_dict())
    return pruned


def last_layers(target: ModelConfig, count: int) -> tuple[int, ...]:
    """Return the indices of the target's last `count` layers. Raises DataError unless 0 < count < number of layers."""
    depth = _depth_for(target, count)
    return tuple(range(depth - count, depth))


def spread_layers(target: ModelConfig, count: int) -> tuple[int, ...]:
    """Return the indices of `count` layers at equal distances, the first among them. Raises DataError as last_layers.

    The first layer is the only one that a target trained to read embeddings.
    """
    depth = _depth_for(target, count)
    return tuple(number * (depth - 1) // max(1, count - 1) for number in range(count))


def _depth_for(target: ModelConfig, count: int) -> int:
    depth = target.num_hidden_layers
    if not 0 < count < depth:
        raise DataError(f"layers is {count}: a draft of a target of {depth} layers has 1 to {depth - 1}")
    return depth


@torch.no_grad()
def input_scale(target: Target, entered_layer: int, tokens_BT: Tensor) -> float:
    """Return the factor that scales a draft's embedding to the magnitude of the target's activations entering a layer.

    After several layers the residual stream may be a thousand times larger than an embedding. The copied layers add to
    the stream at that magnitude, so a draft with an unscaled embedding would hardly see its token.
    """
    taps = target(tokens_BT, WholeSequence(tokens_BT), (entered_layer,)).taps_BTND
    assert taps is not None
    embedded = target.embed_tokens(tokens_BT).float().square().mean()
    return (taps[:, 1:].float().square().mean() / embedded).sqrt().item()


def visible(queries_BT: Tensor, keys_BS: Tensor, draft: DraftConfig) -> Tensor:
    """Return StreamingLLM's boolean mask [B, T, S] for queries and keys at these text positions.

    A query sees the sink, the `window` positions before it and, if `attends_self`, itself. Key position -1 means empty.
    """
    query, key = queries_BT[:, :, None], keys_BS[:, None, :]
    past = (key <= query) if draft.attends_self else (key < query)
    return (key >= 0) & past & ((key < draft.sink) | (key >= query - draft.window))


class RolloutBlocks(NamedTuple):
    """The blocks of a training sequence, of k positions each: pass j feeds the positions `starts_T` + j."""

    starts_T: Tensor
    k: int

    @classmethod
    def of(cls, length: int, k: int, offset: int, device: torch.device | str = "cpu") -> RolloutBlocks:
        """Return consecutive blocks of k positions from position `offset` on, which is in 1..k (no draft begins at 0).

        Every position of a block has a next token in the sequence.
        """
        return cls(torch.arange((length - 1 - k) // k, device=device) * k + offset, k)


class BlockRollouts:
    """The draft's memory of B training sequences: target activations before each block, its own memory in the block.

    Keys are those of all L verified positions, followed by those of the blocks at each pass so far. The mask lets each
    block attend to the positions before it and to its own passes. One masked attention per pass replaces one gathered
    window per block.
    """

    def __init__(self, draft: Draft, taps_BLND: Tensor, blocks: RolloutBlocks):
        B, L = taps_BLND.shape[:2]
        self.draft, self.blocks = draft.draft, blocks
        self.verified_L = torch.arange(L, device=taps_BLND.device)
        self.stored = [[pair] for pair in draft.remembered(taps_BLND, self.verified_L.expand(B, L))]
        self.mask: Tensor | None = None
        self.batch, self.passes = B, blocks.k
        self.passed = -1

    def advance(self) -> Tensor:
        """Begin the next pass of a block rollout and return the positions [T] to feed, one of each block."""
        self.passed += 1
        starts_T = self.blocks.starts_T
        fed = torch.cat([starts_T + j for j in range(self.passed + 1)])
        now_T = starts_T + self.passed
        self.positions_BT = now_T.expand(self.batch, -1)
        verified = visible(now_T[None], self.verified_L[None], self.draft) & (self.verified_L < starts_T[None, :, None])
        own = torch.arange(len(starts_T), device=starts_T.device)
        same_block = own[None, :, None] == own.repeat(self.passed + 1)[None, None, :]
        drafted = visible(now_T[None], fed[None], self.draft) & same_block
        self.mask = additive(torch.cat((verified, drafted), dim=-1), torch.float32)
        return now_T

    @property
    def passes_follow(self) -> bool:
        return self.passed + 1 < self.passes

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        self.stored[layer].append((keys_BGTK, values_BGTK))
        keys, values = zip(*self.stored[layer], strict=True)
        return attend(queries_BHTK, torch.cat(keys, dim=2), torch.cat(values, dim=2), self.mask)

    def replace(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        self.stored[layer][-1] = (keys_BGTK, values_BGTK)


class OwnPast:
    """The memory of B training sequences for a draft whose layers attend to their own inputs, in one pass."""

    passes = 1

    def __init__(self, draft: Draft, tokens_BL: Tensor):
        B, L = tokens_BL.shape
        self.fed_T = torch.arange(L - 1, device=tokens_BL.device)
        self.positions_BT = self.fed_T.expand(B, -1)
        dense, seen = draft.draft.attends_self and draft.draft.window >= L, self.fed_T[None]
        self.mask = None if dense else additive(visible(seen, seen, draft.draft), torch.float32)

    def advance(self) -> Tensor:
        """Begin the only pass and return the positions [T] to feed: all positions that have a next token."""
        return self.fed_T

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        return attend(queries_BHTK, keys_BGTK, values_BGTK, self.mask)
