"""Greedy continuations of token ids: through REST by a running system, and by `transformers`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from transformers import AutoModelForCausalLM


class Continued(NamedTuple):
    """The continuations, and how many of their tokens were drafted and accepted, or drafted and rejected."""

    texts: list[list[int]]
    accepted: int
    rejected: int


def complete(url: str, prompts: list[list[int]], generated: int, **extra: object) -> Continued:
    """Continue all prompts at once by as many tokens each. `extra` is put into the requests."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> dict:
        body = {"prompt": prompt, "max_tokens": generated, "temperature": 0, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body | {"return_token_ids": True} | extra)
        assert response.status_code == 200, response.text
        return response.json()

    async def everything() -> list[dict]:
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(base_url=url, timeout=1000, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    answers = asyncio.run(everything())
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    counts = (sum(one[f"{name}_prediction_tokens"] for one in details) for name in ("accepted", "rejected"))
    return Continued([answer["choices"][0]["token_ids"] for answer in answers], *counts)


def by_transformers(directory: Path, prompts: list[list[int]], generated: int) -> list[list[int]]:
    """The same continuations in fp32 by `transformers`, prompts of one length at a time so that nothing is padded."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    continuations: dict[int, list[int]] = {}
    for length in set(map(len, prompts)):
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[index] for index in rows])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=generated, do_sample=False)
        continuations |= dict(zip(rows, out[:, length:].tolist(), strict=True))
    return [continuations[index] for index in range(len(prompts))]
