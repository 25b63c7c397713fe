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

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as the services' libraries read it, when they are imported
_IMPORTED = ["pytest", "verifier_service.__main__", "draft_service.__main__", "gateway.__main__"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class Fork:
    """A process `python -m MODULE ARGUMENTS...`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        kept = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ |= _ONE_THREAD
        try:
            target = _context.Process(target=_become, args=(list(command), dict(environment), output), daemon=True)
            target.start()
        finally:
            for name, value in kept.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._process, self.args = target, [sys.executable, "-m", *command]
        assert target.pid is not None
        self.pid = target.pid

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
