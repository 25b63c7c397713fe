"""`python -m draft_service --draft DIR --verifier HOST:PORT`: serve a SPIRe draft until SIGTERM.

It asks the verifier what it hosts, and refuses to start for another target than its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from draft_service.config import DraftServiceConfig
from spire.process import announce, keep_announcing, on_passing_thread, run, stop_signal
from spire.rpc.tls import in_words
from spire.rpc.trust import Trust

# isort: split
from draft_service.activations import Follower, subscription
from draft_service.drafter import Drafter, held_positions
from draft_service.identity import check_handshake, describe, stable_id
from draft_service.metrics import registry_of
from draft_service.orders import Orders
from draft_service.worker import Worker
from spire.address import join
from spire.model.checkpoint import load_draft
from spire.model.draft import Draft
from spire.model.packing import pack
from spire.model.placement import (
    choose_device,
    choose_dtype,
    draft_threads,
    keep_freed_memory,
    loads_kernels_late,
    set_threads,
)
from spire.model.room import Wishes, free_memory, room_for
from spire.rpc.channel import connect, listen, new_server
from spire.rpc.drafting import DraftServicer
from spire.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_HANDSHAKE_SECONDS, _RETRY_SECONDS = 5.0, 0.2

# A batch that takes longer, and eight times as long as its like did, is stuck.
_STUCK_SECONDS = 60.0

log = structlog.get_logger("draft_service")


def main() -> None:
    run("draft_service", DraftServiceConfig, serve)


async def serve(config: DraftServiceConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises SpireError when it cannot or must not serve."""
    trust = Trust.read(config.tls, config.secret_file)
    trust.check_host(config.host)
    keep_freed_memory()
    draft = on_passing_thread(lambda: _load(config))
    server = new_server(trust)
    port = listen(server, config.host, config.port, trust)
    async with connect(config.verifier, trust) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        info = await _meet(stub, config.verifier, trust)
        check_handshake(draft, config.draft, info)
        drafter = on_passing_thread(lambda: _drafter(draft, config, info.max_context))
        draft_id = config.draft_id or stable_id(config, port)
        loop = asyncio.get_running_loop()
        worker = Worker(
            drafter,
            config.wait_ms / 1000,
            lambda ids: asyncio.run_coroutine_threadsafe(follower.resync(ids), loop),
        )
        described = describe(draft_id, config.draft, drafter)

        def own_info() -> draft_pb2.DraftGetInfoResponse:
            return draft_pb2.DraftGetInfoResponse(following=follower.following and orders.connected, **described)

        servicer = DraftServicer(
            own_info, worker.propose, draft.config.vocab_size, drafter.device, lambda: follower.q_ring
        )
        orders = Orders(draft_pb2_grpc.DraftingStub(channel), draft_id, servicer, worker)
        drafter.q_ring = lambda: follower.q_ring
        follower = Follower(
            stub, subscription(draft_id, draft.draft), worker, config.shared_memory, orders, drafter.device
        )
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
        worker.start()
        try:
            await _run(config, server, follower, orders, worker, lambda: _announce(config, port, worker))
        finally:
            worker.stop()


async def _meet(stub: verifier_pb2_grpc.VerifierStub, address: str, trust: Trust) -> verifier_pb2.GetInfoResponse:
    """What the verifier tells of itself, as soon as it can be reached. Why it cannot is said once."""
    said = ""
    while True:
        try:
            return await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_HANDSHAKE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if (reason := in_words(error.details(), trust.tls)) != said:
                said = reason
                log.warning("unreachable", peer="verifier", address=address, reason=reason)
            await asyncio.sleep(_RETRY_SECONDS)


def _load(config: DraftServiceConfig) -> Draft:
    device = choose_device(config.device)
    draft = load_draft(config.draft, choose_dtype(config.dtype, device), device)
    set_threads(config.threads or draft_threads(draft))
    return pack(draft)


def _drafter(draft: Draft, config: DraftServiceConfig, max_context: int) -> Drafter:
    """Ready for its first round. Raises CheckpointError when more sequences were asked for than fit."""
    drafter = _with_memory(draft, config, max_context)
    if loads_kernels_late(drafter.device):
        drafter.warm_up()
    return drafter


def _with_memory(draft: Draft, config: DraftServiceConfig, max_context: int) -> Drafter:
    """For as many sequences as fit the device."""
    weight = draft.embed_tokens.weight
    if weight.device.type == "cpu":  # memory comes with what is written
        return Drafter(draft, config.max_sequences, config.top_m, max_context)
    held, exactly = held_positions(draft, max_context), "max_sequences" in config.model_fields_set
    position_bytes = draft.config.kv_bytes_per_position // 2 * weight.dtype.itemsize
    wishes = Wishes(config.max_sequences, exactly, held)
    room = room_for(wishes, held, position_bytes, free_memory(weight.device), at_once=True)
    if room.sequences < config.max_sequences:
        log.warning("more sequences do not fit the GPU and are decoded plainly", sequences=room.sequences)
    return Drafter(draft, room.sequences, config.top_m, max_context)


async def _run(
    config: DraftServiceConfig,
    server: grpc.aio.Server,
    follower: Follower,
    orders: Orders,
    worker: Worker,
    say: Callable[[], None],
) -> None:
    """Serve and follow until told to stop. Raises MismatchError when the verifier changes its target."""
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if config.metrics_port:
        start_http_server(config.metrics_port, config.host, registry=registry_of(worker, follower))
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    following, stopping = asyncio.create_task(follower.run()), asyncio.create_task(stop_signal())
    await asyncio.sleep(0)  # it listens before anybody knows whom to stop
    say()

    def well() -> bool:
        return not worker.pace.is_stuck(_STUCK_SECONDS)

    telling = asyncio.create_task(keep_announcing(config.ready_file, well))
    watching, asked = asyncio.create_task(watch(healthy, well)), asyncio.create_task(orders.run())
    try:
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        for task in (following, stopping, telling, watching, asked):
            task.cancel()
        await healthy.enter_graceful_shutdown()
        await server.stop(grace=2)


async def watch(healthy: health.aio.HealthServicer, well: Callable[[], bool]) -> None:
    """A stuck model still answers pings: health tells the truth about it, and whoever supervises starts it again."""
    status = health_pb2.HealthCheckResponse
    while True:
        await asyncio.sleep(1)
        await healthy.set("", status.SERVING if well() else status.NOT_SERVING)


def _announce(config: DraftServiceConfig, port: int, worker: Worker) -> None:
    address = join(config.host, port)
    log.info("listening", address=address, bytes_per_sequence=worker.drafter.memory.bytes_per_sequence())
    announce(config.ready_file, address)


if __name__ == "__main__":
    main()
