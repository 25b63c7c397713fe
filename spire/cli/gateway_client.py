"""REST client for a completion from a running gateway, in one response or streamed, and for a streamed chat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from spire.http import GatewayError, answer_of, gateway_errors, no_completion, refusal_of
from spire.service.keys import authorization


@dataclass
class ClientCompletion:
    """The gateway's answer to a prompt. `seconds` is the time until the whole answer had arrived."""

    prompt: str
    # Choices in the gateway's format; those of a stream are joined from its pieces.
    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def tau(self) -> float | None:
        """Mean tokens per round from the gateway's metrics; None if nothing was drafted."""
        rounds = self.metrics.get("speculative_decoding") or {}
        return rounds.get("mean_acceptance_length") if rounds.get("num_draft_tokens") else None

    @property
    def rate(self) -> float:
        """Tokens a second after the first token; 0 if there is no second one."""
        milliseconds = self.metrics.get("mean_itl_ms")
        return 1000 / milliseconds if milliseconds else 0.0

    @property
    def summary(self) -> str:
        rate = f"{self.tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        depth = f"τ {self.tau:.2f}" if self.tau is not None else "no speculation"
        ends = ", ".join(str(choice["finish_reason"]) for choice in self.choices)
        return f"{self.tokens} tokens · {depth} · {rate} · finish: {ends}"

    def as_json(self) -> str:
        figures = {"tokens": self.tokens, "tau": self.tau, "seconds": round(self.seconds, 4)}
        if self.seconds:
            figures["tokens_per_second"] = round(self.tokens / self.seconds, 2)
        one = self.choices[0] if self.choices else {"text": "", "finish_reason": None}
        body = {"prompt": self.prompt, "text": one["text"], "finish_reason": one["finish_reason"], "usage": self.usage}
        return json.dumps(body | {"choices": self.choices, "metrics": self.metrics, **figures}, ensure_ascii=False)


def run_completion(client: httpx.Client, url: str, prompt: str, **request: Any) -> ClientCompletion:
    """Request a completion in one response. Raises GatewayError."""
    began = time.perf_counter()
    body = {"prompt": prompt, "return_metrics": True, **request}
    with gateway_errors(url):
        response = client.post(f"{url}/v1/completions", json=body, headers=authorization())
    if response.status_code != httpx.codes.OK:
        raise GatewayError(refusal_of(response))
    answer, seconds = answer_of(response), time.perf_counter() - began
    return ClientCompletion(prompt, answer["choices"], answer.get("usage") or {}, answer.get("metrics") or {}, seconds)


def stream_completion(
    client: httpx.Client, url: str, result: ClientCompletion, **request: Any
) -> Iterator[dict[str, Any]]:
    """Stream a completion of one choice: yield its pieces and fill `result`. Raises GatewayError, also mid-stream."""
    yield from _stream(client, url, "/v1/completions", {"prompt": result.prompt, **request}, result)


def stream_chat(client: httpx.Client, url: str, result: ClientCompletion, **request: Any) -> Iterator[dict[str, Any]]:
    """Stream the answer to a user's message, with pieces and errors as those of `stream_completion`."""
    messages = [{"role": "user", "content": result.prompt}]
    yield from _stream(client, url, "/v1/chat/completions", {"messages": messages, **request}, result)


def _stream(
    client: httpx.Client, url: str, path: str, request: dict[str, Any], result: ClientCompletion
) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    body = {"stream": True, "stream_options": {"include_usage": True}, "return_metrics": True} | request
    with gateway_errors(url), client.stream("POST", f"{url}{path}", json=body, headers=authorization()) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise GatewayError(refusal_of(response))
        for event in _events(response.iter_lines()):
            if error := event.get("error"):
                raise GatewayError(f"the gateway broke off: {error.get('message')}")
            result.usage = event.get("usage") or result.usage
            result.metrics = event.get("metrics") or result.metrics
            for choice in event.get("choices", []):
                delta = choice.pop("delta", {})
                piece = {"text": delta.get("content") or ""} | choice
                result.choices = [joined(result.choices[0], piece) if result.choices else piece]
                yield piece
        if not result.choices:
            raise GatewayError(no_completion(response))
    result.seconds = time.perf_counter() - began


def joined(begun: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Return the choice `begun` extended by `piece`: text and lists appended, dicts joined, other values replaced."""
    whole = begun | piece
    for name, value in begun.items():
        if isinstance(value, dict):
            whole[name] = joined(value, piece.get(name) or {})
        elif name == "text" or isinstance(value, list):
            whole[name] = value + (piece.get(name) or type(value)())
    return whole


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
