"""Loads on any server of OpenAI's completions API, with standard fields only, so that no server refuses them.

A server may end a text at its model's end token. A stream reports only its total number of tokens, at its end; this
number is spread evenly over the chunks. `Figures.exact_tokens` is True if each chunk is known to be one token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer

from spire.bench.cell import Cell
from spire.bench.client import BenchError, Request
from spire.bench.load import Load
from spire.bench.throughput import measure_foreign
from spire.http import direct_client, past_proxy
from spire.service.keys import FOREIGN_KEY, authorization


@dataclass(frozen=True)
class Server:
    """A server at `url` (without /v1). Prompts are sent as token ids or, with a `tokenizer`, as text."""

    url: str
    model: str
    tokenizer: Tokenizer | None = None

    @classmethod
    def meet(cls, url: str, tokenizer: Tokenizer | None) -> Server:
        """Return the server at `url` with the model that it reports. Raises BenchError without a valid answer."""
        base = url.rstrip("/").removesuffix("/v1")
        try:
            with direct_client(timeout=30, headers=authorization(FOREIGN_KEY)) as client:
                answer = client.get(f"{base}/v1/models").raise_for_status().json()
            return cls(base, answer["data"][0]["id"], tokenizer)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            said = f"{error!r}{past_proxy(base)}"
            raise BenchError(f"{base}/v1/models does not say what is served there: {said}") from error

    def body(self, request: Request, prompt: list[int], seed: int) -> dict[str, Any]:
        return request.standard(prompt if self.tokenizer is None else self.tokenizer.decode(prompt), seed, self.model)

    def measure(self, load: Load, repeats: int, seed: int, done: Callable[[], None], warm_ups: int = 1) -> Cell:
        """Run the load to warm up, and `repeats` times to measure. `done` is called after each run."""
        runs = []
        for repeat in range(-warm_ups, repeats):
            requests = load.requests(None, seed + 1_000_000 * repeat, self.body)
            runs.append(asyncio.run(measure_foreign(self.url, requests, load.together)))
            done()
        return Cell(self.url, None, None, load.batch, load.context, runs[warm_ups:], trace=load.trace)
