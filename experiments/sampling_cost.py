"""The time of the sampling pipeline and of each rule in a round, without the model.

    python experiments/sampling_cost.py --batch 16 --k 4 --vocabulary 32000

Logits are random with the spread of a language model's: a Zipf-like head over a long tail, in another order at every
position; `--flat` takes normal ones instead, where a nucleus holds thousands of tokens. Quickest and median of runs.
*Kernel* is all of it, from logits to tokens, by the kernel that serves on a CPU where it supports a batch.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import spire.service.process  # noqa: F401  # isort: skip  # before torch: the OpenMP settings of the services

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spire.decoding.sampling import SamplingRows, probabilities, top_m
from spire.decoding.verification import SparseDistribution, verify
from spire.model.backends.cpu.fused_verification import judge, judges
from spire.rpc.sampling import from_protos
from spire.service.heap import keep_freed_memory
from spire.v1 import tensor_pb2 as pb, verifier_pb2
from verifier_service.sampling.pipeline import Pipeline

PIPELINES: dict[str, dict[str, float]] = {
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.95, min_p 0.05": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
}


def main(
    batch: Annotated[int, typer.Option(min=1)] = 16,
    k: Annotated[int, typer.Option(min=1)] = 4,
    vocabulary: Annotated[int, typer.Option(min=64)] = 32000,
    candidates: Annotated[int, typer.Option(min=1, help="Candidates of q.")] = 256,
    flat: Annotated[bool, typer.Option(help="Normal logits, without a head.")] = False,
    repeats: Annotated[int, typer.Option(min=3)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time each part."""
    keep_freed_memory()
    with torch.inference_mode():
        times = _measure(batch, k, vocabulary, min(candidates, vocabulary), flat, repeats)
    if as_json:
        print(json.dumps({"batch": batch, "k": k, "vocabulary": vocabulary, "flat": flat, "milliseconds": times}))
        return
    table = Table("part", "quickest ms", "median ms", title=f"{batch} sequences, {k + 1} positions, {vocabulary} ids")
    for name, (quickest, median) in times.items():
        table.add_row(name, f"{quickest:.1f}", f"{median:.1f}")
    Console().print(table)


def _measure(B: int, k: int, V: int, M: int, flat: bool, repeats: int) -> dict[str, tuple[float, float]]:
    logits_BTV = _logits(B, k + 1, V, flat)
    times = {
        name: _time(lambda rows=_rows(B, **options): probabilities(logits_BTV, rows), repeats)
        for name, options in PIPELINES.items()
    }
    p_BTV = probabilities(logits_BTV, _rows(B))
    ids_BKM, probs_BKM = (x.view(B, k, M) for x in top_m(p_BTV[:, :k].flatten(0, 1), M))
    q, counts_B, base_B = SparseDistribution(ids_BKM, probs_BKM), torch.full((B,), k), torch.arange(B) * 10
    draft_BK = ids_BKM[..., 0].contiguous()
    for rule in (pb.RULE_REJECTION, pb.RULE_BLOCK, pb.RULE_INVARIANT):
        rows = _rows(B, rule=rule)
        name = pb.Rule.Name(rule).removeprefix("RULE_").lower()
        times[f"rule {name}"] = _time(lambda rows=rows: verify(p_BTV, draft_BK, counts_B, q, rows, base_B), repeats)
    times["temperature and rule invariant"] = _time(
        lambda rows=_rows(B, rule=pb.RULE_INVARIANT): verify(
            probabilities(logits_BTV, rows), draft_BK, counts_B, q, rows, base_B
        ),
        repeats,
    )
    return (
        times
        | {"penalties, bias, temperature": _time(_adjusted(logits_BTV, draft_BK, base_B), repeats)}
        | _by_kernel(logits_BTV, draft_BK, counts_B, base_B, repeats)
    )


def _by_kernel(
    logits_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, base_B: Tensor, repeats: int
) -> dict[str, tuple[float, float]]:
    (B, K), V = draft_BK.shape, logits_BTV.shape[-1]
    q_BKV = logits_BTV[:, :K].softmax(dim=-1).bfloat16()
    q, used = SparseDistribution.whole([*q_BKV], K, V, draft_BK.device), torch.empty_like(logits_BTV)
    times = {}
    for rule in (pb.RULE_BLOCK, pb.RULE_INVARIANT):
        for name, options in PIPELINES.items():
            rows = _rows(B, rule=rule, **options)
            if not judges(V, draft_BK, counts_B, q, rows):
                return {}
            work = partial(judge, used, draft_BK, counts_B, q, rows, base_B)
            rule_name = pb.Rule.Name(rule).removeprefix("RULE_").lower()
            times[f"kernel: {name}, rule {rule_name}"] = _time(work, repeats, lambda: used.copy_(logits_BTV))
    return times


def _logits(B: int, T: int, V: int, flat: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise_BTV = torch.randn(B, T, V, generator=generator)
    if flat:
        return noise_BTV
    rank_BTV = torch.rand(B, T, V, generator=generator).argsort(dim=-1) + 1
    return -1.4 * rank_BTV.log() + 0.5 * noise_BTV


def _rows(B: int, **options: float) -> SamplingRows:
    values = {"temperature": 0.8, "top_p": 1.0} | options
    return from_protos([pb.Sampling(**values, seed=seed) for seed in range(B)])  # type: ignore[arg-type]


def _adjusted(logits_BTV: Tensor, draft_BK: Tensor, base_B: Tensor) -> Callable[[], object]:
    B, T, V = logits_BTV.shape
    pipeline, slots = Pipeline(B, V, torch.device("cpu")), list(range(B))
    for slot in slots:
        start = verifier_pb2.Start(tokens=range(20), sampling=pb.Sampling(temperature=0.8, top_p=1, seed=slot))
        start.adjustments.frequency_penalty, start.adjustments.repetition_penalty = 0.5, 1.1
        start.adjustments.logit_bias[7] = 2
        pipeline.assign(slot, start, None)
    rows = pipeline.of(slots)
    return lambda: pipeline.distributions(slots, rows, logits_BTV.clone(), draft_BK, [T - 1] * B, base_B)


def _time(
    work: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    prepare()
    work()
    milliseconds = []
    for _ in range(repeats):
        prepare()
        began = time.perf_counter()
        work()
        milliseconds.append(1000 * (time.perf_counter() - began))
    return min(milliseconds), statistics.median(milliseconds)


if __name__ == "__main__":
    typer.run(main)
