"""Fixtures of the kernels' tests."""

from __future__ import annotations

import numpy as np
import pytest

from anaphora import _native


@pytest.fixture(params=_native.available_kernels())
def kernels(request):
    """Runs the test on every kernel set that this processor can run."""
    before = _native.kernel_name()
    _native.select_kernels(request.param)
    yield request.param
    _native.select_kernels(before)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
