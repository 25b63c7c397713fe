"""The verifier service with a target so large that a step takes STEP seconds, and a chunk of prompts PREFILL more:

python -m tests.slow_verifier STEP PREFILL --model ...
"""

from __future__ import annotations

import sys
import time

from verifier_service.__main__ import main
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.step import ModelSteps, Outcome, PromptChunk

_run = ModelSteps.run
_step, _prefill = (float(sys.argv.pop(1)) for _ in range(2))


def run_slowly(
    self: ModelSteps, batch: RaggedBatch | None, chunk: PromptChunk | None
) -> tuple[Outcome | None, Outcome | None]:
    time.sleep(_step + (_prefill if chunk else 0.0))
    return _run(self, batch, chunk)


ModelSteps.run = run_slowly  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
