"""Fixtures that several folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.loaders.sources import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; pulled if need be."""
    return resolve("smollm2").path
