"""A service as a process: one way to read its options, to fail, to say where it listens, to stop.

Import it before torch. What it does not know: what the service does.
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
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

# Services share the cores, so a thread that waits must soon sleep; but sleeping between the parts of a step costs more
# than they compute. A spin of some 50 to 100 µs bridges them. Over batches of 1 to 16 and contexts of 128 and 1,900,
# with and without a draft, six times as long a spin costs 8 % of the tokens a second, and a third of it 4 %. OpenMP
# reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import structlog
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsError
from pydantic_settings import PyprojectTomlConfigSettingsSource as TomlTable
from structlog.typing import ExcInfo, Processor

from spire.address import Host
from spire.errors import SpireError
from spire.options_file import options_file
from spire.repeats import Repeats
from spire.service_links import explain_link


class ServiceConfig(BaseSettings):
    """Options of a service: command line, then environment, then its table of the options file, then defaults."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlTable(settings_cls, options_file())

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug tells of every request and sequence, by id."
    )
    shared_memory: str = Field(
        "/dev/shm",
        description="Directory in memory that services on one host all see: rounds and activations travel through it, "
        "or through one inside that only their user can enter. Empty: by gRPC, as between hosts.",
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
    """What both model services are told alike: where they listen, on what they compute."""

    host: Host = Field("127.0.0.1", description="Address to listen on.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: what the processor is fast in.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics; 0 serves none.")
    ready_file: Path | None = Field(None, description="Write HOST:PORT here once the service answers.")


Config = TypeVar("Config", bound=ServiceConfig)
Loaded = TypeVar("Loaded")

_CANNOT_START = 2


def run(name: str, config: type[Config], serve: Callable[[Config], Awaitable[None]]) -> None:
    """Serve until `serve` returns. What cannot start says why in one line on stderr and exits with code 2."""
    faulthandler.register(signal.SIGUSR1)
    os.umask(0o077)  # what a service leaves in a file or offers by a socket is for its own user
    try:
        options = CliApp.run(config, cli_args=[_long_option(argument) for argument in sys.argv[1:]])
        _log_as_json(options.log_level)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_finish(serve(options)))
    except (SpireError, SettingsError) as error:
        _fail(name, str(error))
    except ValidationError as error:
        _fail(name, "; ".join(_complaint(config, ".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()))


def _complaint(config: type[ServiceConfig], option: str, message: str) -> str:
    variable = f"{config.model_config.get('env_prefix', '')}{option}".upper()
    return explain_link(variable) or f"--{option.replace('_', '-')}: {message}"


async def _finish(serving: Awaitable[None]) -> None:
    await serving


def _long_option(argument: str) -> str:
    """`--k` as `-k`: the settings library gives a name of one letter one dash only."""
    return argument[1:] if len(argument.split("=")[0]) == 3 and argument.startswith("--") else argument


def _fail(name: str, message: str) -> None:
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(_CANNOT_START)


def on_passing_thread(load: Callable[[], Loaded]) -> Loaded:
    """Do the heavy work of starting on a thread that ends, and return what it made.

    OpenMP keeps a team for every living thread that ever computed. With more of them than cores its threads stop
    spinning altogether, and a forward of one sequence takes 11 ms instead of 4. The model thread must be the only one.
    """
    with ThreadPoolExecutor(1) as passing:
        return passing.submit(load).result()


async def stop_signal() -> None:
    """Returns when SIGTERM or SIGINT comes."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def announce(ready_file: Path | None, address: str) -> None:
    """Write HOST:PORT into the ready file, whole or not at all: whoever waits for it can connect.

    What has been loaded by then stays: looked through for garbage, it held up a gateway's rounds by 80 ms now and then.
    """
    gc.collect()
    gc.freeze()
    if ready_file is not None:
        unfinished = ready_file.with_name(ready_file.name + ".part")
        unfinished.write_text(address)
        os.replace(unfinished, ready_file)


async def keep_announcing(ready_file: Path | None, well: Callable[[], bool] = lambda: True) -> None:
    """Touch the ready file every second while the service is well. Who supervises it restarts one that stops doing so:
    frozen, or with a model thread that is stuck."""
    while ready_file is not None:
        await asyncio.sleep(1)
        if well():
            with contextlib.suppress(FileNotFoundError):  # the supervisor goes, too
                os.utime(ready_file)


def _log_as_json(level: str) -> None:
    """Every line on stderr is one JSON object, also what libraries log. Repeats are counted."""
    repeats = Repeats()
    stamps: list[Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso")]
    to_json = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[repeats.processor, *stamps, structlog.processors.format_exc_info, to_json],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    foreign: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.ExceptionRenderer(_without_message),
        to_json,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=foreign, foreign_pre_chain=[*stamps, structlog.stdlib.add_logger_name]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(repeats.filter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _without_message(exc_info: ExcInfo) -> str:
    """Where an exception came from, and its type: a library's message may quote what a client sent."""
    kind, _, trace = exc_info
    return f"{''.join(traceback.format_tb(trace))}{kind.__name__}"
