"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anaphora.loaders.sources import CACHE_VARIABLE, models_dir, pull, resolve


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's models, but a place of the tests' own for all else that a cache keeps."""
    cache = tmp_path_factory.mktemp("cache")
    models_dir().mkdir(parents=True, exist_ok=True)
    (cache / "models").symlink_to(models_dir().resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        patch.setenv("ANAPHORA_DATABASE", "memory")  # the user's own may need a key
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; pulled if need be."""
    return resolve("smollm2").path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """A real Gemma 3 of 270 million parameters; pulled if need be, under Google's terms."""
    return pull("gemma3-270m", accept_license=True)
