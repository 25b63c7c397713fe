"""Parser of port options, whose environment variables Kubernetes may set to an address."""

from __future__ import annotations

from collections.abc import Callable

import typer

from spire.service.links import explain_link


def port_of(variable: str) -> Callable[[str], int]:
    """Return a parser of ports from 0 to 65535, given on the command line or in the environment variable `variable`."""

    def port(text: str) -> int:
        number = int(text) if str(text).isascii() and str(text).isdecimal() else -1
        if not 0 <= number <= 65535:
            raise typer.BadParameter(explain_link(variable) or f"{text!r} is not a port from 0 to 65535")
        return number

    return port
