"""A model service with named failpoints: `python -m tests.faults.failing DIRECTORY verifier_service --model ...`.

A failpoint is on while a file of its name exists in DIRECTORY. What a signal or the proxy can do has none.

verifier_service   stuck    the model thread waits, the event loop answers
                   nan      the numbers of every sequence with seed 13 go bad
                   falters  one step fails
                   broken   every step fails
                   slow     a step takes so many seconds, and a chunk of prompts so many more: the file says both
                   lost     one step finds that the GPU is lost
                   brittle  the process ends at a block of a sequence it does not hold
draft_service      gone     one round finds that the GPU is lost
                   behind   activations are absorbed three seconds after they have come
                   lies     any tokens, whatever the draft thinks
                   nonsense any tokens, of no distribution
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from spire.decoding.drafting import Drafted

GPU_LOST = "CUDA error: device-side assert triggered"


def lose_gpu(switch: Path) -> None:
    """A kernel reads what it must not, once. Without a GPU, what torch then raises."""
    if switch.exists():
        switch.unlink()
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.int64, device="cuda")].tolist()
        raise torch.AcceleratorError(f"{GPU_LOST}\nSearch for `cudaErrorAssert'")


def break_verifier(on: Path) -> None:
    from verifier_service.engine.batch import VerifyTask
    from verifier_service.engine.engine import VerifierEngine
    from verifier_service.engine.step import ModelSteps

    whole_step = VerifierEngine._step

    def step(self: VerifierEngine) -> None:
        while (on / "stuck").exists():
            time.sleep(0.01)
        for sequence in self.slots.sequences.values():
            if sequence.started and sequence.start.sampling.seed == 13 and (on / "nan").exists():
                self.steps.cache.values[0].tensor[sequence.slot, :, 0] = float("nan")
        whole_step(self)

    submit = VerifierEngine.submit

    def take(self: VerifierEngine, task: object) -> None:
        items = task.batch.items if isinstance(task, VerifyTask) else []
        if (on / "brittle").exists() and any(item.sequence_id not in self.sequences for item in items):
            os._exit(1)
        submit(self, task)  # type: ignore[arg-type]

    whole_run = ModelSteps.run

    def run(self: ModelSteps, *args: object) -> object:
        if (on / "falters").exists() or (on / "broken").exists():
            (on / "falters").unlink(missing_ok=True)
            raise RuntimeError("the words of a library")
        lose_gpu(on / "lost")
        if (on / "slow").exists():
            step, chunk = map(float, (on / "slow").read_text().split())
            time.sleep(step + (chunk if args[1] else 0))
        return whole_run(self, *args)  # type: ignore[arg-type]

    ModelSteps.run = run  # type: ignore[method-assign,assignment]
    VerifierEngine._step = step  # type: ignore[method-assign]
    VerifierEngine.submit = take  # type: ignore[method-assign,assignment]


def break_draft(on: Path) -> None:
    from draft_service.drafter import Drafter
    from draft_service.worker import Worker

    absorb_at_once = Worker.absorb

    def absorb(self: Worker, *args: object) -> None:
        if (on / "behind").exists():
            asyncio.get_running_loop().call_later(3.0, absorb_at_once, self, *args)
        else:
            absorb_at_once(self, *args)  # type: ignore[arg-type]

    Worker.absorb = absorb  # type: ignore[method-assign,assignment]
    honest = Drafter.propose

    def propose(self: Drafter, *args: object) -> Drafted:
        lose_gpu(on / "gone")
        drafted = honest(self, *args)  # type: ignore[arg-type]
        if not ((on / "lies").exists() or (on / "nonsense").exists()):
            return drafted
        tokens_BK = torch.randint_like(drafted.tokens_BK, self.draft.config.vocab_size)
        probs_BKM = torch.full_like(drafted.probs_BKM, float("nan"))
        return replace(drafted, tokens_BK=tokens_BK, **({"probs_BKM": probs_BKM} if (on / "nonsense").exists() else {}))

    Drafter.propose = propose  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    _, directory, service, *arguments = sys.argv
    sys.argv = [service, *arguments]
    entry = runpy.run_module(f"{service}.__main__")
    {"verifier_service": break_verifier, "draft_service": break_draft}[service](Path(directory))
    entry["main"]()
