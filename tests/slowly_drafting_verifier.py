"""The verifier service, whose own guesses take 300 ms."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spire.decoding.drafting import Drafted
from spire.decoding.sampling import SamplingRows
from verifier_service.__main__ import main
from verifier_service.engine.step import ModelSteps

_draft = ModelSteps.draft


def draft_slowly(self: ModelSteps, slots: Sequence[int], newest: Sequence[int], k: int, rows: SamplingRows) -> Drafted:
    time.sleep(0.3)
    return _draft(self, slots, newest, k, rows)


ModelSteps.draft = draft_slowly  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
