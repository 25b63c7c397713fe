"""`make gpu`: measure by parts on a machine that has a GPU, Python, torch and perhaps nothing else.

    python -m experiments.gpu --out DIR                 all parts
    python -m experiments.gpu --out DIR --parts 0,3     these
    python -m experiments.gpu --out DIR --dry-run       every part on the CPU with tiny shapes
    python -m experiments.gpu --resume FILE             what a run of this commit on such a card has left over

Each part is a process of its own with a limit: one that fails, crashes or runs out of time is a finding, and the next
goes on. DIR gets one JSON file a run, whole after every part; a short table comes last. Exit code 1: a part failed.
Standard library only: torch is the parts' business. docs/gpu.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.gpu.findings import write_json
from experiments.gpu.packages import ROOT, environment, search_path
from experiments.gpu.parts import Part, parts_named
from experiments.gpu.table import table

_KEPT_LINES = 40
# However busy the machine is: its figures mean nothing.
_DRY_RUN_PATIENCE = 1200.0


def main() -> None:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="spire-gpu-") as directory:
        try:
            parts, paths = parts_named(asked.parts), search_path(Path(directory) / "site")
        except (ValueError, RuntimeError) as error:
            sys.exit(f"gpu: {error}")
        run = _begin(asked, environment(paths))
        earlier = _earlier(asked.resume, run) if asked.resume else {}
        if run["machine"]["card"] == "none" and not asked.dry_run:
            sys.exit("gpu: torch sees no GPU here; --dry-run tries every part on the CPU")
        file = asked.out / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
        print(f"estimate: {', '.join(f'part {p.number} {p.estimate} s' for p in parts)}", flush=True)
        print(f"          {sum(part.estimate for part in parts)} s together, at most {asked.within:.0f} s", flush=True)
        _run_all(parts, asked, environment(paths), Path(directory), run, file, earlier)
    print(table(run))
    print(f"\n{file}")
    sys.exit(any(part["status"] != "ok" for part in run["parts"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu", description="Measure by parts on a machine with a GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="directory of the JSON files")
    parser.add_argument("--parts", default="", help="numbers with commas; all by default")
    parser.add_argument("--within", type=float, default=570, help="seconds after which no part is begun or goes on")
    parser.add_argument("--resume", type=Path, help="JSON file of a run: what it has measured is not measured again")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with tiny shapes")
    return parser.parse_args()


def _begin(asked: argparse.Namespace, variables: dict[str, str]) -> dict[str, Any]:
    """The JSON of a run in which nothing has been measured yet."""
    asked.out.mkdir(parents=True, exist_ok=True)
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "dry_run": asked.dry_run,
        "machine": _machine([sys.executable, "-m", "experiments.gpu.machine"], variables),
        "parts": [],
    }


def _earlier(file: Path, run: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The parts of an earlier run by number. Ends this process unless it is a run of this commit on such a card."""
    earlier = json.loads(file.read_text())
    for what, now, then in (
        ("commit", run["commit"], earlier["commit"]),
        ("card", run["machine"]["card"], earlier["machine"]["card"]),
        ("dry run", run["dry_run"], earlier["dry_run"]),
    ):
        if now != then:
            sys.exit(f"gpu: {file} cannot be resumed: its {what} is {then}, and this one's is {now}")
    return {part["part"]: part for part in earlier["parts"]}


def _machine(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """The description of this machine that `command` prints; ends this process where it cannot."""
    told = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        said = told.stderr.strip().splitlines() or [_ending(told.returncode)]
        sys.exit(f"gpu: torch cannot be used: {said[-1]}")
    described: dict[str, Any] = json.loads(told.stdout)
    return described


def _commit() -> str | None:
    """None where the history did not travel with the files."""
    try:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def _run_all(
    parts: list[Part],
    asked: argparse.Namespace,
    variables: dict[str, str],
    directory: Path,
    run: dict[str, Any],
    file: Path,
    earlier: dict[int, dict[str, Any]],
) -> None:
    until = time.monotonic() + (_DRY_RUN_PATIENCE if asked.dry_run else asked.within)
    for part in parts:
        before = earlier.get(part.number, {"status": "not begun", "findings": []})
        if before["status"] == "ok":
            run["parts"].append(before)
            write_json(file, run)
            continue
        if before["findings"]:
            write_json(_found_by(part, directory), before["findings"])
        left = min(_DRY_RUN_PATIENCE if asked.dry_run else part.limit, until - time.monotonic())
        print(f"part {part.number}: {part.what} (about {part.estimate} s)", flush=True)
        measured = _run_part(part, asked.dry_run, variables, directory, left) if left > 0 else _not_begun()
        run["parts"].append({"part": part.number, "what": part.what, "estimate": part.estimate, **measured})
        write_json(file, run)
        print(f"  {measured['status']} after {measured['seconds']:.1f} s", flush=True)


def _not_begun() -> dict[str, Any]:
    return {"status": "not begun", "error": "no time was left", "seconds": 0.0, "findings": []}


def _run_part(part: Part, dry_run: bool, variables: dict[str, str], directory: Path, limit: float) -> dict[str, Any]:
    """One part as a process, ended with all it started when its time is up."""
    found, log = _found_by(part, directory), directory / f"{part.number}.log"
    command = [sys.executable, "-m", "experiments.gpu.part", part.module, str(found)]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["--dry-run"] if dry_run else [])],
            env=variables,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            status, error = ("ok", None) if code == 0 else ("failed", f"{_ending(code)}\n{_last_lines(log)}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status, error = "out of time", f"ended after {limit:.0f} s\n{_last_lines(log)}"
    findings = json.loads(found.read_text()) if found.exists() else []
    return {"status": status, "error": error, "seconds": time.monotonic() - began, "findings": findings}


def _found_by(part: Part, directory: Path) -> Path:
    return directory / f"{part.number}.json"


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])


if __name__ == "__main__":
    main()
