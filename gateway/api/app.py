"""The REST API: routes, checks of requests, and errors as `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.api.answers import answer, unless_gone
from gateway.api.chat import ChatCompletion, ChatRequest, chat_prompt
from gateway.api.completion import Completion
from gateway.api.exposition import Exposition, Named
from gateway.api.openapi import DocumentedApi, Limits, body_of, limits_of
from gateway.api.responses import ChatResponse, CompletionResponse, answers
from gateway.api.tokenization import DetokenizeRequest, TokenizeRequest, add_tokenization
from gateway.aside import by_size
from gateway.config import GatewayConfig
from gateway.errors import BadParameter, error_body
from gateway.http.browsers import ForeignPages
from gateway.http.front import Front, error_response
from gateway.http.keys import Guard
from gateway.http.manual import add_manual
from gateway.http.page import PATHS as PAGE_PATHS, add_page
from gateway.requests.bodies import ModelName, bad_parameter, check_model, ignored_header, parsed, read_body, refusals
from gateway.requests.prompts import encode_prompts
from gateway.requests.schemas import CompletionRequest, check_logprobs, check_tokens, checked, parse_completion
from gateway.rounds.admission import Quotas, seconds_allowed
from gateway.rounds.engine import Engine
from gateway.sequence import GREEDY
from gateway.verifier_client import ServedModel
from spire import __version__
from spire.address import is_loopback
from spire.errors import SpireError
from spire.service.process_metrics import register_process


def create_app(config: GatewayConfig, engine: Engine, guard: Guard, host: str) -> ASGIApp:
    """Return the ASGI application, to be served at `host`. Its lifespan opens and closes the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.open()
        yield
        await engine.close()

    def limits() -> Limits:
        return limits_of(engine.verifier.model, _drafts(engine))

    bodies = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    app = DocumentedApi(bodies, limits, guard.open_paths, title="Spire", version=__version__, lifespan=lifespan)
    _handle_errors(app)
    _add_completions(app, config, engine)
    add_tokenization(app, engine)
    _add_state(app, engine)
    add_page(app)
    add_manual(app)
    documented = app.openapi()["paths"]
    paths = frozenset(documented) | PAGE_PATHS
    hosts = config.allow_host if is_loopback(host) else None
    bodies_at = [path for path, operations in documented.items() if "post" in operations]
    pages = ForeignPages(hosts, config.cors_origins, bodies_at) if guard.open_paths is None else None
    front = Front(app, engine.metrics, guard, paths, config.max_body_bytes, config.body_deadline, pages)
    if not config.cors_origins:
        return front
    # The outermost layer, so that web pages can read error responses too.
    shown = ["X-Request-Id", "X-Spire-Ignored", "Retry-After"]
    return CORSMiddleware(
        front, config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown
    )


def _add_completions(app: FastAPI, config: GatewayConfig, engine: Engine) -> None:
    quotas = Quotas(config.requests_per_minute, config.tokens_per_minute)
    declared = refusals(400, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504)

    @app.post(
        "/v1/completions", responses=answers(CompletionResponse) | declared, openapi_extra=body_of(CompletionRequest)
    )
    async def complete(http: Request) -> Response:
        """Complete one or more prompts, as one JSON object or as server-sent events."""
        return await answer(http, *await unless_gone(http.receive, _completion(http)))

    @app.post("/v1/chat/completions", responses=answers(ChatResponse) | declared, openapi_extra=body_of(ChatRequest))
    async def chat(http: Request) -> Response:
        """Answer a conversation, with the chat template of the model's tokenizer."""
        return await answer(http, *await unless_gone(http.receive, _chat_completion(http)))

    async def _completion(http: Request) -> tuple[Completion, dict[str, str]]:
        request, size = await parsed(http, parse_completion)
        return await _made(http, request, Completion, size), ignored_header(request)

    async def _chat_completion(http: Request) -> tuple[Completion, dict[str, str]]:
        asked, model, size = await read_body(http, ChatRequest, engine)
        prompt = await by_size(size, chat_prompt, asked.messages, model, asked, asked.add_special_tokens)
        request = await by_size(size, lambda: checked(asked.as_completion(prompt, model.info.max_context)))
        return await _made(http, request, ChatCompletion, size), ignored_header(asked)

    async def _made(http: Request, request: CompletionRequest, kind: type[Completion], size: int) -> Completion:
        model = engine.model
        check_model(request.model, model)
        _check_offered(request, engine, model)
        check_tokens(request, model.info.vocab_size)
        seconds = seconds_allowed(http.headers, config.request_deadline)
        prompts = await by_size(size, encode_prompts, request, model, min(config.max_choices, config.max_waiting))
        check_logprobs(request, [*map(len, prompts)])
        completion = kind(engine, request, model, prompts, http.state.request_id, seconds)
        completion.key = http.state.key_name or ""
        completion.charge = quotas.charge(http.state.key_name, completion.most_tokens, time.monotonic())
        return completion


