"""`spire key` and `spire certs`: API keys of clients, and certificates by which services authenticate one another.

    spire key create alice --file keys      prints the key, only this once
    python -m gateway --keys keys           or spire up --keys keys
    spire key revoke alice --file keys      a running gateway notices at the next request
    spire certs tls && spire up --tls tls
    spire certs tls --host verifier.internal --host 10.0.0.7
    python -m verifier_service --tls tls/verifier ...

Does not know: the keys that were created, since the file holds only their hashes; a CA of your own, which you can use
instead of `spire certs` (docs/security.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spire.errors import DataError, SpireError
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


def certs(
    directory: Annotated[Path, typer.Argument(help="Directory to write; an existing CA in it is used again.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the services; repeatable.")] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.", min=1)] = 365,
) -> None:
    """Make a CA and a certificate for each service, for `spire up --tls DIR` or each service's own --tls."""
    try:
        from spire.service.certificates import SERVICES, make_certificates
    except ImportError as error:
        raise SpireError("certificates need cryptography: pip install 'spire-serve[certs]'") from error

    make_certificates(directory, host or [], days)
    typer.echo(f"{directory}: one directory each for {', '.join(SERVICES)}, valid for {days} days")
    typer.echo(f"start with: spire up --tls {directory}")
