"""A service as a process: read its options, report errors, announce its address, stop. Import before torch.

Does not know: what the service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

# Services share the cores, so a waiting OpenMP thread must soon sleep; but sleeping between the parts of a step costs
# more time than the parts themselves. This spin count bridges the gaps; longer and shorter spins are slower. OpenMP
# reads these variables when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import structlog
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError
from pydantic_settings.sources import PyprojectTomlConfigSettingsSource as TomlTable
from structlog.processors import ExceptionRenderer
from structlog.stdlib import ProcessorFormatter
from structlog.typing import ExcInfo, Processor

from spire.address import Host
from spire.errors import SpireError
from spire.service.links import explain_link
from spire.service.options_file import options_file, read_options
from spire.service.repeats import Repeats


class ServiceConfig(BaseSettings):
    """Options of a service. Sources by precedence: command line, environment, table in the options file, defaults."""

    model_config = SettingsConfigDict(frozen=True, cli_kebab_case=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        read_options()  # says what is wrong with the file
        return init_settings, env_settings, TomlTable(settings_cls, options_file())

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug tells of every request and sequence, by id."
    )
    tls: Path | None = Field(
        None,
        description="Directory with this service's tls.crt and tls.key, and ca.crt: services then talk by TLS, "
        "and only to those with a certificate of that CA. Made by `spire certs`.",
    )
    secret_file: Path | None = Field(
        None,
        description="File with a secret that all services of a system share, which its owner alone can read: a service "
        "then answers no call without it. `openssl rand -hex 32` makes one.",
    )


class ModelServiceConfig(ServiceConfig):
    """Options common to verifier and draft: the address to listen on, the device and dtype to compute with."""

    host: Host = Field("127.0.0.1", description="Address to listen on; unix:PATH for this host's processes alone.")
    shared_memory: str = Field(
        "/dev/shm",
        description="Directory in memory that verifier and draft on one host both see: activations and q lie in it, or "
        "in one inside that only their user can enter. Empty: by gRPC, as between hosts.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: what the processor is fast in.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics; 0 serves none.")
    ready_file: Path | None = Field(None, description="Write HOST:PORT or unix:PATH here once the service answers.")


Config = TypeVar("Config", bound=ServiceConfig)
Loaded = TypeVar("Loaded")

_CANNOT_START = 2


def run(name: str, config: type[Config], serve: Callable[[Config], Coroutine[Any, Any, None]]) -> None:
    """Read the service's options and run `serve` to its end. On an error print one line to stderr and exit with 2."""
    faulthandler.register(signal.SIGUSR1)
    os.umask(0o077)  # files and sockets of a service are for its own user only
    try:
        options = CliApp.run(config, cli_args=[_long_option(argument) for argument in sys.argv[1:]])
        _log_as_json(options.log_level)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(options))
        return
    except (SpireError, SettingsError) as error:
        complaint = str(error)
    except ValidationError as error:
        complaint = "; ".join(_complaint(config, ".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())
    print(f"{name}: {complaint}", file=sys.stderr)
    sys.exit(_CANNOT_START)


def _complaint(config: type[ServiceConfig], option: str, message: str) -> str:
    variable = f"{config.model_config.get('env_prefix', '')}{option}".upper()
    return explain_link(variable) or f"--{option.replace('_', '-')}: {message}"


def _long_option(argument: str) -> str:
    """Turn `--k` into `-k`, because the settings library gives names of one letter a single dash."""
    return argument[1:] if len(argument.split("=")[0]) == 3 and argument.startswith("--") else argument


def on_passing_thread(load: Callable[[], Loaded]) -> Loaded:
    """Call `load`, the heavy part of start-up, on a temporary thread and return its result.

    OpenMP keeps a team of threads for every living thread that ever computed. If the threads of all teams outnumber the
    cores, OpenMP stops spinning and a forward is much slower. So only the model thread may stay alive after computing.
    """
    with ThreadPoolExecutor(1) as passing:
        return passing.submit(load).result()


async def stop_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def announce(ready_file: Path | None, address: str) -> None:
    """Announce that the service is reachable: write `address` atomically to the ready file, if a file is given.

    Objects loaded so far are excluded from garbage collection, which would delay a gateway's rounds.
    """
    gc.collect()
    gc.freeze()
    if ready_file is not None:
        unfinished = ready_file.with_name(ready_file.name + ".part")
        unfinished.write_text(address)
        os.replace(unfinished, ready_file)


async def keep_announcing(ready_file: Path | None, well: Callable[[], bool] = lambda: True) -> None:
    """Touch the ready file every second while `well()`; the supervisor restarts a service that stops touching it."""
    while ready_file is not None:
        await asyncio.sleep(1)
        if well():
            with contextlib.suppress(FileNotFoundError):  # the supervisor is stopping too
                os.utime(ready_file)


def _log_as_json(level: str) -> None:
    """Log one JSON object per line on stderr, also for libraries. Lines repeated too often are only counted."""
    repeats = Repeats()
    stamps: list[Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso")]
    to_json = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[repeats.processor, *stamps, structlog.processors.format_exc_info, to_json],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    without_meta, exceptions = ProcessorFormatter.remove_processors_meta, ExceptionRenderer(_without_message)
    formatter = ProcessorFormatter(
        processors=[without_meta, exceptions, to_json], foreign_pre_chain=[*stamps, structlog.stdlib.add_logger_name]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(repeats.filter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _without_message(exc_info: ExcInfo) -> str:
    """Format traceback and type of an exception without its message, which may quote a client's data."""
    kind, _, trace = exc_info
    return f"{''.join(traceback.format_tb(trace))}{kind.__name__}"
