"""Part 0: what the machine itself does. Predictions of the other parts begin with its copy rate."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from experiments.gpu.expectation import weight_bytes
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import Shape
from spire.rpc.cuda_ipc import share

_ROWS = (1, 8, 32, 64, 128, 160, 256)
# Layers whose weights are read in turns, so that no cache holds the next one's.
_LAYERS = 4
_SHARED = b"what one process writes another reads"


def measure(setting: Setting, findings: Findings) -> None:
    rate = copy_rate(setting)
    note = "3.0 was seen on an H100, 4.3 on an H200"
    findings.add(Finding("copy rate, bytes read and written", rate / 1e12, "TB/s", note=note))
    shape = shape_of(setting)
    floor = weight_bytes(shape) / rate
    for rows, seconds in products_by_rows(setting, shape):
        what = f"all weights, {rows} rows"
        findings.add(Finding(what, 1000 * seconds, "ms", 1000 * floor, "predicted: weights at the copy rate"))
    findings.add(_compiler())
    findings.add(_shared_memory(setting))


def copy_rate(setting: Setting) -> float:
    """Bytes a second of a copy from memory to memory, those read and those written."""
    size = 2**20 if setting.tiny else 2**32
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * size / Bench(setting.device, torch.uint8, setting.least_seconds).seconds(lambda: target.copy_(source))


@torch.inference_mode()
def products_by_rows(setting: Setting, shape: Shape) -> list[tuple[int, float]]:
    """Seconds of a step's matrix products alone, all layers and the unembedding, by rows."""
    bench = Bench(setting.device, torch.bfloat16, setting.least_seconds)
    D, F, heads = shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim
    sizes = [(heads, D), *[(shape.kv_heads * shape.head_dim, D)] * 2, (D, heads), *[(F, D)] * 2, (D, F)]
    layers = [[bench.randn(*size) for size in sizes] for _ in range(min(_LAYERS, shape.layers))]
    head = bench.randn(shape.vocab_size, D)
    measured = []
    for rows in _ROWS:
        inputs = {width: bench.randn(rows, width) for width in {D, F, heads}}

        def multiply(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weights in layers:
                for weight in weights:
                    torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        def unembed(inputs: dict[int, torch.Tensor] = inputs) -> None:
            torch.nn.functional.linear(inputs[D], head)

        seconds = bench.seconds(multiply) * shape.layers / len(layers) + bench.seconds(unembed)
        measured.append((rows, seconds))
    return measured


def _compiler() -> Finding:
    """Try the C compiler that Triton needs when it runs."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return Finding("C compiler", False, note="no cc, gcc or clang")
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "main.c", Path(directory) / "main"
        source.write_text("int main(void) { return 42; }\n")
        built = subprocess.run([compiler, str(source), "-o", str(program)], capture_output=True, text=True)
        works = built.returncode == 0 and subprocess.run([str(program)]).returncode == 42
    return Finding("C compiler", works, note=compiler if works else built.stderr[-200:])


def _shared_memory(setting: Setting) -> Finding:
    """Open memory of the GPU in another process, which must find there what this one wrote."""
    what = "CUDA IPC opens"
    if setting.device.type != "cuda":
        return Finding(what, None, note="no GPU")
    try:
        memory, handle = share(len(_SHARED), setting.device)
        memory.copy_(torch.frombuffer(bytearray(_SHARED), dtype=torch.uint8))
        torch.cuda.synchronize()
    except OSError as error:
        return Finding(what, False, note=str(error))
    command = [sys.executable, "-m", "experiments.gpu.ipc_reader", handle.hex(), str(len(_SHARED))]
    read = subprocess.run(command, capture_output=True, timeout=60)
    note = "" if read.stdout == _SHARED else read.stderr.decode(errors="replace")[-200:]
    return Finding(what, read.stdout == _SHARED, note=note)
