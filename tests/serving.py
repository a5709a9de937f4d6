"""``anaphora serve`` as its users run it: a process of its own, seen only from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import wait_until

COMMAND = Path(sysconfig.get_path("scripts")) / "anaphora"
TIMEOUT = 120  # seconds; nothing here takes so long unless it hangs
_URL = re.compile(r"(http://\S+)/v1\b")
# No package index: what is not in place cannot be fetched.
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def environment(temporary: str, changes: Mapping[str, str]) -> dict[str, str]:
    """Ours without keys, wide enough that no line is folded, temporary files in ``temporary``."""
    keys = ("ANAPHORA_API_KEY", "ANAPHORA_ADMIN_KEY")
    kept = {name: value for name, value in os.environ.items() if name not in keys}
    return kept | {"COLUMNS": "250", "TMPDIR": temporary} | dict(changes)


@dataclasses.dataclass
class Finished:
    """What a command that has ended left."""

    status: int
    output: str
    errors: str


def run_command(folder: Path, *arguments: str, **changes: str) -> Finished:
    """``anaphora`` with ``arguments``, to its end. ``changes`` go into its environment."""
    # not in ``folder``: a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="a-") as temporary:
        done = subprocess.run(
            [COMMAND, *arguments],
            env=environment(temporary, changes),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert not os.listdir(temporary)
    return Finished(done.returncode, done.stdout, done.stderr)


class Server:
    """One ``anaphora serve``. Its output goes to files in ``folder``."""

    def __init__(self, folder: Path, arguments: Sequence[str], changes: Mapping[str, str]) -> None:
        self.folder = folder
        self.key = "none"
        self.temporary = Path(tempfile.mkdtemp(prefix="a-"))  # short, as a socket's path must be
        with self._file("output").open("wb") as output, self._file("errors").open("wb") as errors:
            self.process = subprocess.Popen(
                [COMMAND, "serve", *arguments, "--port", "0"],
                env=environment(str(self.temporary), changes),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # a process group of its own
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    @property
    def output(self) -> str:
        return self._file("output").read_text()

    @property
    def errors(self) -> str:
        return self._file("errors").read_text()

    @property
    def temporary_files(self) -> list[Path]:
        return sorted(self.temporary.rglob("*"))

    @property
    def url(self) -> str:
        match = _URL.search(self.output)
        assert match, self.output
        return match[1]

    def wait(self) -> None:
        """Until it answers."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.errors
            if not _URL.search(self.output):
                return False
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", timeout=TIMEOUT).status_code == 200
            return False

        wait_until(is_up, seconds=TIMEOUT)

    def http(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT)

    def openai(self, key: str = "", *, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=max_retries,
            timeout=TIMEOUT,
        )

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT
        )

    def send(self, path: str, body: Mapping[str, Any]) -> socket.socket:
        """A POST whose answer nobody has read yet."""
        content = json.dumps(body).encode()
        parts = urlsplit(self.url)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.key}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        sock = socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT)
        sock.sendall(head.encode() + content)
        return sock

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels."""
        with self.http() as http:
            text = http.get("/metrics").raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = "".join(f" {k}={v}" for k, v in sorted(sample.labels.items()))
                found[sample.name + labels] = sample.value
                if "endpoint" in sample.labels:  # all endpoints and classes together
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def metric(self, name: str) -> float:
        return self.metrics()[f"anaphora_{name}"]

    def wait_idle(self) -> dict[str, float]:
        """All metrics, once nothing runs and nothing waits."""
        found: dict[str, float] = {}

        def is_idle() -> bool:
            found.update(self.metrics())
            return not (found["anaphora_kv_blocks_used"] or _num_unfinished(found))

        wait_until(is_idle, seconds=TIMEOUT)
        return found

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, found as an operator would find it."""
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                if b"anaphora.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None


def _num_unfinished(metrics: Mapping[str, float]) -> float:
    names = ("anaphora_num_requests_running", "anaphora_num_requests_waiting")
    return sum(metrics[name] for name in names)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            text = stat.read_text()
            # the name, in parentheses, may hold anything
            if int(text.rpartition(")")[2].split()[1]) == pid:
                found.append(int(text.split()[0]))
    return found


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, key: str = "", **changes: str) -> Iterator[Server]:
    """A server that answers; it is stopped at the end, hard if need be."""
    server = Server(folder, arguments, changes)
    server.key = key or server.key
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(10)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        shutil.rmtree(server.temporary)


def cached(usage: Any) -> int:
    """``usage.prompt_tokens_details.cached_tokens``, which must be there."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    tokens = usage.prompt_tokens_details.cached_tokens
    assert isinstance(tokens, int)
    return tokens
