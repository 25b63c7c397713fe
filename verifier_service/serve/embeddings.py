"""The target's embeddings as messages, for drafts that have none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from spire.checkpoints.weights import embedding_rows
from spire.rpc.tensors import to_wire
from spire.v1 import verifier_pb2 as pb

_MESSAGE_BYTES = 1024 * 1024


def embedding_messages(model: Path) -> Iterator[pb.GetEmbeddingsResponse]:
    """Read the embeddings of the checkpoint in `model`, message by message. Raises CheckpointError."""
    for unembedding, rows in embedding_rows(model, _MESSAGE_BYTES):
        exact = rows if rows.dtype == torch.bfloat16 else rows.float()  # float16 has no type of its own in messages
        yield pb.GetEmbeddingsResponse(unembedding=unembedding, rows=to_wire(exact))
