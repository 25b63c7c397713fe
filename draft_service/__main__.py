"""Serve a draft until SIGTERM: `python -m draft_service --draft DIR --verifier HOST:PORT`.

The service asks the verifier for its target, and refuses to start if the draft was made for another target.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from prometheus_client import start_http_server

from draft_service.config import DraftServiceConfig
from spire.rpc.tls import in_words
from spire.rpc.trust import Trust
from spire.service.health import keep_reporting
from spire.service.heap import keep_freed_memory
from spire.service.process import announce, keep_announcing, on_passing_thread, run, stop_signal

# isort: split
from draft_service.drafter import Drafter
from draft_service.embeddings import ask_embeddings, is_kept, kept_embeddings
from draft_service.follower import Follower, subscription
from draft_service.identity import check_handshake, describe, stable_id
from draft_service.metrics import registry_of
from draft_service.requests import Requests
from draft_service.worker import Worker
from spire.address import by_tcp, join
from spire.checkpoints.weights import load_draft
from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.model.backends.placed import draft_backend_for
from spire.model.backends.reference import Reference
from spire.model.draft import Draft
from spire.model.placement import choose_device, choose_dtype, draft_threads, loads_kernels_late, set_threads
from spire.perf.room import Wishes, free_memory, room_for, sequences_for
from spire.rpc.channel import connect, listen, new_server
from spire.v1 import draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_HANDSHAKE_SECONDS, _RETRY_SECONDS = 5.0, 0.2

# The model thread is stuck if a batch takes longer than this and longer than eight times the usual step time.
_STUCK_SECONDS = 60.0

log = structlog.get_logger("draft_service")


def main() -> None:
    run("draft_service", DraftServiceConfig, serve)


async def serve(config: DraftServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises SpireError if the draft cannot be served or does not match the target."""
    trust = Trust.read(config.tls, config.secret_file)
    trust.check_host(config.host)
    keep_freed_memory()
    kept = kept_embeddings(config)
    loaded = None if kept else on_passing_thread(lambda: _load(config, config.target))
    server = new_server(trust)
    port = listen(server, config.host, config.port, trust)
    async with connect(config.verifier, trust) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        info = await _meet(stub, config.verifier, trust)
        check_handshake(config.draft, info)
        if kept and not is_kept(kept):
            await ask_embeddings(stub, kept)
        draft, backend = loaded or on_passing_thread(lambda: _load(config, kept))
        drafter = on_passing_thread(lambda: _drafter(draft, backend, config, info.max_context))
        draft_id = config.draft_id or stable_id(config, port)
        loop = asyncio.get_running_loop()
        worker = Worker(drafter, config.wait_ms / 1000, lambda ids: loop.call_soon_threadsafe(follower.resync, ids))
        drafter.q_ring = lambda: follower.q_ring
        request, requests = subscription(draft_id, draft.draft), Requests(worker)
        request.draft.CopyFrom(describe(draft_id, config.draft, drafter))
        drafting = draft_pb2_grpc.DraftingStub(channel)
        follower = Follower(drafting, request, worker, requests, config.shared_memory, drafter.device)
        worker.start()
        try:
            await _run(config, server, follower, requests, worker, join(config.host, port))
        finally:
            worker.stop()


async def _meet(stub: verifier_pb2_grpc.VerifierStub, address: str, trust: Trust) -> verifier_pb2.GetInfoResponse:
    """Call GetInfo until the verifier answers, and return the answer. Log the reason of a failure when it changes."""
    said = ""
    while True:
        try:
            return await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_HANDSHAKE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if (reason := in_words(error.details(), trust.tls)) != said:
                said = reason
                log.warning("unreachable", peer="verifier", address=address, reason=reason)
            await asyncio.sleep(_RETRY_SECONDS)


def _load(config: DraftServiceConfig, target: Path | None) -> tuple[Draft, Reference]:
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    backend = draft_backend_for(device, dtype, config.quantization)
    draft = load_draft(config.draft, dtype, device, target)
    set_threads(config.threads or draft_threads(draft))
    return backend.pack(draft), backend


def _drafter(draft: Draft, backend: Reference, config: DraftServiceConfig, max_context: int) -> Drafter:
    """Create a drafter, ready for its first round, for `config.max_sequences`, or by default as many as fit the GPU.

    Raises CheckpointError if an explicitly configured number of sequences does not fit.
    """
    weight, sequences, budget = draft.embed_tokens.weight, config.max_sequences, None
    position_bytes = draft.config.kv_bytes_per_position // 2 * weight.dtype.itemsize
    if weight.device.type != "cpu":  # on a CPU memory is allocated only when written
        free, wishes = free_memory(weight.device), Wishes(sequences, "max_sequences" in config.model_fields_set)
        if draft.draft.tapped_layers:
            entries = draft.draft.sink + draft.draft.window
            sequences = sequences_for(wishes, entries * position_bytes, free)
            if sequences < config.max_sequences:
                log.warning("more sequences do not fit the GPU and are decoded plainly", sequences=sequences)
        else:
            room = room_for(wishes, max_context + MAX_SPECULATION_DEPTH, position_bytes, free, at_once=True)
            budget, fitting = room.budget, room.context - MAX_SPECULATION_DEPTH
            if fitting < max_context:
                max_context = fitting
                log.warning("longer sequences do not fit the GPU and are decoded plainly", positions=max_context)
    drafter = Drafter(draft, sequences, config.top_m, max_context, backend, budget)
    if loads_kernels_late(drafter.device):
        drafter.warm_up()
    return drafter


async def _run(
    config: DraftServiceConfig, server: grpc.aio.Server, follower: Follower, requests: Requests, worker: Worker, at: str
) -> None:
    """Serve draft requests until a stop signal. Raises MismatchError if draft and verifier no longer match."""
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if config.metrics_port:
        registry = registry_of(worker, follower, requests.replies)
        start_http_server(config.metrics_port, by_tcp(config.host), registry=registry)
    await server.start()

    def well() -> bool:
        return not worker.pace.is_stuck(_STUCK_SECONDS)

    running = (follower.run(), stop_signal(), keep_reporting(healthy, well))
    following, stopping, reporting = (asyncio.create_task(each) for each in running)
    await asyncio.sleep(0)  # signal handlers are installed before the address is announced
    log.info("listening", address=at, bytes_per_sequence=worker.drafter.memory.bytes_per_sequence())
    announce(config.ready_file, at)
    telling = asyncio.create_task(keep_announcing(config.ready_file, well))
    try:
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():  # it ends only with an error
            following.result()
    finally:
        for task in (following, stopping, reporting, telling):
            task.cancel()
        await healthy.enter_graceful_shutdown()
        await server.stop(grace=2)


if __name__ == "__main__":
    main()
