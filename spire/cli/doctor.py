"""`spire doctor`: check this machine, the models and a running gateway, with advice on each fault.

`spire doctor --calibrate` measures this machine instead, for `spire perf-model`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spire.cli.options import Json, Layers, ServedDraft, ServedModel
from spire.cli.paths import OFF, Pair, choose_pair, random_pair
from spire.cli.terminal import progress_bar
from spire.errors import SpireError
from spire.http import client_for, distrust
from spire.model.config import MAGICDEC, load_draft_config, load_model_config
from spire.perf.calibration import Calibration, default_file, processor_line, save
from spire.perf.gpus import gpus
from spire.perf.shapes import SHAPES, trained_config
from spire.service.keys import GATEWAY_KEY, authorization

# Maximum positions of a sequence for a shape without a model.
_SHAPE_POSITIONS = 2048


class Check(NamedTuple):
    """The result of a check. `ok` is False for a fault that must be fixed; `advice` to the user may be empty."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


def doctor(
    model: ServedModel = None,
    draft: ServedDraft = None,
    url: Annotated[str, typer.Option(help="Address at which to look for a running gateway.")] = "http://127.0.0.1:8000",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for spire perf-model instead; under a minute.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the calibration. Default: the user's cache.")] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"With --calibrate, in place of a model: {', '.join(SHAPES)}, random weights.")
    ] = None,
    layers: Layers = None,
    dtype: Annotated[str, typer.Option(help="With --calibrate: auto, bfloat16 or float32.")] = "auto",
    as_json: Json = False,
) -> None:
    """Check this machine, the models and the running services. Exit code 1 when something must be mended.

    With --calibrate, measure, while nothing else runs, the costs that spire perf-model --hardware calibrated uses.
    """
    if shape:
        if not calibrate or out is None:
            raise typer.BadParameter("--shape is for --calibrate, and needs --out: the default file is a model's")
        with random_pair(shape, layers, _SHAPE_POSITIONS) as (pair, _):
            return _calibrate(pair, out, dtype, as_json)
    if calibrate:
        return _calibrate(choose_pair(model, draft), out or default_file(), dtype, as_json)
    checks = [*_machine(), *_torch(), *_models(model, draft), *_gateway(url)]
    good = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": good, "checks": [check._asdict() for check in checks]}))
    else:
        table = Table("check", "value", "what to do", box=None, padding=(0, 2, 0, 0))
        for check in checks:
            mark = "[green]✓[/]" if check.ok else "[red]✗[/]"
            table.add_row(f"{mark} {check.name}", escape(check.value), escape(check.advice))
        Console(highlight=False).print(table)
    raise typer.Exit(0 if good else 1)


def _machine() -> Iterator[Check]:
    enough = sys.version_info >= (3, 11)
    yield Check("python", platform.python_version(), enough, "" if enough else "install Python 3.11 or newer")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("processor", f"{cores} cores")
    for extra, package in {"gateway": "fastapi", "model": "safetensors"}.items():
        try:
            yield Check(package, version(package))
        except PackageNotFoundError:
            yield Check(package, "not installed", False, f"pip install 'spire-serve[{extra}]'")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError:
        yield Check("torch", "not installed", False, "pip install 'spire-serve[model]'")
        return
    yield Check("torch", torch.__version__)
    seen, listed = torch.cuda.is_available(), gpus()
    for gpu in listed:
        memory = f"{gpu.free / 1024:.0f} of {gpu.total / 1024:.0f} GiB free"
        mig = ", divided by MIG" if gpu.divided else ""
        advice = "" if seen else "torch does not see it: install a build of torch for CUDA"
        yield Check("GPU", f"{gpu.name}, {memory}, driver {gpu.driver}{mig}", advice=advice)
    if seen:
        yield from _cuda()
        return
    from spire.kernels import COMPILED, kernels_for
    from spire.model.placement import choose_dtype

    yield Check("device", f"cpu, {torch.backends.cpu.get_cpu_capability()}")
    yield Check("threads", str(torch.get_num_threads()))
    flags = processor_line("flags").split()
    fast = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    advice = "" if fast else "float32 is faster here"
    yield Check("bfloat16", ", ".join(fast) or "no instructions for it", advice=advice)
    kernels = kernels_for(choose_dtype("auto", torch.device("cpu")))
    advice = "" if kernels or COMPILED else "install again where there is a C compiler: models may get faster"
    yield Check("kernels", kernels.name if kernels else "torch's own", advice=advice)


