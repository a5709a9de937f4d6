"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anaphora import cli, cli_common
from anaphora.loaders.sources import CACHE_VARIABLE, models_dir, pull, resolve

Run = Callable[..., tuple[int, str, str]]


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


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's exit status, stdout and stderr."""
    for name in (cli_common.API_KEY_VARIABLE, cli_common.ADMIN_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            cli.main(arguments)
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run
