"""The outermost layer: no request passes without a key, a name, a log line and a safe error."""

from __future__ import annotations

import logging
import time
import urllib.parse
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anaphora.errors import Unauthorized
from anaphora.server.envelope import dialect_of, error_response, log_failure
from anaphora.server.metrics import Metrics
from anaphora.server.tenants import Tenants
from anaphora.server.unknown import IGNORED_HEADER

logger = logging.getLogger("anaphora.access")

# The exact path as the router will read it. Everything else needs a key, so that no spelling of a
# path can be a way around it.
_OPEN_PATHS = frozenset({"/health"})
_PROBES = ("/health", "/metrics")
_CLIENT_LEFT = 499  # nginx's number for it; never sent
_MAX_LOGGED_PATH_CHARS = 128


class Gate:
    """ASGI middleware that authenticates before anything looks at the request.

    Leaves ``state.tenant`` and ``state.request_id`` for the routes.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, metrics: Metrics) -> None:
        self._app = app
        self._tenants = tenants
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)
        else:  # we have no websockets
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request_id = uuid.uuid4().hex
        status = _CLIENT_LEFT

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    *_more_headers(scope, request_id),
                ]
            await send(message)

        try:
            state = scope.setdefault("state", {})
            state["request_id"] = request_id
            state["tenant"] = self._tenant(scope)
            await self._app(scope, receive, send_named)
        except Unauthorized as error:
            await error_response(error, scope["path"], request_id)(scope, receive, send_named)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            log_failure(request_id, error)
            if status == _CLIENT_LEFT:
                await error_response(error, scope["path"], request_id)(scope, receive, send_named)
        finally:
            self._record(scope, request_id, status, time.perf_counter() - started)

    def _tenant(self, scope: Scope) -> str:
        if scope["path"] in _OPEN_PATHS:
            return ""
        found = {value for name, value in scope["headers"] if name == b"authorization"}
        found |= {b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"}
        # two credentials would leave open which one counts
        credential = found.pop().decode("latin-1") if len(found) == 1 else None
        return self._tenants.authenticate(credential)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.count_response(route, status)
        # without the query string, which may hold secrets, and quoted, so that it stays one line
        path = urllib.parse.quote(scope["path"])[:_MAX_LOGGED_PATH_CHARS]
        # probes come every few seconds and would drown the rest
        level = logging.DEBUG if route in _PROBES and status == 200 else logging.INFO
        method = scope["method"][:16]
        logger.log(level, "%s %s %d %.3fs %s", method, path, status, seconds, request_id)


def _more_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if names := scope["state"].get("ignored_fields"):
        headers.append((IGNORED_HEADER.encode(), ", ".join(names).encode("ascii")))
    if dialect_of(scope["path"]) == "anthropic":
        headers.append((b"request-id", request_id.encode()))
    return headers
