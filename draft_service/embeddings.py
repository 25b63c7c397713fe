"""The embeddings of a draft's target: from the target's directory, or asked from the verifier once and kept.

A draft without embeddings of its own names its target's by their fingerprint.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import structlog
import torch
from torch import Tensor

from draft_service.config import DraftServiceConfig
from spire.checkpoints.weights import save_embeddings
from spire.errors import CheckpointError, DataError, MismatchError
from spire.files import made_once, user_cache
from spire.model.config import load_draft_config
from spire.rpc.tensors import from_wire
from spire.v1 import verifier_pb2, verifier_pb2_grpc

log = structlog.get_logger("draft_service")


def kept_embeddings(config: DraftServiceConfig) -> Path | None:
    """Return where embeddings that were asked from a verifier are kept; None for a draft that needs none of these."""
    shared = load_draft_config(config.draft).embeddings
    return None if config.target or not shared else user_cache() / "embeddings" / shared.fingerprint


def is_kept(directory: Path) -> bool:
    """Return whether an earlier run has kept the embeddings in `directory`."""
    return directory.is_dir()


async def ask_embeddings(stub: verifier_pb2_grpc.VerifierStub, directory: Path) -> None:
    """Ask the verifier for its target's embeddings and keep them in `directory`.

    Raises MismatchError if they are not those that the draft names, and CheckpointError if they cannot be kept.
    """
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    try:
        async for part in stub.GetEmbeddings(verifier_pb2.GetEmbeddingsRequest()):
            parts[part.unembedding].append(from_wire(part.rows))
    except grpc.aio.AioRpcError as error:
        raise MismatchError(
            f"the draft uses its target's embeddings, and the verifier did not send them: {error.details()}. "
            "Give the target's directory with --target DIR"
        ) from error
    if not parts[False]:
        raise MismatchError("the verifier sent no embedding, which this draft needs: give --target DIR")
    embedding, head = torch.cat(parts[False]), torch.cat(parts[True]) if parts[True] else None
    try:
        made_once(directory, lambda unfinished: _keep(embedding, head, unfinished))
    except DataError as error:
        raise CheckpointError(f"{error}, or give the target's directory with --target DIR") from error
    log.info("kept the target's embeddings", directory=str(directory), bytes=embedding.nbytes)


def _keep(embedding: Tensor, head: Tensor | None, directory: Path) -> None:
    found = save_embeddings(directory, embedding, head)
    if found != directory.name:
        raise MismatchError(
            f"embeddings: this draft was made for {directory.name}, the verifier's target has {found}; "
            "serve the draft's own target, or train a draft for this one with `spire train draft`"
        )
