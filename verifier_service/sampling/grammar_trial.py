"""Try grammars in processes that may crash: each in a fork of `python grammar_trial.py`, which `grammar.py` runs.

A few bytes of grammar can keep the library busy for minutes, fill the memory, or overflow the stack, which ends the
process; the library's own limits cover none of these. Modules are imported before the fork, because importing takes
longer than most grammars. stdin is a socket over which a connection comes for each trial (`Trials`).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

CPU_SECONDS = 2
MEMORY_BYTES = 256 << 20
# Half of the smallest stack of a thread on Linux.
STACK_BYTES = 1 << 20
_WALL_SECONDS = 60
_RECEIVED_AT_ONCE = 1 << 16


class Trials:
    """Tries each grammar in a fork of one process, which starts with the first trial. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def run(self, task: str, grammar: str) -> tuple[str, str] | None:
        """Run "compile" or "convert" (from llama.cpp's GBNF to Lark). Return (output, error), None if the fork died."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            with suppress(ConnectionError):
                ours.sendall(f"{task}\n{grammar}".encode())
                ours.shutdown(socket.SHUT_WR)
                answer = _received(ours)
                return tuple(json.loads(answer)) if answer else None
        return None

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._control:
                with suppress(OSError):  # it was killed
                    socket.send_fds(self._control, [b"."], [connection.fileno()])
                    return
            self._control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-P", str(Path(__file__))]
                subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            socket.send_fds(self._control, [b"."], [connection.fileno()])


def start(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher for `grammar` and an empty output, with this module's parser limits. Check it with `error`."""
    # The state of an ambiguous grammar grows with the output until the whole batch waits for one mask.
    limits = LLParserLimits(max_lexer_states=50_000, step_max_items=2_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def error(matcher: LLMatcher) -> str:
    """Return the library's error message, or an empty string. A state that no token can continue is not an error."""
    words = matcher.get_error()
    return "" if words.startswith("NoExtensionBias") else words


def _compile(grammar: str) -> tuple[str, str]:
    matcher = start(LLTokenizer("byte"), grammar)
    matcher.compute_bitmask()
    return "", error(matcher).strip()


def _convert(grammar: str) -> tuple[str, str]:
    try:
        return gbnf_to_lark(grammar), ""
    except Exception as problem:  # the library raises bare Exceptions
        return "", f"it has ::=, so it should be in llama.cpp's notation (GBNF): {problem}"


def _received(connection: socket.socket) -> str:
    return b"".join(iter(partial(connection.recv, _RECEIVED_AT_ONCE), b"")).decode()


def _try(connection: socket.socket) -> None:
    """Limit this process's resources, run the task received over `connection`, and send back its result as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(_WALL_SECONDS)

    def answer() -> None:
        task, _, grammar = _received(connection).partition("\n")
        connection.sendall(json.dumps({"compile": _compile, "convert": _convert}[task](grammar)).encode())

    threading.stack_size(STACK_BYTES)
    trial = threading.Thread(target=answer)
    trial.start()
    trial.join()


def _serve(control: socket.socket) -> None:
    """Fork for each connection that comes over `control`, until the other side closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the service
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects ended forks
    os.nice(10)  # decoding has priority
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                with suppress(BaseException):
                    control.close()
                    _try(connection)
                os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as _control:
        _serve(_control)
