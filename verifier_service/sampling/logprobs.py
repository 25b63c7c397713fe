"""Logprobs of generated tokens or of prompt tokens, and of the most probable alternatives at their positions.

Shapes: B sequences, T positions, V vocabulary, n tokens of one sequence, m alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from spire.decoding.sampling import SamplingRows
from spire.rpc.tensors import to_wire
from spire.v1 import verifier_pb2 as pb


def log_p(p_BTV: Tensor, logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Return log p [B, T, V], accurate even where p underflows; for greedy sequences, log p at temperature 1."""
    temperature_B = torch.where(rows.greedy_B, 1.0, rows.temperature_B)
    scaled_BTV = (logits_BTV - logits_BTV.amax(dim=-1, keepdim=True)) / temperature_B[:, None, None]
    excluded_BTV = (p_BTV == 0) & rows.truncated_B[:, None, None]
    return scaled_BTV.masked_fill_(excluded_BTV, -torch.inf).log_softmax(dim=-1)


@dataclass(frozen=True)
class Scores:
    """Logprobs of n tokens [n], and ids and logprobs of the m most probable tokens at each position [n, m].

    `ranks_n` is 1 + the number of more probable tokens; it is empty if ranks are not requested.
    """

    tokens_n: Tensor
    top_ids_nm: Tensor
    top_nm: Tensor
    ranks_n: Tensor

    def to_proto(self) -> pb.Logprobs:
        return pb.Logprobs(
            tokens=to_wire(self.tokens_n),
            top_ids=to_wire(self.top_ids_nm.int()),
            top=to_wire(self.top_nm),
            ranks=to_wire(self.ranks_n.int()) if len(self.ranks_n) else None,
        )

    @classmethod
    def join(cls, parts: Rows[Scores]) -> Scores:
        return cls(*(torch.cat([getattr(part, part_field.name) for part in parts]) for part_field in fields(cls)))


def scores_of(log_p_TV: Tensor, tokens: Rows[int], alternatives: int, ranked: bool = False) -> Scores:
    """Return the scores of n tokens at the first n of T positions."""
    log_p_nV = log_p_TV[: len(tokens)]
    of_tokens_n = log_p_nV.gather(1, torch.tensor(tokens, device=log_p_TV.device)[:, None])[:, 0]
    top_nm, ids_nm = log_p_nV.topk(min(alternatives, log_p_nV.shape[-1]), dim=-1)
    ranks_n = (log_p_nV > of_tokens_n[:, None]).sum(dim=-1) + 1 if ranked else of_tokens_n[:0]
    return Scores(of_tokens_n.cpu(), ids_nm.cpu(), top_nm.cpu(), ranks_n.cpu())
