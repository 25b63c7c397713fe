"""Which tests run when: `make test` leaves out what is marked `slow` or `thorough`, `make test-all` nothing."""

from __future__ import annotations

from functools import partial

import pytest

# A value of a parametrised test that only `make test-all` tries.
thoroughly = partial(pytest.param, marks=pytest.mark.thorough)
