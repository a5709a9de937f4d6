"""The outermost layer: no request passes without a key, a name, a log line and a safe error."""

from __future__ import annotations

import logging
import time
import urllib.parse
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anaphora.errors import EngineUnavailable, Unauthorized
from anaphora.server.envelope import dialect_of, error_response, log_failure
from anaphora.server.internal import internal_of
from anaphora.server.metrics import Metrics
from anaphora.server.tenants import Caller, Tenants
from anaphora.server.tracing import Tracing
from anaphora.server.unknown import IGNORED_HEADER

logger = logging.getLogger("anaphora.access")

# The exact path as the router will read it. Everything else needs a key, so that no spelling of a
# path can be a way around it.
_OPEN_PATHS = frozenset({"/health", "/ready"})
_PROBES = ("/health", "/ready", "/metrics")
_CLIENT_LEFT = 499  # nginx's number for it; never sent
_MAX_LOGGED_PATH_CHARS = 128


class Gate:
    """ASGI middleware that authenticates before anything looks at the request.

    Leaves ``state.caller``, ``state.tenant`` and ``state.request_id`` for the routes; they leave
    ``state.meter``, if they generate. While ``drain`` holds, nothing new is let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        metrics: Metrics,
        drain: Drain,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._metrics = metrics
        self._drain = drain
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and self._tracing is not None:
            with self._tracing.span(scope) as span:
                await self._handle(scope, receive, send, span)
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)
        else:  # we have no websockets
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send, span: object = None
    ) -> None:
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

        state = scope.setdefault("state", {})
        try:
            state["request_id"] = request_id
            internal = internal_of(scope)
            caller = self._caller(scope) if internal is None else internal.caller
            state["tenant"], state["caller"] = caller.tenant, caller
            self._drain.check(scope["path"])
            await self._app(scope, receive, send_named)
        except (Unauthorized, EngineUnavailable) as error:
            await error_response(error, scope["path"], request_id)(scope, receive, send_named)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            log_failure(request_id, error)
            if status == _CLIENT_LEFT:
                await error_response(error, scope["path"], request_id)(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - started
            self._record(scope, request_id, status, seconds)
            if self._tracing is not None:
                route = _route_of(scope)
                self._tracing.describe(span, route, status, request_id, state.get("meter"))

    def _caller(self, scope: Scope) -> Caller:
        if scope["path"] in _OPEN_PATHS:
            return Caller("")
        found = {value for name, value in scope["headers"] if name == b"authorization"}
        found |= {b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"}
        # two credentials would leave open which one counts
        if len(found) > 1:
            raise Unauthorized("the request has several keys; send one")
        credential = found.pop().decode("latin-1") if found else None
        return self._tenants.authenticate(credential)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if internal_of(scope) is not None:
            return  # a batch's line: no HTTP, and its usage row says all
        route = _route_of(scope)
        self._metrics.count_response(route, status)
        # without the query string, which may hold secrets, and quoted, so that it stays one line
        path = urllib.parse.quote(scope["path"])[:_MAX_LOGGED_PATH_CHARS]
        # probes come every few seconds and would drown the rest
        level = logging.DEBUG if route in _PROBES and status == 200 else logging.INFO
        method, state = scope["method"][:16], scope["state"]
        fields = {
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            "request_id": request_id,
            "tenant": state.get("tenant", ""),
        }
        if (meter := state.get("meter")) is not None:
            fields |= meter.log_fields()
        logger.log(
            level,
            "%s %s %d %.3fs %s",
            *(method, path, status, seconds, request_id),
            extra={"fields": fields},
        )


class Drain:
    """Whether the server is about to end: then nothing new is begun."""

    def __init__(self) -> None:
        self.is_draining = False

    def check(self, path: str) -> None:
        """Raises ``EngineUnavailable`` for what another server should do."""
        if self.is_draining and path not in _PROBES:
            raise EngineUnavailable("the server is ending; send the request again", retry_after=1)


def _route_of(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "none")


def _more_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if names := scope["state"].get("ignored_fields"):
        headers.append((IGNORED_HEADER.encode(), ", ".join(names).encode("ascii")))
    if dialect_of(scope["path"]) == "anthropic":
        headers.append((b"request-id", request_id.encode()))
    return headers
