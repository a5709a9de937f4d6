from __future__ import annotations

import socket

import pytest

from anaphora.errors import ConfigError
from anaphora.fake import FakeLLM
from anaphora.server import listen
from anaphora.server.listen import bind, url_of
from anaphora.server.tenants import Tenants
from tests.server.running import Serve

OPEN = Tenants.from_flags([])
LOCKED = Tenants.from_flags(["key"])


def test_any_free_port_on_loopback() -> None:
    for host in ("127.0.0.1", "localhost", "127.5.5.5"):
        with bind(host, 0, tenants=OPEN) as sock:
            assert url_of(sock).startswith(("http://127.", "http://[::1]:"))
            assert not url_of(sock).endswith(":0")
            assert sock.proto == socket.IPPROTO_TCP  # else asyncio leaves TCP_NODELAY off


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        bind(host, 0, tenants=OPEN)


def test_other_machines_may_come_with_a_key() -> None:
    with bind("0.0.0.0", 0, tenants=LOCKED) as sock:
        assert url_of(sock).startswith("http://0.0.0.0:")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} .*choose another --port"):
            bind("127.0.0.1", port, tenants=OPEN)


@pytest.mark.parametrize("host", ["", "no such host", "a" * 300, "127.0.0.1.5"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(host, 0, tenants=OPEN)


def test_a_head_that_trickles_in_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a first request, and on a later one over the same connection."""
    monkeypatch.setattr(listen, "_HEAD_SECONDS", 0.3)
    server = serve("key")
    slow = server.connect()
    slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    used = server.connect()
    used.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert used.recv(4096).startswith(b"HTTP/1.1 200")
    used.sendall(b"GET /health HTTP/1.1\r\n")
    for sock in (slow, used):
        with sock:
            while sock.recv(4096):  # the end comes before the socket's own timeout
                pass


def test_a_long_answer_is_not_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_HEAD_SECONDS", 0.1)
    server = serve(llm=FakeLLM(token_delay=0.02))
    server.llm.enqueue("x" * 40)
    with server.openai() as client:
        answer = client.completions.create(model="fake", prompt="a", max_tokens=40)
    assert answer.choices[0].text == "x" * 40
