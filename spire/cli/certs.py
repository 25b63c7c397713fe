"""`spire certs DIR`: make certificates by which the services authenticate one another.

    spire certs tls && spire up --tls tls
    spire certs tls --host verifier.internal --host 10.0.0.7
    python -m verifier_service --tls tls/verifier ...

Does not know: an existing CA of yours, whose certificates work as well (docs/security.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spire.errors import SpireError


def certs(
    directory: Annotated[Path, typer.Argument(help="Directory to write; an existing CA in it is used again.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which services are called; repeatable.")
    ] = None,
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
