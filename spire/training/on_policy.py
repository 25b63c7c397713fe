"""On-policy data: text continued by the target, because a served draft predicts text that the target writes.

Each sequence is an excerpt of the corpus continued by the target's samples at temperature 1, generated once before
training and stored in the user's cache. Does not know: other temperatures, and training sequences of `long_length`.

Shapes: N sequences, B of them at a time, L positions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from spire.files import user_cache, write_whole
from spire.model.cache.placed import cache_for
from spire.model.target import Target
from spire.training.corpus import TokenStream

_SEQUENCES = 2048
_BATCH = 64
_SEED = 77


class OnPolicy:
    """A token stream that replaces a share of its windows of length L by the target's sequences `written_NL`."""

    def __init__(self, stream: TokenStream, written_NL: NDArray[np.int64], share: float):
        self.stream, self.written_NL, self.share = stream, written_NL, share

    @classmethod
    def build(
        cls, target: Target, identity: str, stream: TokenStream, share: float, length: int, sequences: int = _SEQUENCES
    ) -> OnPolicy:
        """Generate sequences with the target, or load the cached sequences of an earlier run."""
        file = user_cache() / f"on-policy-{identity}-{stream.name}-{sequences}x{length}.npy"
        if not file.exists():
            written_NL = _written(target, stream, sequences, length)
            write_whole(file, lambda unfinished: np.save(unfinished, written_NL))
        return cls(stream, np.load(file), share)

    def batch(self, seed: int, step: int, batch: int, length: int) -> NDArray[np.int64]:
        """Return one step's training windows [batch, length]. Windows of a given shape depend on (seed, step) alone."""
        rows_BL = self.stream.batch(seed, step, batch, length)
        if length == self.written_NL.shape[1]:
            rng = np.random.default_rng((seed, step, 2))
            chosen_B = rng.random(batch) < self.share
            written_BL = self.written_NL[rng.integers(len(self.written_NL), size=batch)]
            rows_BL = np.where(chosen_B[:, None], written_BL, rows_BL)
        return rows_BL


@torch.inference_mode()
def _written(target: Target, stream: TokenStream, sequences: int, length: int) -> NDArray[np.int64]:
    """Return sequences [N, L], the first half of each from the corpus, the second half sampled from the target."""
    device, dtype = target.embed_tokens.weight.device, torch.bfloat16
    writer = Target(target.config).to(device, dtype).eval()
    writer.load_state_dict(target.state_dict())
    random = torch.Generator(device).manual_seed(_SEED)
    batch = min(_BATCH, sequences)
    cache = cache_for(target.config, batch, length, dtype, device)
    slots = [cache.allocate() for _ in range(batch)]
    written = []
    for number in track(range(-(-sequences // batch)), description="the target writes"):
        tokens_BT = torch.from_numpy(stream.batch(_SEED, number, batch, length // 2)).to(device)
        rows = [tokens_BT]
        cache.rewind(slots, [0] * batch)
        while sum(row.shape[1] for row in rows) < length:
            hidden_BTD, _ = writer(tokens_BT, cache.view(slots, tokens_BT.shape[1]))
            cache.commit(slots, [tokens_BT.shape[1]] * batch)
            probs_BV = writer.unembed(hidden_BTD[:, -1]).softmax(dim=-1)
            tokens_BT = torch.multinomial(probs_BV, 1, generator=random)
            rows.append(tokens_BT)
        written.append(torch.cat(rows, dim=1).cpu().numpy())
    return np.concatenate(written)[:sequences]
