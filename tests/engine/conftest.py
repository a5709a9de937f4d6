"""The tiny model that the engine's tests share."""

from __future__ import annotations

import pytest

from tests.models.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))
