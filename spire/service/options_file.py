"""The options file: `spire.toml` in the current directory, or the file that SPIRE_CONFIG names.

    [up]
    port = 9000

    [verifier]
    max_sequences = 16

The file has one table per command and service. The environment and the command line take precedence.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from spire.errors import SpireError


def options_file() -> Path:
    """Return the path of the options file. Raises SpireError if SPIRE_CONFIG names a file that does not exist."""
    named = os.environ.get("SPIRE_CONFIG")
    file = Path(named or "spire.toml")
    if named and not file.is_file():
        raise SpireError(f"SPIRE_CONFIG names {file}, which does not exist")
    return file


def read_options() -> dict[str, dict[str, Any]]:
    """Return all tables of the options file, empty if there is no file. Raises SpireError if it is not such a file."""
    file = options_file()
    if not file.is_file():
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpireError(f"{file} is not valid TOML: {error}") from error
    except OSError as error:
        raise SpireError(f"{file} cannot be read: {error.strerror}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SpireError(f"{file}: {name} is no table: options stand in the table of a command or service, as [up]")
    return tables
