"""`spire complete "prompt"`: one completion from a running gateway, streamed to the terminal.

What it does not know: anything about models; it is a REST client like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from spire.errors import SpireError

_DEFAULT_URL = "http://127.0.0.1:8000"


class GatewayError(SpireError):
    """The gateway could not be reached, or refused; the message says which and what to do."""


@dataclass
class Completion:
    """What came back, and how long the client waited for it, in seconds."""

    prompt: str
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def tau(self) -> float | None:
        """Mean tokens a round, from the gateway's metrics; None when nothing was drafted."""
        rounds = self.metrics.get("speculative_decoding") or {}
        return rounds.get("mean_acceptance_length") if rounds.get("num_draft_tokens") else None

    @property
    def summary(self) -> str:
        rate = f"{self.tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        depth = f"τ {self.tau:.2f}" if self.tau is not None else "no speculation"
        return f"{self.tokens} tokens · {depth} · {rate} · finish: {self.finish_reason}"

    def as_json(self) -> str:
        figures = {"tokens": self.tokens, "tau": self.tau, "seconds": round(self.seconds, 4)}
        if self.seconds:
            figures["tokens_per_second"] = round(self.tokens / self.seconds, 2)
        body = {"prompt": self.prompt, "text": self.text, "finish_reason": self.finish_reason, "usage": self.usage}
        return json.dumps(body | {"metrics": self.metrics, **figures}, ensure_ascii=False)


def complete(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    url: Annotated[str, typer.Option(help="Where the gateway listens.")] = _DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most probable tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = True,
    speculation: Annotated[str | None, typer.Option(help="'off' decodes plainly.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Complete a prompt through a running gateway."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    request: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if stop:
        request["stop"] = stop
    if speculation is not None:
        request["speculation"] = {"draft": speculation}
    if stream and not as_json:
        result = Completion(prompt)
        for piece in stream_completion(url, result, **request):
            typer.echo(piece, nl=False)
        typer.echo()
    else:
        result = run_completion(url, prompt, **request)
        typer.echo(result.as_json() if as_json else result.text)
    if not as_json:
        Console(stderr=True, highlight=False).print(f"[dim]{result.summary}[/]")


def run_completion(url: str, prompt: str, **request: Any) -> Completion:
    """One completion in one answer. Raises GatewayError."""
    began = time.perf_counter()
    body = {"prompt": prompt, "return_metrics": True, **request}
    with _explained(url), httpx.Client(timeout=None) as client:
        response = client.post(f"{url}/v1/completions", json=body)
    if response.status_code != httpx.codes.OK:
        raise GatewayError(_refusal(response))
    answer = response.json()
    choice = answer["choices"][0]
    return Completion(
        prompt,
        choice["text"],
        choice["finish_reason"],
        answer.get("usage") or {},
        answer.get("metrics") or {},
        time.perf_counter() - began,
    )


def stream_completion(url: str, result: Completion, **request: Any) -> Iterator[str]:
    """Pieces of text as they come; `result` is filled on the way. Raises GatewayError, also in mid-stream."""
    began = time.perf_counter()
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_metrics": True}
    body = {"prompt": result.prompt, **options, **request}
    with (
        _explained(url),
        httpx.Client(timeout=None) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        if response.status_code != httpx.codes.OK:
            response.read()
            raise GatewayError(_refusal(response))
        for event in _events(response.iter_lines()):
            if error := event.get("error"):
                raise GatewayError(f"the gateway broke off: {error.get('message')}")
            result.usage = event.get("usage") or result.usage
            result.metrics = event.get("metrics") or result.metrics
            for choice in event.get("choices", []):
                result.text += choice["text"]
                result.finish_reason = choice["finish_reason"] or result.finish_reason
                yield choice["text"]
    result.seconds = time.perf_counter() - began


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns what httpx raises into one sentence that says what to do."""
    try:
        yield
    except httpx.ConnectError as error:
        raise GatewayError(f"no gateway at {url}: start one with 'spire up', or name another with --url") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GatewayError(f"the connection to {url} failed: {error}") from error


def _refusal(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    return f"the gateway refused ({response.status_code}): {message}"
