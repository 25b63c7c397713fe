"""`python -m draft_service --draft DIR --verifier HOST:PORT`: serve a SPIRe draft until SIGTERM.

It asks the verifier what it hosts, and refuses to start for another target than its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from draft_service.config import DraftServiceConfig
from spire.errors import MismatchError
from spire.process import announce, on_passing_thread, run, stop_signal

# isort: split
from draft_service.activations import Follower, subscription
from draft_service.drafter import Drafter
from draft_service.metrics import register
from draft_service.service import DraftService, Identity
from draft_service.worker import Worker
from spire.model.checkpoint import load_draft
from spire.model.draft import SpireDraft
from spire.model.placement import choose_device, choose_dtype, set_threads
from spire.rpc.channel import PROTOCOL_VERSION, connect, new_server
from spire.v1 import draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc

log = structlog.get_logger("draft_service")

# Parameters below which one thread is faster.
_SMALL_DRAFT = 32_000_000


def main() -> None:
    run("draft_service", DraftServiceConfig, serve)


async def serve(config: DraftServiceConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises SpireError when it cannot or must not serve."""
    drafter = on_passing_thread(lambda: _load(config))
    draft = drafter.draft
    server = new_server()
    port = server.add_insecure_port(f"{config.host}:{config.port}")
    async with connect(config.verifier) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        info = await stub.GetInfo(verifier_pb2.GetInfoRequest(), wait_for_ready=True)
        check_handshake(draft, info)
        identity = Identity(
            config.draft_id or _stable_id(config, port),
            config.draft.resolve().name,
            draft.draft.target_fingerprint,
            _tokenizer_hash(config.draft, info),
        )
        loop = asyncio.get_running_loop()
        worker = Worker(
            drafter,
            config.wait_ms / 1000,
            lambda ids: asyncio.run_coroutine_threadsafe(follower.resync(ids), loop),
        )
        follower = Follower(stub, subscription(identity.draft_id, draft.draft), worker)
        draft_pb2_grpc.add_DraftServicer_to_server(DraftService(identity, worker, follower), server)
        register(worker, follower)
        worker.start()
        try:
            await _run(config, server, follower, lambda: _announce(config, port, worker))
        finally:
            worker.stop()


def _load(config: DraftServiceConfig) -> Drafter:
    device = choose_device(config.device)
    draft = load_draft(config.draft, choose_dtype(config.dtype, device)).to(device)
    set_threads(config.threads or _fitting_threads(draft))
    return Drafter(draft, config.max_sequences, config.top_m)


def _fitting_threads(draft: SpireDraft) -> int:
    """One thread for a small draft, torch's choice (0) for others.

    k passes of a few rows are hundreds of operations too small to share: beside a verifier, 16 sequences took 20 ms on
    two threads and 8 ms on one.
    """
    return 1 if sum(parameter.numel() for parameter in draft.parameters()) < _SMALL_DRAFT else 0


async def _run(
    config: DraftServiceConfig, server: grpc.aio.Server, follower: Follower, say: Callable[[], None]
) -> None:
    """Serve and follow until told to stop. Raises MismatchError when the verifier changes its target."""
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if config.metrics_port:
        start_http_server(config.metrics_port, config.host)
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    following, stopping = asyncio.create_task(follower.run()), asyncio.create_task(stop_signal())
    say()
    try:
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        following.cancel()
        stopping.cancel()
        await healthy.enter_graceful_shutdown()
        await server.stop(grace=2)


def _announce(config: DraftServiceConfig, port: int, worker: Worker) -> None:
    address = f"{config.host}:{port}"
    log.info("listening", address=address, bytes_per_sequence=worker.drafter.memory.bytes_per_sequence())
    announce(config.ready_file, address)


def check_handshake(draft: SpireDraft, info: verifier_pb2.GetInfoResponse) -> None:
    """Raises MismatchError, naming both values, unless this draft belongs to what the verifier hosts."""
    for what, ours, theirs in (
        ("protocol version", PROTOCOL_VERSION, info.protocol_version),
        ("target fingerprint", draft.draft.target_fingerprint, info.target_fingerprint),
        ("vocabulary", draft.config.vocab_size, info.vocab_size),
        ("width", draft.config.hidden_size, info.hidden_size),
    ):
        if ours != theirs:
            raise MismatchError(
                f"{what}: this draft was made for {ours}, the verifier has {theirs}; "
                "serve the draft's own target, or train a draft for this one with `spire train draft`"
            )


def _stable_id(config: DraftServiceConfig, port: int) -> str:
    """The same after a restart, so that running sequences are replayed to the new process; another for each replica."""
    name = f"{socket.gethostname()} {config.host}:{port} {config.draft.resolve()}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _tokenizer_hash(directory: Path, info: verifier_pb2.GetInfoResponse) -> str:
    """Of the draft's own tokenizer if it brings one; it works on token ids and needs none."""
    file = directory / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else info.tokenizer_hash


if __name__ == "__main__":
    main()
