"""The `spire` command. Each command group is a module; importing this package does not import torch.

Every option can also be set by an environment variable SPIRE_<COMMAND>_<OPTION>, for example SPIRE_UP_PORT.
"""

from __future__ import annotations

import signal
import sys
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import spire
from spire.cli import complete, convert, credentials, doctor, up
from spire.cli.bench import bench, capacity
from spire.cli.perf import measure, perf_model, stop
from spire.cli.training import train, write
from spire.errors import SpireError
from spire.service.options_file import options_file, read_options

app = typer.Typer(
    name="spire",
    help=spire.__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"auto_envvar_prefix": "SPIRE", "help_option_names": ["-h", "--help"]},
)
app.command("up")(up.up)
app.command("complete")(complete.complete)
app.command("doctor")(doctor.doctor)
app.add_typer(convert.app, name="convert")
app.add_typer(train.app, name="train")
app.command("write")(write.write)
app.add_typer(credentials.app, name="key")
app.command("certs")(credentials.certs)
measure.evaluate.command("stop")(stop.eval_stop)
app.add_typer(measure.evaluate, name="eval")
app.command("bench")(bench.bench)
app.command("capacity")(capacity.capacity)
app.command("perf-model")(perf_model.perf_model)


# Services have tables of their own in the options file, which they check themselves.
_SERVICES = {"gateway", "verifier", "draft"}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spire {spire.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding with a draft whose memory does not grow with context."""


def _refuse_unknown(options: dict[str, Any], command: Any, place: str) -> None:
    """Raise SpireError for a table or option that no command has. `place` is where `options` are, for messages."""
    inside = getattr(command, "commands", {})
    known = inside or {parameter.name for parameter in command.params}
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name.replace("-", "_"), known, 1)
            raise SpireError(f"{place} has {name}, which is not known{f': did you mean {near[0]}?' if near else ''}")
        if inside:
            if not isinstance(value, dict):
                raise SpireError(f"{place} has {name}, which is no table")
            _refuse_unknown(value, inside[name], f"{place}, [{name}],")


def main() -> None:
    """Run the command line. A SpireError becomes one line on stderr and exit code 1.

    SIGTERM ends a command as an error would: it stops its services and prints what it has measured so far.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if options := read_options():
            of_commands = {name: table for name, table in options.items() if name not in _SERVICES}
            _refuse_unknown(of_commands, typer.main.get_command(app), str(options_file()))
        app(default_map=options)
    except SpireError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)
