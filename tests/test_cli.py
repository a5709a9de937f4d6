from __future__ import annotations

import asyncio
import datetime
import os
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from anaphora import cli, cli_serve
from anaphora.config import EngineConfig
from anaphora.errors import CorruptCheckpoint
from anaphora.fake import FakeLLM
from anaphora.machine import usable_cores
from anaphora.ops.native import kernel_name
from anaphora.server.gate import Drain
from anaphora.types import ModelInfo
from tests.conftest import Run


class ScriptedLLM(FakeLLM):
    """Stands where ``AsyncLLM`` does, and remembers its configuration."""

    created: list[ScriptedLLM]
    start_error: Exception | None = None
    info_at_start: ModelInfo | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.info = self.info_at_start or self.info
        self.config = config
        self.model_name = config.model
        self.is_closed = False
        self.created.append(self)

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedLLM]:
    """The models that the command starts; none is real."""
    module: Any = ModuleType("anaphora.async_llm")
    module.AsyncLLM = ScriptedLLM
    monkeypatch.setitem(sys.modules, "anaphora.async_llm", module)
    monkeypatch.setattr(ScriptedLLM, "created", [], raising=False)
    return ScriptedLLM.created


def test_help_is_grouped_and_version_is_printed(run: Run) -> None:
    status, output, _ = run("serve", "--help")
    assert status == 0
    panels = (
        "Model",
        "Server",
        "Cache",
        "Tiers below the cache",
        "Sharing the cache",
        "Scheduling",
    )
    for text in (*panels, "--no-enable-prefix-caching", "cgroup"):
        assert text in output
    assert [output.index(f"─ {panel} ─") for panel in panels] == sorted(
        output.index(f"─ {panel} ─") for panel in panels
    )
    assert "--no-lock-memory" not in output
    status, output, _ = run("--version")
    assert (status, output.split()[0]) == (0, "anaphora")


def test_help_needs_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys; from anaphora.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'zmq'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_option_of_the_engine_has_a_flag_with_its_default(run: Run) -> None:
    import dataclasses
    import inspect

    parameters = inspect.signature(cli.serve).parameters
    of_the_file = {"weights", "bought_capacity"}  # anaphora.yaml's alone
    for field in dataclasses.fields(EngineConfig):
        if field.name in of_the_file:
            continue
        assert parameters[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "add --api-key"]),
        (["--api-key", ""], ["--api-key number 1 is empty"]),
        (["--kv-cache-memory", "lots"], ["lots", "2GiB"]),
        (["--block-size", "17"], ["--block-size is 17"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs is 0", "at least 1"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization is 1.5"]),
        (["--swap-space", "lots"], ["--swap-space", "'lots'", "2GiB"]),
        (["--disk-cache", "d"], ["--disk-cache-size", "belong together"]),
        (["--disk-cache", "d", "--disk-cache-size", "x"], ["--disk-cache-size", "'x'"]),
        (["--disk-cache-persist"], ["--disk-cache-persist needs"]),
        (["--disk-cache-key-file", "k"], ["without --disk-cache-persist"]),
        (["--disk-cache-ttl", "0"], ["--disk-cache-ttl is 0.0"]),
        (["--swap-space", "1", "--no-enable-prefix-caching"], ["leave one of them out"]),
        (["--pin-quota", "2"], ["--pin-quota is 2.0"]),
        (["--audit-hits", "-1"], ["--audit-hits is -1.0"]),
        (["--public-prefix", "/nowhere/x"], ["--public-prefix /nowhere/x cannot be read"]),
        (["--admin-key", ""], ["--admin-key is empty"]),
        (["--admin-key", "k", "--api-key", "a=k"], ["--admin-key is also an --api-key"]),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(
    run: Run, llms: list[ScriptedLLM], arguments: list[str], words: list[str]
) -> None:
    status, output, errors = run("serve", *arguments)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    for word in ("error: ", *words):
        assert word in errors
    assert not llms


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_public_prefix_that_cannot_be_used_names_its_file(
    run: Run, llms: list[ScriptedLLM], tmp_path: Any, content: bytes | None, words: str
) -> None:
    path = tmp_path / "prefix.txt"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    status, _, errors = run("serve", "--port", "0", "--public-prefix", str(path))
    assert status == 2
    assert f"--public-prefix {path} {words}" in errors
    assert not llms


