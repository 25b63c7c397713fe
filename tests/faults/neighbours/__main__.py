"""`make neighbours`: what one user's requests do to another's stream. Each attack runs beside a victim, on `spire up`.

    python -m tests.faults.neighbours                      all attacks on the bundled pair, half an hour
    python -m tests.faults.neighbours --only choices       one of them; may be said several times
    python -m tests.faults.neighbours --model DIR          a target of yours, which is decoded plainly

Attacker and victim have a key each, and all limits are the defaults. Each attack has a fresh system: the victim streams
beside well-behaved clients, then beside the attack, three times. Exit status 1 when a bound of `verdict` breaks.
What it does not know: what else the machine does meanwhile. Its load is told beside the figures.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.faults.neighbours.attacks import ATTACKS, Attack
from tests.faults.neighbours.clients import Behaviour, Crowd, well_behaved
from tests.faults.neighbours.stack import Stack, stack
from tests.faults.neighbours.verdict import MOST_GROWTH, Result, growth_of, judge, table
from tests.faults.neighbours.watch import Seen, Watch

console = Console(stderr=True)
# How much memory an attack takes at most depends on how many of its requests coincide. Peaks that rise by chance soon
# stop rising; those of a leak do not.
_FEWEST_TIMES, _MOST_TIMES = 3, 6


def neighbours(
    only: Annotated[list[str] | None, typer.Option(help=f"Attacks to run: {', '.join(ATTACKS)}.")] = None,
    seconds: Annotated[float, typer.Option(help="How long each attack lasts at least, each time.", min=1)] = 10,
    model: Annotated[Path | None, typer.Option(help="Target to serve. Default: the bundled pair.")] = None,
    draft: Annotated[str, typer.Option(help="Of such a target: a draft's directory, magicdec or off.")] = "off",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
    out: Annotated[Path, typer.Option(help="Figures, as JSON.")] = Path("build/neighbours.json"),
) -> None:
    """Attack the system beside a victim, one attack after the other, and say what that cost the victim."""
    if unknown := set(only or ()) - ATTACKS.keys():
        raise typer.BadParameter(f"there is no attack {min(unknown)!r}; there are {', '.join(ATTACKS)}")
    options = ["--model", str(model), "--draft", draft] if model else []
    load, results = os.getloadavg()[0], list[Result]()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("")

        def say(what: str) -> None:
            progress.update(task, description=what)

        for name in only or ATTACKS:
            results.append(run(ATTACKS[name], options, seconds, say))
            figures = {"seconds": seconds, "load before": load, "attacks": [result.as_json() for result in results]}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(figures, indent=1) + "\n")
            broken = "; ".join(results[-1].broken)
            progress.console.print(f"{name}: {f'[red]{broken}[/]' if broken else 'all bounds hold'}")
    if as_json:
        print(json.dumps(figures))
    else:
        Console(width=None if console.is_terminal else 200).print(table(results))
    raise typer.Exit(any(result.broken for result in results))


def run(attack: Attack, options: list[str], seconds: float, say: Callable[[str], object]) -> Result:
    """One attack on a fresh system."""
    say(f"{attack.name}: starting the services")
    with stack(options, attack.descriptors) as system:
        beside(system, well_behaved, max(1, attack.beside), seconds / 4, seed=0)
        say(f"{attack.name}: the victim beside {attack.beside} who behave")
        usual, _ = beside(system, well_behaved, attack.beside, seconds, seed=1)
        times, resident, answers = list[Seen](), list[dict[str, int]](), dict[str, int]()
        for time_ in range(1, _MOST_TIMES + 1):
            say(f"{attack.name}: {attack.about} ({time_} of {_FEWEST_TIMES} to {_MOST_TIMES})")
            once, answers = beside(system, attack.behaviour, attack.clients, seconds, seed=1 + time_)
            times.append(once)
            say(f"{attack.name}: letting it settle")
            system.settle()
            resident.append(system.resident())
            if time_ >= _FEWEST_TIMES and growth_of(times) <= MOST_GROWTH:
                break
        return judge(attack.name, attack.about, usual, times, resident, system.lost(), answers)


def beside(system: Stack, behaviour: Behaviour, clients: int, seconds: float, seed: int) -> tuple[Seen, dict[str, int]]:
    """What the victim sees beside so many clients, and what these were answered."""
    with Watch(system.victim, system) as watch:
        if not clients:
            time.sleep(seconds)
            return watch.seen, {}
        with Crowd(system.attacker, behaviour, clients, seconds, seed) as crowd:
            pass
    return watch.seen, dict(crowd.answers)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the services end with it
    typer.run(neighbours)
