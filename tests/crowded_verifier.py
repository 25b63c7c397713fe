"""The verifier service on a slow machine of known speed: a step of up to 6 positions takes 20 ms, and one of twice as
many four times as long.

So speculation pays for one sequence and loses for eight, whatever the machine that runs the test is busy with.
"""

from __future__ import annotations

import time

from verifier_service.__main__ import main
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.step import ModelSteps, Outcome, PromptChunk

_run = ModelSteps.run


def run_slowly(
    self: ModelSteps, batch: RaggedBatch | None, chunk: PromptChunk | None
) -> tuple[Outcome | None, Outcome | None]:
    began = time.perf_counter()
    verified, prefilled = _run(self, batch, chunk)
    if batch:
        seconds = 0.02 * max(1.0, batch.positions / 6) ** 2
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
    return verified, prefilled


ModelSteps.run = run_slowly  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
