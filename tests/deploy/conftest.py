"""What tests of the deployment share: where it lies, and tools that a machine may lack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def promtool() -> str:
    """Its path. Debian's package `prometheus` brings it."""
    if (found := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found