def _check_offered(request: CompletionRequest, engine: Engine, model: ServedModel) -> None:
    """Raise BadParameter if the request asks for a draft, a rule or a grammar that is not available."""
    draft, drafts = request.speculation.draft, _drafts(engine)
    if draft not in drafts:
        raise BadParameter("speculation.draft", f"no draft {draft[:64]!r} is connected; known: {', '.join(drafts)}")
    rule, rules = request.speculation.rule, engine.config.rules
    if rule is not None and rule not in rules:
        raise BadParameter("speculation.rule", f"rule {rule!r} is not on here; these are: {', '.join(rules)}")
    if request.shape is not None and model.info.no_grammars:
        raise BadParameter(request.shape.field, f"no grammar can be asked for: {model.info.no_grammars}")


def _drafts(engine: Engine) -> list[str]:
    info = engine.draft_info
    return ["off", "auto"] + ([info.model_name, info.kind] if info else [])


def _add_state(app: FastAPI, engine: Engine) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposition(engine))
    register_process(registry)

    @app.get("/v1/models", responses=refusals(503))
    async def models() -> dict[str, Any]:
        """Return a list whose only entry is the served model."""
        return {"object": "list", "data": [_model_card(engine)]}

    @app.get("/v1/models/{name:path}", responses=refusals(404, 503))
    async def model(name: ModelName) -> dict[str, Any]:
        check_model(name, engine.model)
        return _model_card(engine)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Report that the gateway is alive."""
        return {"status": "ok"}

    @app.get("/ready", responses=refusals(503))
    async def ready() -> dict[str, Any]:
        """Report whether completions can be served, and whether a draft is connected."""
        model = engine.model
        draft = "off" if engine.draft is None else "connected" if engine.draft.up else "absent"
        return {
            "status": "ready" if draft == "connected" else "degraded",
            "model": model.name,
            "verifier": "connected",
            "draft": draft,
            "draft_kind": engine.draft_info.kind if engine.draft_info else None,
            "max_context": model.info.max_context,
            "max_sequences": model.info.max_sequences,
            "device": model.info.device,
            "dtype": model.info.dtype,
            "kernels": model.info.kernels,
            "boards": str(engine.config.boards) if engine.config.boards else None,
        }

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics(
        names: Annotated[list[str] | None, Query(alias="name[]", description="Only families of these samples.")] = None,
    ) -> Response:
        """Return the metrics as Prometheus text."""
        collected = Named(registry, frozenset(names)) if names else registry
        return Response(generate_latest(collected), media_type=CONTENT_TYPE_LATEST)


def _model_card(engine: Engine) -> dict[str, Any]:
    model, draft = engine.model, engine.draft_info
    return {
        "id": model.name,
        "object": "model",
        "created": model.seen_at,
        "owned_by": "spire",
        "max_model_len": model.info.max_context,
        "parameters": model.info.parameters,
        "chat_template": bool(model.chat_template.source),
        "fingerprint": model.info.target_fingerprint,
        "dtype": model.info.dtype,
        "rules": [GREEDY, *engine.config.rules],
        "suggested_sampling": {field.name: value for field, value in model.info.suggested_sampling.ListFields()},
        "draft": {
            "name": draft.model_name,
            "kind": draft.kind,
            "k": "auto" if engine.config.k is None else engine.config.k,
            "max_k": engine.deepest,
            # MagicDec holds its memory in the verifier, which does not tell its size.
            "bytes_per_sequence": draft.state_bytes_per_sequence or None,
            "gains": [gain._asdict() for gain in engine.drafting.gains],
        }
        if draft
        else None,
    }


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(SpireError)
    @app.exception_handler(Exception)
    async def any_other(_: Request, error: Exception) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(bad_parameter(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        body = error_body(str(error.detail), "invalid_request_error", None, None)
        return JSONResponse(body, error.status_code, headers=error.headers)
