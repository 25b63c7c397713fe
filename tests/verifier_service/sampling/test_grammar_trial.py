"""Grammars are tried in forks of one process: what it costs, and what its death and the service's own leave behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from verifier_service.sampling.grammar_trial import Trials

FINE = 'start: "a"\n'
MUCH_MEMORY = f"start: /{'a?' * 20_000}/\n"
MUCH_STACK = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"\n'


def children() -> set[int]:
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def test_one_process_serves_all_trials() -> None:
    before, trials = children(), Trials()
    assert trials.run("compile", FINE) == ("", "")
    (server,) = children() - before
    assert trials.run("compile", "start: (")[1].startswith("1(9): Expected token")
    assert children() - before == {server}


def test_gbnf_is_converted() -> None:
    output, error = Trials().run("convert", 'root ::= "a"') or ("", "lost")
    assert 'start: "a"' in output
    assert error == ""


@pytest.mark.parametrize("grammar", [MUCH_MEMORY, MUCH_STACK])
def test_a_trial_beyond_its_limits_is_lost_alone(grammar: str) -> None:
    before, trials = children(), Trials()
    trials.run("compile", FINE)
    server = children() - before
    assert trials.run("compile", grammar) is None
    assert trials.run("compile", FINE) == ("", "")
    assert children() - before == server


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_server_is_started_again(number: int) -> None:
    before, trials = children(), Trials()
    trials.run("compile", FINE)
    (server,) = children() - before
    os.kill(server, number)
    os.waitpid(server, 0)
    assert trials.run("compile", FINE) == ("", "")


def test_the_server_ends_with_the_process_that_uses_it() -> None:
    code = (
        "import os, signal\n"
        "from verifier_service.sampling.grammar_trial import Trials\n"
        f"Trials().run('compile', {FINE!r})\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    with suppress(ProcessLookupError):  # it has ended already
        server = os.pidfd_open(int(killed.stdout))
        assert select.select([server], [], [], 30)[0], "the server outlives its user"
