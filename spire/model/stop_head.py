"""The head that predicts whether the target accepts a draft token (SpecDec++, section 3.2).

Shapes: R tokens, D width of the draft, W width of the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spire.model.config import StopHeadConfig

# What the head is told of a token besides the hidden state: log q, the entropy of q (both at temperature 1), and the
# temperature at which it was drawn.
_TOLD = 3


class StopHead(nn.Module):
    """A residual SiLU network on the hidden state that a token was drawn from, and on q.

    The paper judges a token by the hidden state after it, one pass later. Here a token is judged before the next pass,
    so that none is wasted.
    """

    def __init__(self, hidden_size: int, config: StopHeadConfig):
        super().__init__()
        self.enter = nn.Linear(hidden_size + _TOLD, config.width)
        self.residual = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.leave = nn.Linear(config.width, 1)

    def forward(self, hidden_RD: Tensor, told_RF: Tensor) -> Tensor:
        """Return the logit [R] of the probability that each token is accepted if those before it are."""
        x_RW = self.enter(torch.cat((hidden_RD, told_RF.to(hidden_RD.dtype)), dim=-1))
        for layer in self.residual:
            x_RW = x_RW + F.silu(layer(x_RW))
        return self.leave(x_RW)[..., 0]


def told_of(logits_RW: Tensor, drawn_R: Tensor, temperature_R: Tensor) -> Tensor:
    """Return what the head is told of tokens [R, 3], given the draft's logits and the places of the drawn tokens."""
    log_q_RW = logits_RW.float().log_softmax(dim=-1)
    entropy_R = -(log_q_RW.exp() * log_q_RW).sum(dim=-1)
    log_q_R = log_q_RW.gather(-1, drawn_R[..., None])[..., 0]
    return torch.stack((log_q_R, entropy_R, temperature_R.float()), dim=-1)
