"""A real server over a fake model, and what tests need to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from anaphora.fake import FakeLLM
from anaphora.server.app import create_app
from anaphora.server.listen import bind, build_server, url_of
from anaphora.server.tenants import Tenants

HELLO = [{"role": "user", "content": "hello"}]


class Running:
    """Listens on a free port, in a thread of its own."""

    def __init__(
        self, llm: FakeLLM, keys: tuple[str, ...], admin_key: str | None, options: dict[str, Any]
    ) -> None:
        self.llm = llm
        tenants = Tenants.from_flags(keys, admin_key)
        tls = options.pop("tls", None)
        self.app = create_app(llm, tenants, **options)
        self._sock = bind("127.0.0.1", 0, tenants=tenants)
        self.url = url_of(self._sock, tls)
        self._server = build_server(self.app, tls)
        self._thread = threading.Thread(target=self._run)
        self._key = keys[0].rpartition("=")[2] if keys else "none"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        running = asyncio.create_task(self.app.state.service.run(self.app))
        await self._server.serve(sockets=[self._sock])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)

    def shut_down(self) -> None:
        """What SIGTERM does: no new connections, running requests may end."""
        self._server.should_exit = True

    def stop(self) -> None:
        self.shut_down()
        self._server.force_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self.app.state.service.close()

    def http(self, **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {self._key}", **options.pop("headers", {})}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, **options)

    def openai(self, key: str = "") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or self._key, max_retries=0, timeout=20
        )

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self._key, max_retries=0, timeout=20
        )

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=10)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A POST whose answer nobody has read yet."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        sock = self.connect()
        sock.sendall(head.encode() + content)
        return sock


def wait_until(condition: Callable[[], bool], *, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


Serve = Callable[..., Running]


@contextlib.contextmanager
def serving() -> Iterator[Serve]:
    """Starts servers, and stops them at the end."""
    running: list[Running] = []

    def serve(
        *keys: str, llm: FakeLLM | None = None, admin_key: str | None = None, **options: Any
    ) -> Running:
        server = Running(llm or FakeLLM(), keys, admin_key, options)
        server.start()
        running.append(server)
        return server

    try:
        yield serve
    finally:
        for server in running:
            server.stop()


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object; the envelope must be exactly OpenAI's."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error
