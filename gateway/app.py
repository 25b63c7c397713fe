"""The REST surface: routes, their checks, and errors as `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gateway.completion import Completion
from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.errors import RETRY_AFTER_SECONDS, BadParameter, UnknownModel, error_body, rest_error
from gateway.front import Front
from gateway.metrics import Exposition
from gateway.peers import Model
from gateway.schemas import CompletionRequest, check, over_context, prompts_of
from gateway.tokenizer import PromptTooLong
from spire import __version__
from spire.errors import SpireError

RULES = ["greedy", "rejection"]
_LEFT = 499


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request is wrong",
        404: "No such model",
        413: "The body is too large",
        429: "The queue is full",
        500: "Internal error",
        503: "No verifier",
    }.items()
}
_COMPLETION_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CompletionRequest.model_json_schema()}},
    }
}


def create_app(config: GatewayConfig, engine: Engine) -> Front:
    """The whole HTTP application. Its lifespan opens and closes the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.open()
        yield
        await engine.close()

    app = FastAPI(title="Spire", version=__version__, lifespan=lifespan)
    _handle_errors(app)
    _add_completions(app, config, engine)
    _add_state(app, config, engine)
    paths = frozenset(app.openapi()["paths"])
    return Front(app, engine.metrics, paths, config.max_body_bytes, config.body_deadline)


# -- completions -----------------------------------------------------------------------------------------------------


def _add_completions(app: FastAPI, config: GatewayConfig, engine: Engine) -> None:
    @app.post("/v1/completions", responses=_ERRORS, openapi_extra=_COMPLETION_BODY)
    async def complete(http: Request) -> Response:
        """Complete one or more prompts, as one JSON object or as server-sent events."""
        request = _parse(await http.body())
        check(request)
        model = engine.model
        _check_model(request, model)
        _check_draft(request, engine)
        completion = Completion(engine, request, model, await _encode(request, model, config.max_choices))
        completion.submit()
        headers = {"X-Spire-Ignored": _header(request.ignored)} if request.ignored else {}
        if request.stream:
            return EventStream(completion, headers)
        try:
            answer = await _unless_gone(http.receive, completion.whole())
        finally:
            completion.close()
        return Response(status_code=_LEFT) if answer is None else JSONResponse(answer, headers=headers)


class EventStream(StreamingResponse):
    """Server-sent events; whoever leaves, and however, the sequences are freed."""

    def __init__(self, completion: Completion, headers: dict[str, str]):
        headers = headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(completion.events(), headers=headers, media_type="text/event-stream")
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()


def _parse(body: bytes) -> CompletionRequest:
    try:
        raw = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadParameter("body", f"the body is not valid JSON: {error}", "invalid_json") from error
    if not isinstance(raw, dict):
        raise BadParameter("body", "the body must be a JSON object", "invalid_json")
    try:
        return CompletionRequest.model_validate(raw)
    except ValidationError as error:
        raise _bad_parameter(error.errors(include_url=False, include_input=False)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _bad_parameter(problems: Any) -> BadParameter:
    param = ".".join(str(part) for part in problems[0]["loc"]) or "body"
    # A union complains once for each of its types, under the type's name: the field's own name is enough.
    param = param.removesuffix(".str").removesuffix(".list[str]")
    return BadParameter(param, "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems[:8]))


def _check_model(request: CompletionRequest, model: Model) -> None:
    if request.model is not None and request.model != model.name:
        raise UnknownModel(f"model {request.model!r} is not served here; {model.name!r} is")


def _check_draft(request: CompletionRequest, engine: Engine) -> None:
    wanted, info = request.speculation.draft, engine.draft.info if engine.draft else None
    known = ["off", "auto"] + ([info.model_name, info.kind] if info else [])
    if wanted not in known:
        raise BadParameter("speculation.draft", f"no draft {wanted!r} is connected; known: {', '.join(known)}")


async def _encode(request: CompletionRequest, model: Model, max_choices: int) -> list[list[int]]:
    """Token ids of every prompt, with room for the output behind each."""
    context = model.info.max_context
    prompts = prompts_of(request.prompt, context, model.info.vocab_size, max_choices // request.n)
    encoded = []
    for prompt in prompts:
        try:
            tokens = await model.codec.encode(prompt, context) if isinstance(prompt, str) else prompt
        except PromptTooLong as error:
            raise BadParameter("prompt", str(error), "context_length_exceeded") from error
        if not tokens:
            raise BadParameter("prompt", "a prompt has no tokens")
        if len(tokens) + request.max_tokens > context:
            raise over_context(len(tokens), None if len(tokens) >= context else request.max_tokens, context)
        encoded.append(tokens)
    return encoded


async def _unless_gone(receive: Callable[[], Awaitable[Any]], answer: Any) -> dict[str, Any] | None:
    """The answer; None when the client left before it came."""
    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(names: list[str]) -> str:
    return ", ".join(ascii(name)[1:-1][:64] for name in names[:16])


# -- the state of the service ----------------------------------------------------------------------------------------


def _add_state(app: FastAPI, config: GatewayConfig, engine: Engine) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposition(engine.metrics, engine.gauges, config.vllm_metrics))

    @app.get("/v1/models", responses={503: _ERRORS[503]})
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model_card(engine)]}

    @app.get("/v1/models/{name:path}", responses={404: _ERRORS[404], 503: _ERRORS[503]})
    async def model(name: str) -> dict[str, Any]:
        card = _model_card(engine)
        if name != card["id"]:
            raise UnknownModel(f"model {name!r} is not served here; {card['id']!r} is")
        return card

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: _ERRORS[503]})
    async def ready() -> dict[str, Any]:
        """Whether completions can be served, and whether they can be drafted."""
        model = engine.model
        draft = "off" if engine.draft is None else "connected" if engine.draft.up else "absent"
        status = "ready" if draft == "connected" else "degraded"
        kind = engine.draft.info.kind if engine.draft and engine.draft.info else None
        return {"status": status, "model": model.name, "verifier": "connected", "draft": draft, "draft_kind": kind}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _model_card(engine: Engine) -> dict[str, Any]:
    model, draft = engine.model, engine.draft.info if engine.draft else None
    return {
        "id": model.name,
        "object": "model",
        "created": model.seen_at,
        "owned_by": "spire",
        "max_model_len": model.info.max_context,
        "fingerprint": model.info.target_fingerprint,
        "dtype": model.info.dtype,
        "rules": RULES,
        "draft": {
            "name": draft.model_name,
            "kind": draft.kind,
            "k": "auto" if engine.config.k is None else engine.config.k,
        }
        if draft
        else None,
    }


# -- errors ----------------------------------------------------------------------------------------------------------


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(SpireError)
    async def ours(_: Request, error: SpireError) -> Response:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _error_response(_bad_parameter(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        body = error_body(str(error.detail), "invalid_request_error", None, None)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return _error_response(error)


def _error_response(error: Exception) -> Response:
    status, body = rest_error(error)
    retry = RETRY_AFTER_SECONDS.get(status)
    return JSONResponse(body, status, headers={"Retry-After": str(retry)} if retry else None)