def _cuda() -> Iterator[Check]:
    """Check what services do on the first visible GPU."""
    import torch

    from spire.model.backends.gpu.fp8 import NEEDED_CAPABILITY
    from spire.rpc import cuda_ipc

    device = torch.device("cuda")
    capability = torch.cuda.get_device_capability(device)
    name, version_of = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    yield Check("device", f"cuda: {name}, compute capability {version_of}")
    yield Check("bfloat16", "yes" if torch.cuda.is_bf16_supported() else "emulated")
    yield Check("fp8 drafts", "yes" if capability >= NEEDED_CAPABILITY else "no, from compute capability 9.0 on")
    yield _triton()
    try:
        cuda_ipc.share(1, device)
        yield Check("CUDA IPC", "yes")
    except OSError as error:
        yield Check("CUDA IPC", "no", advice=f"verifier and draft exchange tensors by memory of the host ({error})")


def _triton() -> Check:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return Check("kernels", "torch's own", advice="pip install triton: attention is several times faster")
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return Check("kernels", "torch's own", advice="install a C compiler, with which Triton compiles kernels")
    return Check("kernels", f"Triton {found}")


def _models(model: Path | None, draft: str | None) -> Iterator[Check]:
    try:
        pair = choose_pair(model, draft)
    except SpireError as error:
        yield Check("models", "not usable", False, str(error))
        return
    target = _fingerprint(pair.model)
    yield target
    if target.ok:
        yield _kernels("target's kernels", pair.model)
    yield _tokenizer(pair.model)
    if pair.draft is None:
        yield Check("draft", f"{MAGICDEC}: the target itself" if pair.magicdec else OFF, advice=pair.note)
        return
    config = load_draft_config(pair.draft)
    if target.ok and config.target_fingerprint not in target.value:
        advice = f"it was trained for target {config.target_fingerprint}: train one for this target, or use --draft off"
        yield Check("draft", str(pair.draft), False, advice)
        return
    yield Check("draft", f"{pair.draft} (window {config.window}, sink {config.sink})")
    if target.ok:
        yield _kernels("draft's kernels", pair.draft)


def _fingerprint(directory: Path) -> Check:
    try:
        from spire.checkpoints.weights import load_target

        return Check("target", f"{directory} ({load_target(directory)[1]})")
    except ImportError:
        return Check("target", str(directory), False, "torch and safetensors are needed to read it")
    except SpireError as error:
        return Check("target", str(directory), False, str(error))


def _kernels(name: str, directory: Path) -> Check:
    """Check which kernels compute a model here, and what they leave to torch."""
    from spire.model.backends.placed import computed_by
    from spire.model.placement import choose_device, choose_dtype

    device = choose_device("auto")
    try:
        return Check(name, computed_by(load_model_config(directory), device, choose_dtype("auto", device)))
    except SpireError as error:
        return Check(name, "not usable", False, str(error))


def _tokenizer(directory: Path) -> Check:
    from spire.checkpoints.tokenizer import ids_without_text, load_tokenizer

    try:
        vocab_size = load_model_config(directory).vocab_size
        tokenizer = load_tokenizer(directory, vocab_size)
    except SpireError as error:
        return Check("tokenizer", "not usable", False, str(error))
    without = ids_without_text(tokenizer, vocab_size)
    advice = f"the model has {without} ids beyond it: what it says with them has no text" if without else ""
    return Check("tokenizer", f"{vocab_size - without} tokens", advice=advice)


