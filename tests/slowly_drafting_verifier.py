"""The verifier service, whose own guesses take 300 ms."""

from __future__ import annotations

import time
from typing import Any

from spire.decoding.drafting import Drafted
from verifier_service.__main__ import main
from verifier_service.engine.step import ModelSteps

_draft = ModelSteps.draft


def draft_slowly(self: ModelSteps, *arguments: Any) -> Drafted:
    time.sleep(0.3)
    return _draft(self, *arguments)


ModelSteps.draft = draft_slowly  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
