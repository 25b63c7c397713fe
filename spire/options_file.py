"""The options file: `spire.toml` in the current directory, or what SPIRE_CONFIG names.

    [up]
    port = 9000

    [verifier]
    max_sequences = 16

One table for each command and each service. The environment and the command line come before it.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from spire.errors import SpireError


def options_file() -> Path:
    """Where options are read from. Raises SpireError when SPIRE_CONFIG names a file that is not there."""
    named = os.environ.get("SPIRE_CONFIG")
    file = Path(named or "spire.toml")
    if named and not file.is_file():
        raise SpireError(f"SPIRE_CONFIG names {file}, which does not exist")
    return file


def read_options() -> dict[str, Any]:
    """All tables of the options file; none when there is no file. Raises SpireError when it is not TOML."""
    file = options_file()
    if not file.is_file():
        return {}
    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpireError(f"{file} is not valid TOML: {error}") from error
