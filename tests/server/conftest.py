from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.running import Running, Serve, serving


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that stop after the test."""
    with serving() as start:
        yield start


@pytest.fixture
def let_go_of_sockets() -> Iterator[None]:
    """For clients that keep connections and never close them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One open server for those tests of a module that leave no trace in it."""
    with serving() as start:
        yield start()


@pytest.fixture
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.http() as client:
        yield client


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with shared.openai() as sdk:
        yield sdk
