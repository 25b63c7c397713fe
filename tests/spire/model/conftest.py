"""The elementwise Triton kernels, interpreted."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    triton = pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")
    if not triton.knobs.runtime.interpret:
        pytest.skip("with a GPU the kernels are compiled: make gpu")
    return importlib.import_module("spire.model.backends.gpu.elementwise")
