"""The gateway meets a draft: whom it takes, whom it refuses by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.peers import DraftPeer, VerifierPeer
from spire.errors import MismatchError
from spire.rpc.channel import PROTOCOL_VERSION, listen, new_server
from spire.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2

OF_TARGET = {"target_fingerprint": "ours", "tokenizer_hash": "words", "vocab_size": 300}


class Said(draft_pb2_grpc.DraftServicer):
    """A draft that says this of itself."""

    def __init__(self, info: draft_pb2.DraftGetInfoResponse):
        self.info = info

    async def GetInfo(self, request: object, context: object) -> draft_pb2.DraftGetInfoResponse:
        return self.info


@asynccontextmanager
async def meeting(**said: Any) -> AsyncIterator[DraftPeer]:
    """The gateway's end of a draft that says this, and else what is right."""
    info = draft_pb2.DraftGetInfoResponse(
        **{"protocol_version": PROTOCOL_VERSION, "following": True} | OF_TARGET | said
    )
    server = new_server()
    draft_pb2_grpc.add_DraftServicer_to_server(Said(info), server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    model = SimpleNamespace(info=verifier_pb2.GetInfoResponse(**OF_TARGET))
    verifier = cast(VerifierPeer, SimpleNamespace(address="verifier:1", model=model))
    peer = DraftPeer(f"127.0.0.1:{port}", verifier, deadline=10)
    try:
        yield peer
    finally:
        await peer.close()
        await server.stop(0)


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("said", "values"),
    [
        ({"protocol_version": 99}, ["protocol version", "99", str(PROTOCOL_VERSION)]),
        ({"tokenizer_hash": "syllables"}, ["tokenizer", "'syllables'", "'words'"]),
        ({"target_fingerprint": "theirs"}, ["target fingerprint", "'theirs'", "'ours'"]),
        ({"vocab_size": 299}, ["vocabulary size", "299", "300"]),
    ],
)
async def test_a_draft_that_does_not_belong_is_refused_with_both_values(
    said: dict[str, Any], values: list[str]
) -> None:
    async with meeting(**said) as peer:
        with pytest.raises(MismatchError) as refused:
            await peer.handshake()
    assert all(value in str(refused.value) for value in values), refused.value
    assert peer.info is None


@pytest.mark.parametrize("tokenizer_hash", ["", "words"])
async def test_a_draft_that_brings_no_tokenizer_needs_none(tokenizer_hash: str) -> None:
    async with meeting(tokenizer_hash=tokenizer_hash) as peer:
        await peer.handshake()
        assert peer.info is not None
