"""The REST client of the measurements: concurrent completions, each returned with the gateway's metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from spire.errors import SpireError
from spire.http import answer_of, direct_async_client, distrust, past_proxy
from spire.service.keys import authorization


class BenchError(SpireError):
    """Error for a service under measurement that cannot be reached or does not answer as required."""


@dataclass(frozen=True)
class Completed:
    """One completed request: its tokens, the gateway's metrics, and when it was sent and answered (monotonic s)."""

    token_ids: list[int]
    usage: dict[str, Any]
    metrics: dict[str, Any]
    sent: float
    answered: float

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])


@dataclass(frozen=True)
class Request:
    """Parameters shared by all requests of a measurement. `k` 0 is plain decoding; None lets the gateway choose.

    The acceptance `rule` is always sent: without it, the gateway would use `invariant`, since requests have a seed.
    """

    max_tokens: int
    temperature: float = 1.0
    k: int | None = 4
    rule: str = "block"
    # Sent to a Spire gateway only: its prefix cache does not share prompts between salts.
    cache_salt: str = ""

    def body(self, prompt: list[int], seed: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": seed}
        body |= {"ignore_eos": True, "return_metrics": True, "return_token_ids": True}
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        depth = {} if self.k is None else {"k": self.k} if self.k else {"draft": "off"}
        return body | {"speculation": {"rule": self.rule} | depth}

    def streamed(self, prompt: list[int], seed: int) -> dict[str, Any]:
        """Return the body of a streamed request whose events carry token ids."""
        return self.body(prompt, seed) | {"stream": True, "stream_options": {"include_usage": True}}

    def standard(self, prompt: list[int] | str, seed: int, model: str) -> dict[str, Any]:
        """Return a body with only the fields that any server of OpenAI's completions API accepts."""
        body = {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return body | {"seed": seed, "stream": True, "stream_options": {"include_usage": True}}


# A response that is not streamed sends nothing before it is complete. The gateway itself ends requests after an hour,
# its --request-deadline.
_ANSWERED_WITHIN = httpx.Timeout(30.0, read=3660.0, pool=None)


class Client:
    """A client for completions of one running gateway, as an async context manager."""

    def __init__(self, url: str, concurrency: int):
        self.url, self.concurrency = url.rstrip("/"), concurrency
        limits = httpx.Limits(max_connections=concurrency + 2)
        self._http = direct_async_client(limits, base_url=self.url, timeout=_ANSWERED_WITHIN, headers=authorization())

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete_all(
        self,
        request: Request,
        prompts: list[list[int]],
        on_done: Callable[[Completed], None] = lambda _: None,
        seeds: Sequence[int] | None = None,
    ) -> list[Completed]:
        """Complete all prompts, at most `concurrency` at once; results are in prompt order. Raises BenchError.

        `seeds`: one for each prompt; by default its place.
        """
        gate = asyncio.Semaphore(self.concurrency)

        async def one(seed: int, prompt: list[int]) -> Completed:
            async with gate:
                completed = await self._complete(request.body(prompt, seed))
            on_done(completed)
            return completed

        given = range(len(prompts)) if seeds is None else seeds
        return await asyncio.gather(*map(one, given, prompts))

    async def _complete(self, body: dict[str, Any]) -> Completed:
        sent = time.monotonic()
        try:
            response = await self._http.post("/v1/completions", json=body)
        except httpx.ReadTimeout as error:
            raise BenchError(f"{self.url} did not answer within {_ANSWERED_WITHIN.read:.0f} s") from error
        except httpx.TransportError as error:
            advice = f"start it with `spire up`{past_proxy(self.url)}"
            absent = f"{self.url} cannot be reached ({error!r}): {advice}"
            raise BenchError(distrust(self.url, error) or absent) from error
        if response.status_code != 200:
            raise BenchError(f"{self.url} answered {response.status_code}: {response.text[:500]}")
        answer = answer_of(response)
        try:
            (choice,) = answer["choices"]
            told = choice["token_ids"], answer["usage"], answer["metrics"]
        except (KeyError, ValueError) as error:
            raise BenchError(f"{self.url} answers without token ids and metrics: it is no Spire gateway") from error
        return Completed(*told, sent, time.monotonic())
