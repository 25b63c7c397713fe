"""A service as a child process that is started, watched, restarted on the same port, and never left behind.

The child binds a free port, writes its address to a ready file, and touches the ready file every second while it is
well. On Linux the kernel kills the child however this process dies; elsewhere only an orderly end stops the child.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spire.address import join, reachable, split
from spire.errors import SpireError

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0
_STEADY_SECONDS = 30.0
_TAIL_LINES = 15
# Size in bytes above which a log is rotated; one earlier log is kept.
LARGEST_LOG = 16 * 1024 * 1024
# Polls, 10 per second, without a touch of the ready file until a service is stuck. Not seconds: this process may hang.
_LOOKS_WITHOUT_A_SIGN = 300
# Longer than a service takes to drain.
_GRACE_SECONDS = 15.0


class ServiceFailed(SpireError):
    """Error for a service that ended during start-up. The message contains the last lines of its log."""


@dataclass
class Service:
    """The child process `python -m module` with `arguments`, a port, and a ready file in `directory`."""

    module: str
    arguments: Sequence[str]
    directory: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    address: str | None = None
    restarts: int = 0
    started_at: float = 0.0
    restart_at: float | None = None
    wait: float = _FIRST_WAIT / 2
    sign: float = 0.0
    looks: int = 0
    # Directory of the log; None for `directory`.
    logs: Path | None = None
    # Offset in the log at which the output of the current process begins.
    log_before: int = 0

    @property
    def name(self) -> str:
        return self.module.removesuffix("_service")

    @property
    def reached_at(self) -> str:
        """The address at which processes on this machine reach the service, once it has written its ready file."""
        assert self.address is not None
        host, port = split(self.address)
        return join(reachable(host), port)

    @property
    def log(self) -> Path:
        return (self.logs or self.directory) / f"{self.name}.log"

    @property
    def ready_file(self) -> Path:
        return self.directory / f"{self.name}.ready"

    def start(self) -> None:
        """Start the process. Call from the main thread only: the kernel ties a child to the thread that starts it."""
        self.ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, *self.arguments]
        command += ["--port", str(self.port), "--ready-file", str(self.ready_file)]
        with _for_its_owner(self.log, os.O_APPEND) as log:
            self.log_before = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        self.started_at, self.restart_at = time.monotonic(), None

    def serves(self) -> bool:
        """True once the service has written its address to the ready file. Stores the address and its port."""
        if self.address is None and self.ready_file.exists() and (text := self.ready_file.read_text().strip()):
            self.address, (_, self.port) = text, split(text)
        return self.address is not None

    def must_be_alive(self) -> None:
        """Raise ServiceFailed with the last lines of the log if the process has ended."""
        if (code := self.exit_code()) is not None:
            raise ServiceFailed(f"the {self.name} service {_ending(code)}:\n{self.last_lines()}")

    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def keep_alive(self, say: Callable[[str], None]) -> None:
        """Restart the process if it has ended, after a wait that grows with each short run; kill a stuck process."""
        code = self.exit_code()
        if code is None:
            self._end_if_stuck(say)
            return
        now = time.monotonic()
        if self.restart_at is None:
            self.wait = _FIRST_WAIT if now - self.started_at > _STEADY_SECONDS else min(2 * self.wait, _LONGEST_WAIT)
            self.restart_at = now + self.wait
            say(f"the {self.name} service {_ending(code)}; restarting in {self.wait:g} s\n{self.last_lines(3)}")
        elif now >= self.restart_at:
            self.restarts += 1
            self.start()

    def _end_if_stuck(self, say: Callable[[str], None]) -> None:
        sign = self.ready_file.stat().st_mtime if self.ready_file.exists() else 0.0
        self.looks = self.looks + 1 if sign == self.sign and sign else 0
        self.sign = sign
        if self.looks > _LOOKS_WITHOUT_A_SIGN and self.process is not None:
            say(f"the {self.name} service is stuck: no sign of life; ending it")
            self.process.kill()
            self.looks = 0

    def last_lines(self, count: int = _TAIL_LINES) -> str:
        """Return the last `count` lines of the log that the current process has written."""
        said = self.log.read_bytes()[self.log_before :] if self.log.exists() else b""
        lines = said.decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-count:]) or "  (it printed nothing)"

    def bound_log(self) -> None:
        """Rotate a log larger than LARGEST_LOG, and keep one earlier log. The service appends to the same file."""
        with suppress(FileNotFoundError):  # the user has removed it
            if self.log.stat().st_size > LARGEST_LOG:
                with self.log.open("rb") as full, _for_its_owner(self.log.with_suffix(".log.1"), os.O_TRUNC) as kept:
                    shutil.copyfileobj(full, kept)
                os.truncate(self.log, 0)
                self.log_before = 0

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Wait until the process ends after `ask_to_stop`; kill it after the grace period, and say so."""
        if self.process is None:
            return
        try:
            self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"the {self.name} service did not end within {_GRACE_SECONDS:g} s: ending it\n{self.last_lines(3)}")
            self.process.kill()
            self.process.wait()


def _for_its_owner(file: Path, how: int) -> BinaryIO:
    """Open a file for appending, with the extra `os.open` flag `how`. Other users cannot read a newly created file."""
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | how, 0o600), "ab")


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _die_with(parent: int) -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes Linux kill the child when the process `parent` dies; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def ask() -> None:
        prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return ask
