"""The identity of a draft: its id, its description for the verifier, and the check that the verifier's target fits."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from draft_service.config import DraftServiceConfig
from draft_service.drafter import Drafter
from spire.checkpoints.names import model_name
from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.errors import MismatchError
from spire.model.config import load_draft_config, load_model_config
from spire.perf.shape_messages import shape_to_wire
from spire.perf.shapes import Shape
from spire.rpc.channel import PROTOCOL_VERSION
from spire.v1 import verifier_pb2


def check_handshake(directory: Path, info: verifier_pb2.GetInfoResponse) -> None:
    """Raise MismatchError, naming the two values that differ, unless this draft was made for the verifier's target."""
    shape, draft = load_model_config(directory), load_draft_config(directory)
    for what, ours, theirs in (
        ("protocol version", PROTOCOL_VERSION, info.protocol_version),
        ("target fingerprint", draft.target_fingerprint, info.target_fingerprint),
        ("tokenizer", _tokenizer_hash(directory) or info.tokenizer_hash, info.tokenizer_hash),
        ("vocabulary", shape.vocab_size, info.vocab_size),
        ("width", shape.hidden_size if draft.tapped_layers else info.hidden_size, info.hidden_size),
    ):
        if ours != theirs:
            raise MismatchError(
                f"{what}: this draft was made for {ours}, the verifier has {theirs}; "
                "serve the draft's own target, or train a draft for this one with `spire train draft`"
            )


def stable_id(config: DraftServiceConfig, port: int) -> str:
    """Return an id that differs between replicas and survives a restart, so that running sequences are replayed."""
    name = f"{socket.gethostname()} {config.host}:{port} {config.draft.resolve()}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def describe(draft_id: str, directory: Path, drafter: Drafter) -> verifier_pb2.DraftInfo:
    """Return the description of this draft that the verifier passes on to gateways."""
    return verifier_pb2.DraftInfo(
        draft_id=draft_id,
        kind=drafter.draft.draft.kind,
        model_name=model_name(directory),
        tokenizer_hash=_tokenizer_hash(directory),
        vocab_size=drafter.draft.config.vocab_size,
        max_speculation_depth=MAX_SPECULATION_DEPTH,
        state_bytes_per_sequence=drafter.memory.bytes_per_sequence(),
        max_sequences=drafter.memory.slots,
        shape=shape_to_wire(Shape.of(drafter.draft.config, drafter.draft.draft.vocabulary)),
        window=drafter.draft.draft.window,
        sink=drafter.draft.draft.sink,
        stops=drafter.draft.stop_head is not None,
    )


def _tokenizer_hash(directory: Path) -> str:
    """Return the hash of tokenizer.json; empty if the directory has none, because a draft needs only token ids."""
    file = directory / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
