"""A tiny pair whose services start fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.markov import write_markov_pair
from tests.services import Services, running

# q in the proposals themselves, where a test can read it.
INLINE = ("--shared-memory", "")
# However the machine stutters, the draft waits for its activations and the gateway for the draft.
PATIENT_DRAFT, PATIENT_GATEWAY = ("--wait-ms", "1000"), ("--propose-deadline", "20")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_markov_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def services(pair: tuple[Path, Path]) -> Iterator[Services]:
    draft_options = ["--top-m", "6", *PATIENT_DRAFT, *INLINE]
    with running(*pair, draft_options=draft_options, gateway_options=PATIENT_GATEWAY) as services:
        yield services