@pytest.mark.parametrize(
    "arguments",
    [["--metrics-tenants", "-1"], ["--dtype", "int4"], ["--port", "70000"], ["--nonsense"]],
)
def test_what_the_parser_refuses_is_status_2(
    run: Run, llms: list[ScriptedLLM], arguments: list[str]
) -> None:
    status, _, errors = run("serve", *arguments)
    assert status == 2
    assert arguments[0] in errors
    assert not llms


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    run: Run, llms: list[ScriptedLLM]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, errors = run("serve", "--port", str(port))
    assert status == 2
    assert f"--port {port}" in errors
    assert not llms


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hello"]])
def test_a_model_that_cannot_be_served(
    run: Run,
    llms: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.setattr(ScriptedLLM, "start_error", CorruptCheckpoint("it is cut; pull it again"))
    status, output, errors = run(*command)
    assert (status, output, errors) == (2, "", "error: it is cut; pull it again\n")
    assert llms[0].is_closed


def test_generate_streams_the_answer(run: Run, llms: list[ScriptedLLM]) -> None:
    assert run("generate", "hello")[:2] == (0, "You said: hello\n")
    assert (
        run("generate", "hello", "--raw", "--max-tokens", "3", "--dtype", "float32")[1] == "You\n"
    )
    assert [llm.is_closed for llm in llms] == [True, True]
    chat, raw = (llm.requests[0] for llm in llms)
    assert raw.prompt_token_ids == [256, *b"hello"]
    assert len(chat.prompt_token_ids) > len(raw.prompt_token_ids)
    assert chat.params.temperature == 0
    assert llms[1].config.dtype == "float32"
    status, _, errors = run("generate", "hello", "--temperature", "9")
    assert status == 2
    assert "temperature is 9" in errors


class _Recorder:
    """Takes uvicorn's place: asks the app a question instead of serving it."""

    is_leaving = should_exit = False

    def __init__(self, app: Any, answers: list[httpx.Response], headers: dict[str, str]) -> None:
        self._app = app
        self._answers = answers
        self._headers = headers

    async def serve(self, sockets: list[socket.socket]) -> None:
        assert sockets[0].getsockname()[1] > 0
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            self._answers.append(await client.get("/v1/models", headers=self._headers))


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_serve_prints_what_it_serves_and_hands_options_on(
    run: Run,
    llms: list[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    is_in_environment: bool,
) -> None:
    from anaphora.server import listen

    answers: list[httpx.Response] = []
    headers = {"authorization": "Bearer secret-2"}
    monkeypatch.setattr(listen, "build_server", lambda app, _: _Recorder(app, answers, headers))
    keys = ["--api-key", "secret-1", "--api-key", "team=secret-2"]
    if is_in_environment:
        keys = []
        monkeypatch.setenv(cli.API_KEY_VARIABLE, "secret-1,team=secret-2")
    status, output, errors = run(
        "serve", "some-model.gguf", "--port", "0", "--host", "0.0.0.0", *keys,
        "--served-model-name", "a", "--served-model-name", "b/c",
        "--kv-cache-memory", "96MiB", "--no-enable-prefix-caching", "--threads", "2",
        "--chat-date", "2026-01-02",
    )  # fmt: skip
    assert (status, errors) == (0, "")
    assert [model["id"] for model in answers[0].json()["data"]] == ["a", "b/c"]
    for text in ("a, b/c", "http://0.0.0.0:", "/v1", "tokens", "float32", "tenants: 2"):
        assert text in output
    assert "secret" not in output
    config = llms[0].config
    assert config.model == "some-model.gguf"
    assert config.kv_cache_memory == 96 * 2**20
    assert config.threads == 2
    assert config.template_date == datetime.date(2026, 1, 2)
    assert not config.enable_prefix_caching
    assert llms[0].is_closed


def test_serve_hands_the_caches_options_on(
    run: Run, llms: list[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from anaphora.server import listen

    answers: list[httpx.Response] = []
    headers = {"authorization": "Bearer secret-admin"}
    monkeypatch.setattr(listen, "build_server", lambda app, _: _Recorder(app, answers, headers))
    monkeypatch.setenv(cli_serve.ADMIN_KEY_VARIABLE, "secret-admin")
    (tmp_path / "one.txt").write_text("You are kind.\n")
    (tmp_path / "two.txt").write_bytes(b"Lines\r\n\n")
    tiers = {"device": 64 * 2**20, "host": 2**30, "disk": 5 * 10**9}
    info = msgspec.structs.replace(
        FakeLLM().info, kv_cache_bytes=64 * 2**20, num_blocks=64, tier_bytes=tiers
    )
    monkeypatch.setattr(ScriptedLLM, "info_at_start", info)
    status, output, errors = run(
        "serve", "--port", "0", "--api-key", "team=secret-1",
        "--swap-space", "1", "--lock-memory",
        "--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "5GB", "--disk-cache-persist",
        "--disk-cache-key-file", "key", "--disk-cache-ttl", "60",
        "--cache-share", "class:batch=0:10", "--cache-share", "tenant:team=20:60",
        "--public-prefix", str(tmp_path / "one.txt"), "--public-prefix", str(tmp_path / "two.txt"),
        "--pin-quota", "0.2", "--audit-hits", "0.01", "--eviction-policy", "lru",
        "--kv-cache-memory", "65MiB",
    )  # fmt: skip
    assert (status, errors) == (0, "")
    assert answers[0].status_code == 200
    config = llms[0].config
    assert (config.swap_space, config.disk_cache_size) == (2**30, 5 * 10**9)
    assert (config.disk_cache, config.disk_cache_key_file) == (str(tmp_path / "disk"), "key")
    assert config.disk_cache_persist
    assert config.lock_memory
    assert (config.disk_cache_ttl, config.pin_quota, config.audit_hits) == (60, 0.2, 0.01)
    assert config.cache_share == ("class:batch=0:10", "tenant:team=20:60")
    assert config.public_prefix == ("You are kind.", "Lines\r\n")
    for text in (
        "1,024 tokens in 64.0 MiB of 65.0 MiB", "locked", "16,384 tokens in 1.0 GiB of 1.0 GiB",
        "host tier", "disk tier", "in 4.7 GiB of 4.7 GiB", "kept, used for 60 s",
        "tenants: 1, and an admin",
    ):  # fmt: skip
        assert text in output, text
    assert "secret" not in output


@pytest.mark.parametrize("variable", [cli.API_KEY_VARIABLE, cli_serve.ADMIN_KEY_VARIABLE])
def test_an_empty_key_variable_does_not_open_the_server(
    run: Run, llms: list[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    status, _, errors = run("serve", "--port", "0")
    assert status == 2
    assert ("--api-key" if variable == cli.API_KEY_VARIABLE else "--admin-key") in errors
    assert not llms


def test_sigterm_closes_the_model(llms: list[ScriptedLLM], run: Run, monkeypatch: Any) -> None:
    import signal

    from anaphora.server import listen

    before = signal.getsignal(signal.SIGTERM)
    built: list[Any] = []
    original = listen.build_server
    monkeypatch.setattr(listen, "build_server", lambda *a: built.append(original(*a)) or built[0])

    def terminate() -> None:
        while not (built and built[0].started):
            threading.Event().wait(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        status, _, _ = run("serve", "--port", "0", "--served-model-name", "a")
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert status == 0
    assert llms[0].is_closed


@pytest.mark.parametrize("is_stuck", [True, False])
def test_requests_that_do_not_end_are_told(is_stuck: bool) -> None:
    """After their time the model is closed, so that a stream ends with an error event."""
    closed: list[bool] = []
    limiter = SimpleNamespace(num_running=1)

    class Model:
        async def close(self) -> None:
            closed.append(True)

    async def scenario() -> None:
        server: Any = SimpleNamespace(is_leaving=False, should_exit=False)
        service: Any = SimpleNamespace(drain=Drain(), limiter=limiter)
        running = asyncio.create_task(asyncio.sleep(60))
        leave = cli_serve._leave(server, service, running, Model(), 0.3)
        leaving = asyncio.create_task(leave)
        await asyncio.sleep(0.1)
        assert not service.drain.is_draining
        server.is_leaving = True
        await asyncio.sleep(0.1)
        assert service.drain.is_draining
        assert running.cancelled()
        assert not server.should_exit
        limiter.num_running = int(is_stuck)
        await asyncio.wait_for(leaving, 10)
        assert server.should_exit

    asyncio.run(scenario())
    assert closed == [True] * is_stuck


def test_doctor_tells_what_it_found(run: Run, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"x" * 2048)
    status, output, _ = run("doctor")
    assert status == 0
    cores = f"{usable_cores()} of {os.cpu_count()} cores"
    for text in (kernel_name(), cores, "usable of", "tiny.gguf (2.0 KiB)", "numpy"):
        assert text in output


def test_pull_prints_the_path(run: Run, monkeypatch: Any) -> None:
    from anaphora.loaders import sources

    monkeypatch.setattr(sources, "pull", lambda alias, **_: f"/somewhere/{alias}.gguf")
    assert run("pull")[:2] == (0, "/somewhere/smollm2.gguf\n")
    monkeypatch.undo()
    status, _, errors = run("pull", "unknown-alias")
    assert status == 2
    assert "unknown-alias" in errors


def test_a_model_with_terms_is_refused_until_they_are_accepted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path))
    for command in (["pull"], ["serve", "--port", "0"], ["generate", "hi", "--model"]):
        status, out, err = run(*command, "gemma3-270m")
        assert status == 2
        assert "https://ai.google.dev/gemma/terms" in err
        assert "anaphora pull gemma3-270m --accept-license" in err
        assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_cuts_nothing_off_in_a_narrow_terminal(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, output, _ = run("serve", "--help")
    assert status == 0
    assert "…" not in output
