"""`spire up`: run verifier, draft and gateway as processes on this machine, and answer one prompt as a check.

    spire up                          SmolLM2-135M-Instruct with its SPIRe draft, on the available hardware
    spire up --model tiny             the bundled toy
    spire up --model DIR --draft magicdec
                                      your own model, which drafts for itself
    spire up --model DIR --draft off  the same model with plain decoding
    spire up --once                   stop after the completion

Does not know: other machines, where each service is started by its own `python -m`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from spire.address import bare, bind, fits_unix, join, reachable
from spire.checkpoints.chat_template import read_chat_template
from spire.checkpoints.tokenizer import ids_without_text, load_tokenizer
from spire.cli.gateway_client import ClientCompletion, stream_chat, stream_completion
from spire.cli.options import ServedDraft, ServedModel
from spire.cli.paths import OFF, Pair, choose_pair, first_pair
from spire.cli.service import Service
from spire.errors import SpireError
from spire.http import direct_client, distrust
from spire.model.config import MAGICDEC, load_model_config
from spire.perf.gpus import VISIBLE, chosen
from spire.rpc.secret import make_secret
from spire.rpc.tls import AUTHORITY
from spire.service.keys import GATEWAY_KEY, authorization, refuse_open_address
from spire.service.links import explain_link
from spire.service.options_file import read_options

console = Console(highlight=False, soft_wrap=True)

# The values that pydantic reads as false, and none.
_FALSE = {"", "0", "f", "false", "n", "no", "off"}
_MODULES = ("verifier_service", "draft_service", "gateway")
_POLL_SECONDS = 0.1
_FIRST_PROMPT = "It was a cold and stormy night, and"
_FIRST_QUESTION = "What is the capital of France, and what is it known for?"
_FIRST_TOKENS = 64
# An answer that took longer is not decoded once more for comparison.
_COMPARED_SECONDS = 20.0


class _Stopped(Exception):
    """Raised when SIGINT or SIGTERM is received."""


def _port(text: str) -> int:
    """Parse a port from 0 to 65535. Raises BadParameter, with advice if Kubernetes set SPIRE_UP_PORT to a URL."""
    number = int(text) if str(text).isascii() and str(text).isdecimal() else -1
    if not 0 <= number <= 65535:
        raise typer.BadParameter(explain_link("SPIRE_UP_PORT") or f"{text!r} is not a port from 0 to 65535")
    return number


def up(
    model: ServedModel = None,
    draft: ServedDraft = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name. Default: the directory's.")] = None,
    host: Annotated[str, typer.Option(help="Address that the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the gateway; 0: a free one.", parser=_port, metavar="PORT")] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(help="File of API keys that requests must come with: see spire key.", envvar="SPIRE_GATEWAY_KEYS"),
    ] = None,
    without_keys: Annotated[bool, typer.Option("--without-keys", help="Serve other machines without keys.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Accept this Host header too, at a gateway without keys; repeatable.")
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            help="Directory that spire certs wrote: the services then speak TLS and know one another by certificate."
        ),
    ] = None,
    https: Annotated[Path | None, typer.Option(help="Directory with tls.crt and tls.key: clients speak HTTPS.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Directory of the services' logs. Default: temporary.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug (logs every request), info, warning or error.")] = None,
    k: Annotated[int | None, typer.Option(help="Draft tokens a round. Default: chosen each round.", min=0)] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    draft_quantization: Annotated[
        str | None,
        typer.Option(help="auto, none, or fp8: half the bytes of the draft's weights. auto: fp8 on CPUs with kernels."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda: of several GPUs the one with the most free memory.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each model service.", min=1)] = None,
    max_context: Annotated[
        int | None,
        typer.Option(help="Longest sequence, prompt and output together. Default: the model's, if it fits.", min=1),
    ] = None,
    cache_gb: Annotated[
        float | None, typer.Option(help="Memory for the target's cache. Default: what fits into free memory.", min=0)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Prompt to answer once all serve; empty for none. Default: one that fits.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the first answer.")] = False,
) -> None:
    """Start the services, answer one prompt, and serve until Ctrl-C."""
    pair = choose_pair(model, draft) if model else first_pair(draft)
    if pair.note:
        _warn(pair.note)
    vocab_size = load_model_config(pair.model).vocab_size
    if without := ids_without_text(load_tokenizer(pair.model, vocab_size), vocab_size):
        _warn(f"{without} of the model's {vocab_size} ids have no text: its tokenizer does not know them")
    with bind(bare(host), port) as free:
        address = free.getsockname()[0]
    if not _settles_keys(keys, without_keys):
        refuse_open_address(address)
    options = ModelOptions(dtype, device, threads)
    with tempfile.TemporaryDirectory(prefix="spire-") as directory, _signals():
        further = {
            module: _arguments(tls=tls and tls / module.removesuffix("_service"), log_level=log_level or None)
            for module in _MODULES
        }
        further["draft_service"] += _arguments(quantization=draft_quantization or None)
        further["gateway"] += _arguments(keys=keys, without_keys=without_keys, https=https, allow_host=allow_host)
        further["verifier_service"] += _arguments(
            host=None if tls else _private_host(Path(directory)),
            served_model_name=served_model_name or None,
            max_context=max_context,
            cache_gb=cache_gb,
        )
        if https and (authority := https / AUTHORITY).is_file():
            os.environ["SSL_CERT_FILE"] = str(authority)  # this process trusts it too
        logs, secure = _made(log_dir) if log_dir else None, https is not None
        stack = Stack(pair, options, host, port, k, Path(directory), further=further, secure=secure, logs=logs)
        try:
            stack.start()
            stack.announce()
            if prompt != "" and not once and not stack.admitted:
                _warn(f"no completion: the gateway asks for an API key, and {GATEWAY_KEY} holds none that it knows")
            elif prompt != "":
                show_answer(stack.url, prompt, chats=bool(read_chat_template(pair.model).template))
            if not once:
                console.print("\nServing. Ctrl-C stops.")
                stack.watch()
        except _Stopped:
            console.print("\nStopping.")
        finally:
            stack.stop()


def _arguments(**given: object) -> list[str]:
    """Return command-line arguments: max_context=8 gives --max-context 8, True gives a flag, a list repeats the option.

    None and False give no argument, so that the service uses its default.
    """
    arguments: list[str] = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                arguments.append(option)
            elif each is not None and each is not False:
                arguments += [option, str(each)]
    return arguments


@dataclass(frozen=True)
class ModelOptions:
    """Options common to verifier and draft. If an option is None, the service chooses its value."""

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None


@dataclass
class Stack:
    """The services of a system, each listed after the services it depends on."""

    pair: Pair
    options: ModelOptions
    host: str
    port: int
    k: int | None
    directory: Path
    services: list[Service] = field(default_factory=list)
    # Further arguments by module.
    further: dict[str, list[str]] = field(default_factory=dict)
    # True if clients use HTTPS.
    secure: bool = False
    # Directory of the logs; None for `directory`, which is temporary.
    logs: Path | None = None
    # False if the gateway refuses this process, which has no valid API key.
    admitted: bool = True
    # The gateway's last answer to /ready.
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{join(reachable(bare(self.host)), self.services[-1].port)}"

    def start(self) -> None:
        """Start each service once the services it needs are ready. Raises ServiceFailed if a service ends."""
        self._choose_gpu()
        # The services recognise each other by this secret; other users cannot read its file.
        make_secret(self.directory / "secret")
        with console.status("") as status:
            model = _arguments(model=self.pair.model, **vars(self.options))
            verifier = self._launch("verifier_service", model, f"the verifier to load {self.pair.model}", status)
            if self.pair.draft is not None:
                pair = {"draft": self.pair.draft, "target": self.pair.model}
                follow = _arguments(**pair, verifier=verifier, **vars(self.options))
                self._launch("draft_service", follow, f"the draft to load {self.pair.draft}", status)
            draft = "auto" if self.pair.draft else MAGICDEC if self.pair.magicdec else OFF
            gateway = _arguments(verifier=verifier, host=self.host, draft=draft, k=self.k)
            self._launch("gateway", gateway, "the gateway to listen", status, self.port)
            self._wait(status, "the gateway to find the models ready", self._gateway_is_ready)

    def _choose_gpu(self) -> None:
        """Let the services see one of several GPUs only, the one with the most free memory."""
        if self.options.device != "cpu" and (gpu := chosen()):
            console.print(f"  GPU       {gpu.name}, {gpu.free:,} MiB free ({VISIBLE} chooses another)")
            os.environ[VISIBLE] = gpu.uuid

    def announce(self) -> None:
        for service in self.services:
            drafts = " (and drafts: MagicDec)" if self.pair.magicdec and service.module == "verifier_service" else ""
            console.print(f"  {service.name:9} {service.address}{drafts}")
        if room := self.ready.get("max_context"):
            console.print("  computes  {device}, {dtype}; kernels: {kernels}".format(**self.ready))
            console.print(f"  room for  {self.ready['max_sequences']} sequences × {room:,} positions")
        console.print(f"\n  page        [bold]{self.url}/[/]")
        console.print(f"  completions [bold]{self.url}/v1/completions[/]")
        console.print(f"  health      {self.url}/ready")
        console.print(f"  metrics     {self.url}/metrics")
        console.print(f"  logs        {self.logs or self.directory}\n")

    def watch(self) -> None:
        """Restart services that end or are stuck, and bound their logs, until a signal raises an exception."""
        while True:
            for service in self.services:
                service.keep_alive(_warn)
                service.bound_log()
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ask all services to stop, the gateway first, so that no new request is accepted; then wait for all."""
        for service in reversed(self.services):
            service.ask_to_stop()
        for service in reversed(self.services):
            service.stop(_warn)

    def _launch(self, module: str, arguments: list[str], what: str, status: Status, port: int = 0) -> str:
        arguments = [*arguments, "--secret-file", str(self.directory / "secret"), *self.further.get(module, [])]
        service = Service(module, arguments, self.directory, port, logs=self.logs)
        self.services.append(service)
        service.start()
        self._wait(status, what, service.serves)
        return service.reached_at

    def _wait(self, status: Status, what: str, done: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not done():
            for service in self.services:
                service.must_be_alive()
            status.update(f"waiting for {escape(what)} ({time.monotonic() - began:.0f} s)")
            time.sleep(_POLL_SECONDS)

    def _gateway_is_ready(self) -> bool:
        """True if all services are ready, or the gateway requires a key that this process lacks. Raises SpireError."""
        try:
            with direct_client(timeout=2) as client:
                answer = client.get(f"{self.url}/ready", headers=authorization())
        except httpx.HTTPError as error:
            if refused := distrust(self.url, error):
                raise SpireError(f"{refused}, or lie beside it") from error
            return False
        self.admitted = answer.status_code != httpx.codes.UNAUTHORIZED
        if not self.admitted:
            return True
        if not answer.is_success:
            return False
        self.ready = answer.json()
        return not self.pair.speculates or self.ready.get("draft") == "connected"


def show_answer(url: str, prompt: str | None, chats: bool) -> None:
    """Stream the answer to a prompt to the terminal, then compare its speed with plain decoding. Raises GatewayError.

    `chats`: the prompt is a user's message. Nothing is compared that was not drafted, or took long.
    """
    stream, fitting, sampling = (
        (stream_chat, _FIRST_QUESTION, {"temperature": 0})
        if chats
        else (stream_completion, _FIRST_PROMPT, {"temperature": 0.8, "seed": 1})
    )
    answer, plainly = (ClientCompletion(fitting if prompt is None else prompt) for _ in range(2))
    console.print(f"[bold]{escape(answer.prompt)}[/]", end="\n" if chats else "")
    with direct_client(timeout=None) as client:  # a large model may take minutes
        for piece in stream(client, url, answer, max_tokens=_FIRST_TOKENS, **sampling):
            console.out(piece["text"], end="")
        console.print(f"\n[dim]{answer.summary}[/]")
        if answer.tau is None or answer.seconds > _COMPARED_SECONDS:
            return
        for _ in stream(client, url, plainly, max_tokens=_FIRST_TOKENS, speculation={"k": 0}, **sampling):
            pass
    if answer.rate and plainly.rate:
        console.print(
            f"[dim]after the first token {answer.rate:.0f} tokens/s, by plain decoding {plainly.rate:.0f}: "
            f"{answer.rate / plainly.rate:.2f} ×[/]"
        )


def _warn(text: str) -> None:
    console.print(f"[yellow]{escape(text)}[/]")


@contextmanager
def _signals() -> Iterator[None]:
    """Raise _Stopped at the first SIGINT or SIGTERM within the block. Later SIGINT and SIGTERM signals are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        raise _Stopped

    before = {name: signal.signal(name, stop) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _made(directory: Path) -> Path:
    """Create the directory for logs and return its path. Raises SpireError if the directory cannot be created."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpireError(f"--log-dir {directory} cannot be made: {os.strerror(error.errno or 0)}") from error
    return directory


def _private_host(directory: Path) -> str | None:
    """Return unix:PATH for a socket of the verifier in `directory`; None if a host is configured or PATH is invalid."""
    path = str(directory / "verifier.sock")
    configured = os.environ.get("SPIRE_VERIFIER_HOST") or "host" in read_options().get("verifier", {})
    return None if configured or not fits_unix(path) else f"unix:{path}"


def _settles_keys(keys: Path | None, without_keys: bool) -> bool:
    """True if an option, the environment or the options file sets API keys, or permits the gateway to need none."""
    own = {str(name).replace("-", "_"): value for name, value in read_options().get("gateway", {}).items()}
    told = str(os.environ.get("SPIRE_GATEWAY_WITHOUT_KEYS") or own.get("without_keys", ""))
    return bool(keys or without_keys or own.get("keys")) or told.lower() not in _FALSE
