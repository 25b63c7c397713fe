"""Starting the verifier service from its options: load the target, size its cache, open the port."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from grpc_health.v1 import health, health_pb2_grpc

from spire.address import join
from spire.checkpoints.chat_template import read_chat_template
from spire.checkpoints.generation import read_generation
from spire.checkpoints.names import model_name
from spire.checkpoints.random_weights import has_random_weights
from spire.checkpoints.tokenizer import ids_without_text, load_tokenizer
from spire.checkpoints.weights import load_target
from spire.errors import CheckpointError
from spire.model.backends.placed import backend_for
from spire.model.backends.reference import Reference
from spire.model.cache.placed import cache_for
from spire.model.config import ModelConfig, load_model_config, unknown_keys
from spire.model.placement import choose_device, choose_dtype, device_name, leaves_cores, loads_kernels_late
from spire.model.self_speculation import SparseAttention
from spire.model.target import Target
from spire.perf.room import Room, Wishes, free_memory, room_for
from spire.perf.shape_messages import shape_to_wire
from spire.perf.shapes import Shape
from spire.rpc.channel import PROTOCOL_VERSION, listen, new_server
from spire.rpc.trust import ANYBODY, Trust
from spire.service.health import keep_reporting
from spire.service.process import stop_signal
from spire.v1 import draft_pb2_grpc, verifier_pb2 as pb, verifier_pb2_grpc as rpc
from verifier_service.config import VerifierConfig
from verifier_service.engine.batch import Limits
from verifier_service.engine.drafts import Drafts
from verifier_service.engine.engine import VerifierEngine
from verifier_service.engine.prefixes import Prefixes
from verifier_service.engine.step import ModelSteps
from verifier_service.feed.publisher import Publisher
from verifier_service.metrics import VerifierMetrics
from verifier_service.sampling.grammar import Grammars
from verifier_service.sampling.pipeline import Pipeline
from verifier_service.sampling.synthetic import coin_flips
from verifier_service.serve.draft_connections import DraftConnections
from verifier_service.serve.names import Leases
from verifier_service.serve.service import Hosted, VerifierService

log = structlog.get_logger("verifier_service")

# On a host without a spare core, sending the next round ahead of a plain round's answers pays for at most this many
# sequences: with more, the gateway's work on the answers delays the next round.
_FEW_SEQUENCES = 4
# Seconds that the engine's last turn may take at shutdown, and after a second stop signal.
_LAST_TURN, _LAST_TURN_HURRIED = 10.0, 1.0


def load(config: VerifierConfig) -> tuple[VerifierEngine, Hosted]:
    """Load the target; return the engine and the description of the target. Raises CheckpointError."""
    began = time.monotonic()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    shape = load_model_config(config.model)
    wishes = Wishes(config.max_sequences, context=config.max_context, budget=int(config.cache_gb * 1e9))
    wishes.check(shape.max_position_embeddings, shape.sliding_window)
    if shape.longest < shape.max_position_embeddings:
        log.info("sequences end at the model's sliding window", positions=shape.longest)
    tokenizer = _read_tokenizer(config.model, shape)
    end_tokens, sampling, unusable = read_generation(config.model, shape)
    if unusable:
        log.warning("suggestions of generation_config.json are left out", unusable=unusable)
    if config.lossy_synthetic_acceptance is None and has_random_weights(config.model):
        raise CheckpointError(f"{config.model} holds a shape and no weights: only measurements of time can serve it")
    target, fingerprint = load_target(config.model, dtype, device)
    parameters = sum(weight.numel() for weight in target.parameters())  # counted before packing takes them
    backend = backend_for(device)
    packed = backend.pack(target)
    # The memory for sequences is measured when the weights are in memory.
    position_bytes, at_once = shape.kv_bytes_per_position // 2 * dtype.itemsize, device.type != "cpu"
    room = room_for(wishes, shape.longest, position_bytes, free_memory(device), at_once)
    grammars, no_grammars = _read_grammars(tokenizer.tokenizer_json, shape.vocab_size, end_tokens)
    engine = _build_engine(packed, backend, config, room, grammars)
    if loads_kernels_late(device):
        engine.steps.warm_up()
    engine.measure()
    info = pb.GetInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        model_name=_model_name(config),
        target_fingerprint=fingerprint,
        tokenizer_hash=hashlib.sha256((config.model / "tokenizer.json").read_bytes()).hexdigest()[:16],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_hidden_layers,
        max_context=room.context,
        max_sequences=room.sequences,
        end_tokens=end_tokens,
        epoch=uuid.uuid4().hex,
        dtype=str(dtype).removeprefix("torch."),
        max_speculation_depth=config.max_depth,
        no_grammars=no_grammars,
        shape=shape_to_wire(Shape.of(shape)),
        most_sequences_ahead=room.sequences if leaves_cores(device) else _FEW_SEQUENCES,
        suggested_sampling=pb.SuggestedSampling(**sampling.model_dump(exclude_none=True)),
        load_seconds=time.monotonic() - began,
        device=device_name(device),
        kernels=backend.kernels,
        parameters=parameters,
    )
    return engine, Hosted(info, tokenizer, grammars)


def _read_grammars(tokenizer_json: bytes, vocab_size: int, end_tokens: tuple[int, ...]) -> tuple[Grammars | None, str]:
    """Return the grammar compiler, or None and the reason: the target is then served without structured output."""
    try:
        return Grammars(tokenizer_json, vocab_size, end_tokens), ""
    except CheckpointError as error:
        log.warning("no structured output", reason=str(error))
        return None, str(error)


def _model_name(config: VerifierConfig) -> str:
    """Return the model name for requests; the name of a lossy verifier contains a warning."""
    name, rate = config.served_model_name or model_name(config.model), config.lossy_synthetic_acceptance
    return name if rate is None else f"{name} (LOSSY: synthetic acceptance {rate})"


def _read_tokenizer(model: Path, shape: ModelConfig) -> pb.GetTokenizerResponse:
    """Read the tokenizer and the chat template. Log unused keys of config.json and token ids without text."""
    tokenizer, chat = load_tokenizer(model, shape.vocab_size), read_chat_template(model)
    if unknown := unknown_keys(model):
        log.info("keys of config.json that nobody reads", keys=unknown)
    if without := ids_without_text(tokenizer, shape.vocab_size):
        log.info("ids of the vocabulary without text", ids=without, vocab_size=shape.vocab_size)
    return pb.GetTokenizerResponse(
        tokenizer_json=tokenizer.to_str().encode(), chat_template=chat.template, special_tokens=chat.special_tokens
    )


def _build_engine(
    target: Target, backend: Reference, config: VerifierConfig, room: Room, grammars: Grammars | None
) -> VerifierEngine:
    shape, weight, slots = target.config, target.embed_tokens.weight, room.sequences
    dtype, device = weight.dtype, weight.device
    parking = slots if config.prefix_cache else 0
    cache = cache_for(shape, slots, room.context, dtype, device, parking, room.budget)
    sparse = SparseAttention(config.self_sink, config.self_window)
    pipeline = Pipeline(slots, shape.vocab_size, device, grammars)
    steps = ModelSteps(target, cache, pipeline, sparse, config.self_top_m, backend)
    if (rate := config.lossy_synthetic_acceptance) is not None:
        log.warning("LOSSY: what the target says of draft tokens is ignored", synthetic_acceptance=rate)
        steps.rule = coin_flips(rate)
    metrics = VerifierMetrics(slots, cache)
    publisher = Publisher(slots, shape.hidden_size, dtype, device, metrics)
    limits = Limits(shape.vocab_size, room.context, config.max_depth)
    prefixes = Prefixes(cache, config.prefix_cache)
    return VerifierEngine(steps, publisher, prefixes, limits, metrics, config.token_budget)


@asynccontextmanager
async def listening(
    engine: VerifierEngine, hosted: Hosted, config: VerifierConfig, trust: Trust = ANYBODY, drain_seconds: float = 0.0
) -> AsyncIterator[str]:
    """Serve gRPC inside the `with` block. Yields the bound address; leaving the block drains and stops the engine.

    An engine whose model is stuck cannot be stopped: `engine.ended` is then not done afterwards.
    """
    server, healthy = new_server(trust), health.aio.HealthServicer()
    drafts = engine.draft_requests.drafts = Drafts(hosted.info, config.self_window, config.self_sink)
    service = VerifierService(engine, hosted, config, drafts)
    drafting = DraftConnections(engine, hosted.info, drafts, config.shared_memory)
    rpc.add_VerifierServicer_to_server(service, server)
    draft_pb2_grpc.add_DraftingServicer_to_server(drafting, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = listen(server, config.host, config.port, trust)
    engine.start()
    await server.start()
    watch = asyncio.create_task(keep_reporting(healthy, lambda: not engine.pace.is_stuck(config.stuck_seconds)))
    try:
        yield join(config.host, port)
    finally:
        hurry = asyncio.create_task(stop_signal())
        watch.cancel()
        await healthy.enter_graceful_shutdown()
        await _drained(engine, service.leases, drain_seconds, hurry)
        await server.stop(grace=2)
        await _ended(engine, hurry)
        hurry.cancel()


async def _drained(engine: VerifierEngine, leases: Leases, seconds: float, hurry: asyncio.Task[None]) -> None:
    """Wait until no gateway or no sequence is left, `seconds` have passed, or another stop signal arrives."""
    deadline = time.monotonic() + seconds
    while leases.any_open and engine.slots.sequences and not engine.ended.done():
        if hurry.done() or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)


async def _ended(engine: VerifierEngine, hurry: asyncio.Task[None]) -> None:
    """Stop the engine. Wait for its thread to end, but at most _LAST_TURN seconds, or less after another signal."""
    engine.stop()
    began = time.monotonic()
    while not engine.ended.done():
        if time.monotonic() - began > (_LAST_TURN_HURRIED if hurry.done() else _LAST_TURN):
            log.error("the model is stuck and does not end")
            break
        await asyncio.sleep(0.01)
