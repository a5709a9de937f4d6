from __future__ import annotations

import socket

import pytest

from anaphora.errors import ConfigError
from anaphora.server.listen import bind, url_of
from anaphora.server.tenants import Tenants

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
