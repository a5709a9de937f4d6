"""From an app to a listening socket: address checks before a model is loaded, and uvicorn."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import ipaddress
import socket
import ssl
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from anaphora.errors import ConfigError
from anaphora.server.tenants import Tenants

# h11 bounds the headers of a request to this size; uvicorn's default parser has no bound at all.
_MAX_HEADER_BYTES = 64 * 2**10
_HEAD_SECONDS = 15.0
_READ_SECONDS = 60.0  # for the 64 KiB that may wait for a client
_BACKLOG = 2048
_GRACEFUL_SECONDS = 30  # running requests get this long after SIGTERM


@dataclasses.dataclass(frozen=True)
class Tls:
    """Files of the server's certificate and key. Raises ``ConfigError`` if they do not fit."""

    certfile: Path
    keyfile: Path

    def __post_init__(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certfile, self.keyfile, password=_refuse_password
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--ssl-certfile {self.certfile} with --ssl-keyfile {self.keyfile} cannot be used "
                f"({error}); give a certificate and its key in PEM, the key without a password"
            ) from None


def _refuse_password() -> str:
    raise ValueError("the key needs a password")  # else OpenSSL asks on the terminal


class _TimedProtocol(H11Protocol):
    """Closes a connection that does not complete a request's head in time, or does not read.

    Uvicorn bounds the pause between requests, but not how slowly a head may trickle in, nor how
    slowly an answer may be read.
    """

    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        """The next one is."""
        super().on_response_complete()
        self._await_head()

    def pause_writing(self) -> None:
        """The client does not read; it gets a while."""
        super().pause_writing()
        self._reading = self.loop.call_later(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        super().connection_lost(exc)
        if self._reading is not None:
            self._reading.cancel()

    def _await_head(self) -> None:
        self.loop.call_later(_HEAD_SECONDS, self._close_unless_after, self.cycle)

    def _close_unless_after(self, previous: object) -> None:
        if self.cycle is previous and not self.transport.is_closing():
            self.transport.close()


def bind(host: str, port: int, *, tenants: Tenants) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: any free one) that does not listen yet.

    Raises ``ConfigError`` when the address cannot be had, or when it can be reached from other
    machines while ``tenants`` is open.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} with --port {port} is not an address ({error}); use for example "
            "127.0.0.1"
        ) from error
    family, kind, protocol, _, address = found[0]
    if tenants.is_open and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--host {host} lets other machines in, but there is no key; make one with "
            "'anaphora tenants add NAME', add --api-key, or use --host 127.0.0.1"
        )
    # asyncio sends small writes at once (TCP_NODELAY) only on sockets that name their protocol
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--port {port} on {host} cannot be used ({error.strerror}); stop what listens there "
            "or choose another --port"
        ) from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket, tls: Tls | None = None) -> str:
    """The server's base URL."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Goes on listening after a first SIGTERM or SIGINT, so that whoever asks is told to go
    elsewhere; whoever calls sets ``should_exit`` when nothing runs any more. A second one ends it.
    """

    is_leaving = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for each signal."""
        if self.is_leaving:
            super().handle_exit(sig, frame)
        self.is_leaving = True


def shorten_pauses() -> None:
    """For a process whose event loop serves clients; once all that lives long is there.

    The collector looks at that no more (10 ms each time), and a thread that computes gives the
    interpreter up after a millisecond instead of five.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.001)


def build_server(app: FastAPI, tls: Tls | None = None) -> DrainingServer:
    """Uvicorn for ``app``; ``await server.serve(sockets=[sock])`` runs it until it should exit."""
    config = uvicorn.Config(
        app,
        http=_TimedProtocol,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        access_log=False,  # the gate writes one without query strings
        log_config=None,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
    )
    return DrainingServer(config)
