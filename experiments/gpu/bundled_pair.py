"""Part 7: the bundled pair as `spire up` serves it. τ on the GPU is that of the same prompts and seeds on the CPU."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import torch

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from experiments.gpu.system import served
from spire.bench.acceptance import MeasuredAcceptance, acceptance
from spire.bench.client import Client, Completed, Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.bench.system import FALLBACKS, System
from spire.cli.paths import choose_pair

_CONTEXT, _REQUEST, _PROMPTS, _AT_ONCE = 512, Request(64), 64, 16
_TINY_CONTEXT, _TINY_REQUEST, _TINY_PROMPTS = 24, Request(16), 2


def measure(setting: Setting, findings: Findings) -> None:
    on_gpu, fallbacks = _acceptance(setting, findings)
    # Without a GPU there is nothing that it could be compared with.
    on_cpu = None if setting.tiny else _acceptance(replace(setting, device=torch.device("cpu")), findings)[0]
    note = f"± {on_gpu.tau_ci95:.2f}, {on_gpu.contexts} prompts of {on_gpu.context}"
    note += f"; on the CPU ± {on_cpu.tau_ci95:.2f}" if on_cpu else ""
    note += "".join(f"; {count:.0f} rounds without a guess: {reason}" for reason, count in fallbacks.items() if count)
    more = {"gpu": asdict(on_gpu), "cpu": asdict(on_cpu) if on_cpu else None, "fallbacks": fallbacks}
    findings.add(Finding(f"τ at k = {on_gpu.k}", on_gpu.tau, "tokens", on_cpu.tau if on_cpu else None, note, more))
    rate = on_gpu.tokens_per_second
    findings.add(Finding(f"{_AT_ONCE} requests at once, prompts included", rate, "tokens/s"))


def _acceptance(setting: Setting, findings: Findings) -> tuple[MeasuredAcceptance, dict[str, float]]:
    """And how many blocks had no guess, by reason."""
    pair = choose_pair(None, None)
    context, request = (_TINY_CONTEXT, _TINY_REQUEST) if setting.tiny else (_CONTEXT, _REQUEST)
    prompts = PromptSource(pair.model, [BUNDLED_TEXT]).cut(_TINY_PROMPTS if setting.tiny else _PROMPTS, context, seed=0)

    async def complete(url: str) -> list[Completed]:
        async with Client(url, _AT_ONCE) as client:
            return await client.complete_all(request, prompts)

    def fallbacks(system: System) -> dict[str, float]:
        return asyncio.run(system.scrape())["gateway"].by("reason", FALLBACKS)

    with served(setting, findings, pair) as system:
        return acceptance(asyncio.run(complete(system.url)), context, request), fallbacks(system)
