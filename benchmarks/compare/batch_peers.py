"""Other engines as they run many chats at once: vLLM's offline batch, llama-server beside a client.

Each is a process of its own that is stopped while it has nothing to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
from systems import HERE, PEERS, START_SECONDS, free_port

from anaphora.batch.client import Client

READY = "vllm_batch is ready"  # as vllm_batch.py says it; that file imports vLLM
NUM_SLOTS = 4  # of llama-server
BLOCK_SIZE = 32  # of vLLM: the least its CPU backend takes, so the most of a prefix is found
MAX_TOKENS = 8

Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """What came for one chat."""

    text: str
    num_prompt: int
    num_cached: int
    num_output: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What came for all, and how long it took."""

    seconds: float
    rows: list[Row]


class System(Protocol):
    """Answers chats, all at once."""

    def run(self, chats: Sequence[Messages], choice: Sequence[str]) -> Run:
        """Each answer is one of ``choice``, at temperature 0."""


class _Process:
    """A group of processes that only runs inside ``awake``."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            text=True,
        )

    def wait_for(self, line: str) -> None:
        """Reads until the process has said ``line``."""
        assert self.process.stdout is not None
        for found in self.process.stdout:
            self._log.write(found.encode())
            self._log.flush()
            if line in found:
                return
        raise SystemExit(f"it ended; see {self._log.name}")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(0.2)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Vllm:
    """``vllm.LLM.chat`` over all rows."""

    def __init__(self, process: _Process, folder: Path) -> None:
        self._process = process
        self._rows, self._result = folder / "rows.jsonl", folder / "result.json"

    def run(self, chats: Sequence[Messages], choice: Sequence[str]) -> Run:
        self._rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        job = {"rows": str(self._rows), "choice": list(choice), "result": str(self._result)}
        stdin = self._process.process.stdin
        assert stdin is not None
        with self._process.awake():
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
            self._process.wait_for(READY)
        found = json.loads(self._result.read_text())
        return Run(found["seconds"], [Row(*row) for row in found["rows"]])


class Llama:
    """llama-server, as many requests at a time as it has slots."""

    def __init__(self, process: _Process, url: str, num_slots: int) -> None:
        self._process = process
        self._url = url
        self._num_slots = num_slots

    def run(self, chats: Sequence[Messages], choice: Sequence[str]) -> Run:
        grammar = "root ::= " + " | ".join(json.dumps(text) for text in choice)
        more = {"temperature": 0, "max_tokens": MAX_TOKENS, "grammar": grammar}
        bodies = [{"messages": chat, **more} for chat in chats]
        with self._process.awake(), Client(self._url, concurrency=self._num_slots) as client:
            return run_client(client, bodies, is_planned=False)


def run_client(client: Client, bodies: Sequence[dict[str, Any]], *, is_planned: bool) -> Run:
    """Through our client; any answer but a success ends the measurement."""
    begin = time.perf_counter()
    replies = client.complete(bodies, is_planned=is_planned)
    seconds = time.perf_counter() - begin
    rows = []
    for reply in replies:
        if reply.error:
            raise SystemExit(f"a row failed: {reply.error}")
        num_prompt, num_cached, num_output = reply.usage()
        rows.append(Row(reply.text, num_prompt, num_cached, num_output))
    return Run(seconds, rows)


@contextlib.contextmanager
def vllm(venv: Path, weights: Path, log: Path, options: Sequence[str]) -> Iterator[Vllm]:
    """Started, with the model of ``weights``; ``options`` are arguments of ``vllm.LLM``."""
    command = [str(venv / "bin" / "python"), str(HERE / "vllm_batch.py"), str(weights / "hf")]
    given = {"block_size": str(BLOCK_SIZE)} | dict(option.split("=", 1) for option in options)
    command += [f"{name}={value}" for name, value in given.items()]
    process = _Process(command, dict(PEERS["vllm"].environment), log)
    try:
        process.wait_for(READY)
        with tempfile.TemporaryDirectory() as folder:
            yield Vllm(process, Path(folder))
    finally:
        process.end()


@contextlib.contextmanager
def llama(venv: Path, weights: Path, log: Path, options: Sequence[str]) -> Iterator[Llama]:
    """Started; ``options`` are those of ``llama_server.py``."""
    given = dict(option.split("=", 1) for option in options)
    num_slots = int(given.setdefault("parallel", str(NUM_SLOTS)))
    port = free_port()
    command = [str(venv / "bin" / "python"), str(HERE / "llama_server.py")]
    command += [str(weights / "q8_0.gguf"), str(port)]
    process = _Process([*command, *(f"{k}={v}" for k, v in given.items())], {}, log)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/models").status_code == 200:
                    break
            if process.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"llama-server did not start; see {log}")
            time.sleep(0.5)
        yield Llama(process, url, num_slots)
    finally:
        process.end()
