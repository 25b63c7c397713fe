"""Who this draft is: what the handshake tells, and what it must find at the verifier."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

from draft_service.config import DraftServiceConfig
from draft_service.drafter import Drafter
from spire.drafting import MAX_SPECULATION_DEPTH
from spire.errors import MismatchError
from spire.model.draft import Draft
from spire.model.names import model_name
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.shapes import shape_to_wire
from spire.shapes import Shape
from spire.v1 import verifier_pb2


def check_handshake(draft: Draft, directory: Path, info: verifier_pb2.GetInfoResponse) -> None:
    """Raises MismatchError, naming both values, unless this draft belongs to what the verifier hosts."""
    for what, ours, theirs in (
        ("protocol version", PROTOCOL_VERSION, info.protocol_version),
        ("target fingerprint", draft.draft.target_fingerprint, info.target_fingerprint),
        ("tokenizer", _tokenizer_hash(directory) or info.tokenizer_hash, info.tokenizer_hash),
        ("vocabulary", draft.config.vocab_size, info.vocab_size),
        ("width", draft.config.hidden_size if draft.draft.tapped_layers else info.hidden_size, info.hidden_size),
    ):
        if ours != theirs:
            raise MismatchError(
                f"{what}: this draft was made for {ours}, the verifier has {theirs}; "
                "serve the draft's own target, or train a draft for this one with `spire train draft`"
            )


def stable_id(config: DraftServiceConfig, port: int) -> str:
    """The same after a restart, so that running sequences are replayed to the new process; another for each replica."""
    name = f"{socket.gethostname()} {config.host}:{port} {config.draft.resolve()}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def describe(draft_id: str, directory: Path, drafter: Drafter) -> dict[str, Any]:
    """The fields of GetInfo that never change while this process lives."""
    return {
        "protocol_version": PROTOCOL_VERSION,
        "draft_id": draft_id,
        "kind": drafter.draft.draft.kind,
        "model_name": model_name(directory),
        "target_fingerprint": drafter.draft.draft.target_fingerprint,
        "tokenizer_hash": _tokenizer_hash(directory),
        "vocab_size": drafter.draft.config.vocab_size,
        "max_speculation_depth": MAX_SPECULATION_DEPTH,
        "state_bytes_per_sequence": drafter.memory.bytes_per_sequence(),
        "max_sequences": drafter.memory.slots,
        "shape": shape_to_wire(Shape.of(drafter.draft.config)),
        "window": drafter.draft.draft.window,
        "sink": drafter.draft.draft.sink,
    }


def _tokenizer_hash(directory: Path) -> str:
    """Of the draft's own tokenizer, empty if it brings none: it works on token ids and needs none."""
    file = directory / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
