"""`spire key`: manage the file of API keys that a gateway accepts.

    spire key create alice --file keys      prints the key, only this once
    python -m gateway --keys keys           or spire up --keys keys
    spire key revoke alice --file keys      a running gateway notices at the next request

Does not know: the keys that were created. The file holds only their hashes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spire.errors import DataError
from spire.service.keys import GATEWAY_KEY, create_key, read_keys, revoke_key

app = typer.Typer(help="API keys of a gateway.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the key's owner, for logs and limits.")]
File = Annotated[Path, typer.Option(help="The file of keys that the gateway is given.", envvar="SPIRE_GATEWAY_KEYS")]


@app.command("create")
def create(name: Name, file: File) -> None:
    """Make a key, add its hash to the file, print the key: nothing can print it again."""
    key = create_key(name, file)
    typer.echo(f"{file}: {name} added. This is the key, keep it; clients here read it from {GATEWAY_KEY}:", err=True)
    typer.echo(key)


@app.command("list")
def list_names(file: File) -> None:
    """Print the names of the keys in the file."""
    keys, wrong = read_keys(file)
    for key in keys:
        typer.echo(key.name)
    if wrong:
        raise DataError(f"{file}: no keys are in the lines {', '.join(map(str, wrong))}")


@app.command("revoke")
def revoke(name: Name, file: File) -> None:
    """Take a key out of the file."""
    revoke_key(name, file)
    typer.echo(f"{file}: {name} revoked", err=True)
