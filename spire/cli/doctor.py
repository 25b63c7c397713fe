"""`spire doctor`: check this machine, the models and a running gateway, with advice on each fault.

Does not know: speed, which `spire doctor --calibrate` measures instead of guessing it from the hardware.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spire.cli.paths import OFF, choose_pair
from spire.cli.perf.calibrate import measure_machine
from spire.cli.perf.shapes import random_pair
from spire.errors import SpireError
from spire.http import client_for
from spire.model.config import MAGICDEC, load_model_config
from spire.perf.calibration import default_file
from spire.perf.shapes import SHAPES
from spire.service.keys import GATEWAY_KEY, authorization

# Maximum positions of a sequence for a shape without a model.
_SHAPE_POSITIONS = 2048


class Check(NamedTuple):
    """A result of a check. `ok` is False for a fault that must be fixed; `advice` says what to do, if anything."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Target directory to check. Default: the bundled one.", envvar="SPIRE_MODEL")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft directory, 'magicdec' or 'off'.", envvar="SPIRE_DRAFT")
    ] = None,
    url: Annotated[str, typer.Option(help="Address at which to look for a running gateway.")] = "http://127.0.0.1:8000",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine for spire perf-model instead; under a minute.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the calibration. Default: the user's cache directory.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"With --calibrate, in place of a model: {', '.join(SHAPES)}, random weights.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Use only this many layers of the shape.", min=2)] = None,
    dtype: Annotated[str, typer.Option(help="With --calibrate: auto, bfloat16 or float32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check this machine, the models and the running services. Exit code 1 when something must be mended.

    With --calibrate, measure what spire perf-model --hardware calibrated predicts from, while nothing else runs.
    """
    if shape:
        _calibrate_shape(shape, layers, calibrate, out, dtype, as_json)
        return
    if calibrate:
        measure_machine(choose_pair(model, draft), out or default_file(), dtype, as_json)
        return
    checks = [*_machine(), *_torch(), *_models(model, draft), *_gateway(url)]
    good = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": good, "checks": [check._asdict() for check in checks]}))
    else:
        _print(checks)
    raise typer.Exit(0 if good else 1)


def _calibrate_shape(
    shape: str, layers: int | None, calibrate: bool, out: Path | None, dtype: str, as_json: bool
) -> None:
    if not calibrate or out is None:
        raise typer.BadParameter("--shape is for --calibrate, and needs --out: the default file is a model's")
    with random_pair(shape, layers, _SHAPE_POSITIONS) as (pair, _):
        measure_machine(pair, out, dtype, as_json)


def _print(checks: list[Check]) -> None:
    table = Table("check", "value", "what to do", box=None, padding=(0, 2, 0, 0))
    for check in checks:
        mark = "[green]✓[/]" if check.ok else "[red]✗[/]"
        table.add_row(f"{mark} {check.name}", escape(check.value), escape(check.advice))
    Console(highlight=False).print(table)


def _machine() -> Iterator[Check]:
    enough = sys.version_info >= (3, 11)
    yield Check("python", platform.python_version(), enough, "" if enough else "install Python 3.11 or newer")
    yield Check(
        "processor", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    )
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
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Check("device", f"cuda: {torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
        yield Check("bfloat16", "yes" if torch.cuda.is_bf16_supported() else "emulated")
        return
    yield Check("device", f"cpu, {torch.backends.cpu.get_cpu_capability()}")
    yield Check("threads", str(torch.get_num_threads()))
    flags = _processor_flags()
    fast = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    yield Check(
        "bfloat16", ", ".join(fast) or "no instructions for it", advice="" if fast else "float32 is faster here"
    )
    yield _kernels()


def _kernels() -> Check:
    import torch

    from spire.kernels import COMPILED, kernels_for
    from spire.model.placement import choose_dtype

    kernels = kernels_for(choose_dtype("auto", torch.device("cpu")))
    if kernels:
        return Check("kernels", kernels.name)
    compile_them = "install again where there is a C compiler: models may get faster"
    return Check("kernels", "torch's own", advice="" if COMPILED else compile_them)


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _models(model: Path | None, draft: str | None) -> Iterator[Check]:
    try:
        pair = choose_pair(model, draft)
    except SpireError as error:
        yield Check("models", "not usable", False, str(error))
        return
    target = _fingerprint(pair.model)
    yield target
    yield _tokenizer(pair.model)
    if pair.draft is None:
        yield Check("draft", f"{MAGICDEC}: the target itself" if pair.magicdec else OFF, advice=pair.note)
        return
    from spire.model.config import load_draft_config

    config = load_draft_config(pair.draft)
    if target.ok and config.target_fingerprint not in target.value:
        advice = f"it was trained for target {config.target_fingerprint}: train one for this target, or use --draft off"
        yield Check("draft", str(pair.draft), False, advice)
        return
    yield Check("draft", f"{pair.draft} (window {config.window}, sink {config.sink})")


def _fingerprint(directory: Path) -> Check:
    try:
        from spire.checkpoints.weights import load_target

        return Check("target", f"{directory} ({load_target(directory)[1]})")
    except ImportError:
        return Check("target", str(directory), False, "torch and safetensors are needed to read it")
    except SpireError as error:
        return Check("target", str(directory), False, str(error))


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
    except (httpx.HTTPError, httpx.InvalidURL):
        yield _port(url)
        return
    ready, admitted = answer.status_code == httpx.codes.OK, answer.status_code != httpx.codes.UNAUTHORIZED
    advice = "see the logs that 'spire up' names" if admitted else f"set {GATEWAY_KEY} to a key that it knows"
    yield Check(f"gateway {url}", answer.text[:300], ready, "" if ready else advice)


def _port(url: str) -> Check:
    address = httpx.URL(url)
    try:
        socket.create_connection(
            (address.host, address.port or {"https": 443}.get(address.scheme, 80)), timeout=1
        ).close()
    except OSError:
        return Check(f"gateway {url}", "not running", advice="start it with: spire up")
    advice = "something else listens there: choose another port with spire up --port"
    return Check(f"gateway {url}", "no answer over HTTP", False, advice)
