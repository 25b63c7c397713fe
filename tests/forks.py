"""Python processes forked from one that has imported the services: a service starts in a tenth of the time.

Everything else is as `python -m MODULE` does it: its own arguments, environment, output and exit code.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # libraries read it when they are imported: in the process that is forked
_IMPORTED = ["pytest", "verifier_service.__main__", "draft_service.__main__", "gateway.__main__"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class Fork:
    """A process `python -m MODULE ARGUMENTS...`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], output: Path) -> None:
        arguments = (list(command), environment | _ONE_THREAD, output)
        self._process = _context.Process(target=_become, args=arguments, daemon=True)
        with patch.dict(os.environ, _ONE_THREAD):
            self._process.start()
        assert self._process.pid is not None
        self.pid, self.args = self._process.pid, [sys.executable, "-m", *command]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Run a module in this process as `python -m` would."""
    gc.freeze()  # what was imported before the fork is never garbage
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(written)
    module, *arguments = command
    sys.argv = [module, *arguments]
    sys.modules.pop(f"{module}.__main__", None)  # imported before the fork, run now
    runpy.run_module(module, run_name="__main__", alter_sys=True)
