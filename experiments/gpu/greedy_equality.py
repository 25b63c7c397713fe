"""Part 1: the bundled pair's greedy text through the services, plain and speculated.

In fp32 they are the same token for token, but for two logits that are equal to the last bits. In bf16 sums of another
order may part them, and how often is a figure.
"""

from __future__ import annotations

import asyncio

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from experiments.gpu.system import served
from spire.bench.client import Client, Request
from spire.bench.peers.divergence import Divergence, divergence
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.bench.system import System
from spire.cli.paths import choose_pair

_DEPTH = 4
# And how many texts ought to part.
_TYPES = (("float32", 0), ("bfloat16", None))
_LENGTHS, _PER_LENGTH, _GENERATED = (5, 33, 130, 257, 700, 1500), 6, 128
_TINY_LENGTHS, _TINY_PER_LENGTH, _TINY_GENERATED = (5, 40), 1, 12


def measure(setting: Setting, findings: Findings) -> None:
    pair = choose_pair(None, None)
    prompts = prompts_of(setting, PromptSource(pair.model, [BUNDLED_TEXT]))
    for dtype, predicted in _TYPES[:1] if setting.tiny else _TYPES:
        what = f"{dtype}: texts that part, k = {_DEPTH} from k = 0"
        with findings.attempt(what), served(setting, findings, pair, dtype) as system:
            found = _parted(system, prompts, _TINY_GENERATED if setting.tiny else _GENERATED)
            note = f"of {found.texts} texts, {found.tokens} tokens"
            findings.add(Finding(what, found.partings, "texts", predicted, note, found.to_json()))


def prompts_of(setting: Setting, source: PromptSource) -> list[list[int]]:
    """Prompts of mixed lengths, in which neighbours differ in length."""
    lengths = _TINY_LENGTHS if setting.tiny else _LENGTHS
    each = _TINY_PER_LENGTH if setting.tiny else _PER_LENGTH
    groups = [source.cut(each, length, seed=length) for length in lengths]
    return [group[at] for at in range(each) for group in groups]


def _parted(system: System, prompts: list[list[int]], generated: int) -> Divergence:
    plain, drafted = (asyncio.run(_texts(system.url, prompts, generated, k)) for k in (0, _DEPTH))
    return divergence("greedy", plain, drafted)


async def _texts(url: str, prompts: list[list[int]], generated: int, k: int) -> list[list[int]]:
    request = Request(generated, temperature=0, k=k, cache_salt=f"k = {k}")
    async with Client(url, len(prompts)) as client:
        return [completed.token_ids for completed in await client.complete_all(request, prompts)]
