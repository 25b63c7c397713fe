"""The head that predicts whether the target accepts a draft token (SpecDec++, section 3.2).

Shapes: R tokens, D width of the draft, W width of the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spire.model.config import StopHeadConfig

# The numbers that `spire.decoding.drafting.told_of` tells of a token.
TOLD = 5


class StopHead(nn.Module):
    """A residual SiLU network on the hidden state that a token was drawn from, and on q.

    The paper judges a token by the hidden state after it, one pass later. Here a token is judged before the next pass,
    so that none is wasted.
    """

    def __init__(self, hidden_size: int, config: StopHeadConfig):
        super().__init__()
        self.enter = nn.Linear(hidden_size + TOLD, config.width)
        self.residual = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.leave = nn.Linear(config.width, 1)

    def forward(self, hidden_RD: Tensor, told_RF: Tensor) -> Tensor:
        """Return the logit [R] of the probability that each token is accepted if those before it are."""
        x_RW = self.enter(torch.cat((hidden_RD, told_RF.to(hidden_RD.dtype)), dim=-1))
        for layer in self.residual:
            x_RW = x_RW + F.silu(layer(x_RW))
        return self.leave(x_RW)[..., 0]
