"""The calibration of this machine: all microbenchmarks, in three passes, on as many threads as serve target and draft.

`spire doctor --calibrate` runs the calibration. It measures a SPIRe draft's weights in fp8 where that is the default.
Does not know: how the parts are measured (see `microbenchmarks`).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any

# Imported before torch, because this module sets how OpenMP waits, as in the services.
import spire.service.process  # noqa: F401

# isort: split
import torch

from spire.model.backends.cpu.fused_layer import kernels_behind, kernels_of
from spire.model.backends.placed import draft_in_fp8
from spire.model.config import DraftConfig, ModelConfig
from spire.model.placement import choose_device, choose_dtype
from spire.perf import microbenchmarks as parts
from spire.perf.calibration import Calibration, Machine, processor_line
from spire.perf.hardware import Hardware, Measured, ModelCosts
from spire.perf.loopback import wire_cost
from spire.perf.microbenchmarks import Bench, threads_of
from spire.perf.shapes import Shape
from spire.service.heap import keep_freed_memory
from spire.service.machine_memory import memory_limit

# Each part is measured this often, alternating with the others: on a shared machine memory speed varies over time.
PASSES = 3
STEPS = (
    "layers",
    "layers, other type",
    "reading memory",
    "reading keys and values",
    "target without layers",
    "verification's sampling",
    "draft's layers",
    "draft without layers",
    "draft's sampling",
    "wire",
)


@torch.inference_mode()
def calibrate(
    target: ModelConfig,
    draft: DraftConfig,
    least_seconds: float = 0.2,
    begin: Callable[[str], None] = lambda step: None,
    dtype: str = "auto",
    narrow: bool = False,
) -> Calibration:
    """Measure this machine at the widths of `target` and of a SPIRe draft with one layer per tapped layer.

    `dtype` "auto" is the type that services choose on this machine. `narrow`: the checkpoint stores bfloat16. `begin`
    is called with each of STEPS as the step begins, PASSES times; each step takes at least a few times `least_seconds`.
    """
    began = time.perf_counter()
    keep_freed_memory()  # as the services do
    device = choose_device("auto")
    bench = Bench(device, choose_dtype(dtype, device), least_seconds, narrow)
    other = replace(bench, dtype=torch.float32 if bench.dtype == torch.bfloat16 else torch.bfloat16)
    threads, threads_for_draft = torch.get_num_threads(), threads_of(target, draft)
    passes = [_every_part(target, draft, bench, other, threads_for_draft, begin) for _ in range(PASSES)]
    measured, bandwidth, matmul_other = medians(passes)
    machine, matmul = _machine(device, threads, threads_for_draft), measured.target.matmul
    on_gpu = device.type == "cuda"
    hardware = Hardware(
        name=machine.device,
        flops_per_second=max(speed for _, speed in matmul),
        bytes_per_second=bandwidth,
        bytes_per_value=bench.dtype.itemsize,
        measured=measured,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else memory_limit(),
        carrier="cuda_ipc" if on_gpu else "shared_memory",
    )
    return Calibration(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_seconds=round(time.perf_counter() - began, 1),
        machine=machine,
        target=Shape.of(target),
        dtype=_name(bench.dtype),
        matmul={_name(bench.dtype): matmul, _name(other.dtype): matmul_other},
        hardware=hardware,
    )


def _every_part(
    target: ModelConfig, draft: DraftConfig, bench: Bench, other: Bench, for_draft: int, begin: Callable[[str], None]
) -> tuple[Measured, float, tuple[tuple[int, float], ...]]:
    """Run all microbenchmarks once, those of the draft with `for_draft` threads.

    Returns the costs, the memory bandwidth (bytes/s) and the products in the other dtype.
    """
    steps = iter(STEPS)

    def step(measure: Callable[..., Any], *given: Any) -> Any:
        begin(next(steps))
        return measure(*given)

    matmul = step(parts.products, target, bench)
    matmul_other = step(parts.products, target, other)
    bandwidth = step(parts.read_bandwidth, bench)
    kv_read = step(parts.kv_read_cost, target, bench)
    fused = kernels_of(target, bench.randn(0)) is not None
    target_layer, pass_layer = step(parts.target_layer_cost, target, bench), None
    # Kernels read the weights of a float32 model as bfloat16 if that holds them. Of a model that they compute in part,
    # the weights of queries, keys and values take more.
    narrow = bench.narrow and kernels_behind(target, bench.randn(0)) is not None
    width = torch.bfloat16.itemsize if narrow else bench.dtype.itemsize
    if fused:  # the target's forward; the passes of a vanilla draft run layer by layer
        target_layer, pass_layer = parts.fused_target_layer_cost(target, matmul, bandwidth, bench, width), target_layer
    verify_sampling = step(parts.verify_sampling_cost, target, draft, bench)
    threads = torch.get_num_threads()
    torch.set_num_threads(for_draft)
    try:
        fp8 = fused and draft_in_fp8(bench.device, bench.dtype)
        draft_matmul, draft_width = step(parts.products, target, bench, fp8), 1 if fp8 else width
        if fused:
            given = (target, draft, draft_matmul, bandwidth, bench, draft_width)
            draft_layer, draft_round = step(parts.fused_draft_costs, *given)
        else:
            draft_layer, draft_round = step(parts.draft_costs, target, draft, bench)
        draft_sampling = step(parts.draft_sampling_cost, target, draft, bench)
    finally:
        torch.set_num_threads(threads)
    measured = Measured(
        target=ModelCosts(matmul, target_layer, verify_sampling, width),
        draft=ModelCosts(draft_matmul, draft_layer, draft_sampling, draft_width),
        kv_read=kv_read,
        draft_round=draft_round,
        wire=step(wire_cost),
        pass_layer=pass_layer,
    )
    return measured, bandwidth, matmul_other


def medians(passes: Sequence[Any]) -> Any:
    """Return the median of each figure over an odd number of `passes`, in the structure of one pass."""
    first = passes[0]
    if is_dataclass(first) and not isinstance(first, type):
        each = {part.name: medians([getattr(one, part.name) for one in passes]) for part in fields(first)}
        return replace(first, **each)
    if isinstance(first, tuple):
        return tuple(medians(part) for part in zip(*passes, strict=True))
    return None if first is None else statistics.median(passes)


def _machine(device: torch.device, threads: int, threads_for_draft: int) -> Machine:
    processor = processor_line("model name") or platform.processor() or platform.machine()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=processor,
        cores=os.cpu_count() or 1,
        threads=threads,
        draft_threads=threads_for_draft,
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{processor}, {threads} thread{'s' * (threads > 1)}",
        torch=torch.__version__,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