def _gateway(url: str) -> Iterator[Check]:
    try:
        with client_for(url, timeout=3) as client:
            answer = client.get(f"{url}/ready", headers=authorization())
    except SpireError as error:
        yield Check(f"gateway {url}", "cannot be asked", False, str(error))
        return
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refused = distrust(url, error)
        yield Check(f"gateway {url}", "not trusted", False, refused) if refused else _port(url)
        return
    ready, admitted = answer.status_code == httpx.codes.OK, answer.status_code != httpx.codes.UNAUTHORIZED
    advice = "see the logs that 'spire up' names" if admitted else f"set {GATEWAY_KEY} to a key that it knows"
    yield Check(f"gateway {url}", answer.text[:300], ready, "" if ready else advice)


def _port(url: str) -> Check:
    address = httpx.URL(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.host, port), timeout=1).close()
    except OSError:
        return Check(f"gateway {url}", "not running", advice="start it with: spire up")
    advice = "something else listens there: choose another port with spire up --port"
    return Check(f"gateway {url}", "no answer over HTTP", False, advice)


def _calibrate(pair: Pair, file: Path, dtype: str, as_json: bool) -> None:
    """Calibrate at the widths of a pair, write the results to `file`, and print them. Raises SpireError without torch.

    A draft that uses no activations of the target is replaced by the draft that training makes by default.
    """
    target = load_model_config(pair.model)
    draft = load_draft_config(pair.draft) if pair.draft else None
    if draft is None or not draft.tapped_layers:
        draft = trained_config(target)
    try:
        from spire.checkpoints.weights import stores_bfloat16
        from spire.perf.calibrator import PASSES, STEPS, calibrate
    except ImportError as error:
        raise SpireError(f"measuring needs torch: pip install 'spire-serve[model]' ({error})") from error
    with progress_bar(as_json) as progress:
        task, done = progress.add_task("", total=PASSES * len(STEPS)), count()

        def begin(step: str) -> None:
            progress.update(task, description=f"{step:28}", completed=next(done))

        found = calibrate(target, draft, begin=begin, dtype=dtype, narrow=stores_bfloat16(pair.model))
        progress.update(task, completed=next(done))
    save(found, file)
    if as_json:
        return typer.echo(json.dumps({"file": str(file), "calibration": json.loads(file.read_bytes())}))
    console = Console(highlight=False)
    table = Table("measured", "value", box=None, padding=(0, 2, 0, 0))
    for name, value in _figures(found):
        table.add_row(name, value)
    console.print(table)
    console.print(f"wrote {file}; use it with: spire perf-model --hardware calibrated", soft_wrap=True)


def _figures(found: Calibration) -> Iterator[tuple[str, str]]:
    hardware, measured = found.hardware, found.hardware.measured
    assert measured is not None
    yield "device", f"{hardware.name}, {found.dtype}; {found.took_seconds} s"
    for dtype, matmul in found.matmul.items():
        speeds = " · ".join(f"{speed / 1e9:,.0f}" for _, speed in matmul)
        yield f"products, {dtype}", f"{speeds} GFLOP/s at {' · '.join(str(rows) for rows, _ in matmul)} rows"
    yield "reading memory", f"{hardware.bytes_per_second / 1e9:.1f} GB/s"
    read = measured.kv_read
    speeds = " · ".join(f"{1e-9 / seconds:.1f}" for _, seconds in read.points)
    yield "reading keys and values", f"{speeds} GB/s for {' · '.join(f'{n:g}' for n, _ in read.points)} tokens"
    for name, costs in (("target", measured.target), ("draft", measured.draft)):
        rows = f"{costs.layer.at(1) * 1e3:.3f} ms at 1 row, {costs.layer.at(80) * 1e3:.3f} at 80"
        yield f"rest of a {name} layer", rows
        row = costs.sampling.at(found.target.vocab_size) * 1e6
        yield f"{name}'s sampling", f"{row:,.0f} µs a row of {found.target.vocab_size:,}"
    yield "wire", f"{measured.wire.fixed * 1e3:.3f} ms a round trip, {1e-9 / max(measured.wire.each, 1e-15):.2f} GB/s"
