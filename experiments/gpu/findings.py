"""Findings of a part so far: a file that is whole after every finding, so that a part that is ended keeps them.

Imports torch where an attempt fails, and only there: the process that runs the parts has none of it.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the table. `predicted` and `measured` are in `unit`; `more` is for the JSON alone."""

    what: str
    measured: float | int | bool | None
    unit: str = ""
    predicted: float | int | bool | None = None
    note: str = ""
    more: dict[str, Any] | None = None


class Findings:
    """Those of one part, in `file`."""

    def __init__(self, file: Path):
        self._file = file
        # Those of an earlier run that this one goes on with, but failures.
        earlier = json.loads(file.read_text()) if file.exists() else []
        self._earlier = [Finding(**found) for found in earlier if found["measured"] is not None]
        self._found: list[Finding] = []
        self.failed = False

    def known(self, what: str) -> bool:
        """True if an earlier run has measured this."""
        return any(found.what == what for found in self._earlier)

    def add(self, finding: Finding) -> None:
        self._earlier = [found for found in self._earlier if found.what != finding.what]
        self._found.append(finding)
        write_json(self._file, [asdict(found) for found in (*self._earlier, *self._found)])

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note an error inside as a finding, and go on; the part has failed all the same.

        Raises an error that has cost this process its GPU: nothing that it measured afterwards would mean anything.
        """
        try:
            yield
        except Exception as error:
            self.failed = True
            told = f"{type(error).__name__}: {error}".strip()
            more = {"error": "".join(traceback.format_exception(error))}
            self.add(Finding(what, None, note=f"FAILED: {told.splitlines()[-1][:120]}", more=more))
            if _gpu_is_lost(error):
                raise


def _gpu_is_lost(error: Exception) -> bool:
    from spire.lost_device import device_lost

    return device_lost(error)


def write_json(file: Path, value: object) -> None:
    """Whole or not at all, whenever this process ends."""
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    os.replace(unfinished, file)
