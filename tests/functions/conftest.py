from __future__ import annotations

from collections.abc import Iterator

import pytest

from anaphora import LLM, FakeLLM
from anaphora.batch.client import Client


@pytest.fixture(scope="session")
def real() -> Iterator[Client]:
    """The default model, in this process."""
    with LLM("smollm2", kv_cache_memory=2**27) as llm, Client(llm) as client:
        yield client


@pytest.fixture
def fake() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def scripted(fake: FakeLLM) -> Iterator[Client]:
    """Answers one request after another with what ``fake`` is given."""
    with Client(fake, concurrency=1) as client:
        yield client
