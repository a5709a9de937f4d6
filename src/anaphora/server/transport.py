"""Between sockets and handlers: bodies in, events out, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from anaphora.errors import EngineError, RequestError
from anaphora.server.envelope import (
    BodyTooLargeError,
    BodyTooSlowError,
    UnsupportedMediaTypeError,
    error_body,
    log_failure,
)
from anaphora.server.schemas import B, parse

MAX_BODY_BYTES = 4 * 2**20  # half a million tokens of text; parsing it takes tens of milliseconds
BODY_TIMEOUT = 60.0  # seconds
_MAX_INLINE_BYTES = 64 * 2**10
# A refused body is still read up to this many limits: closing on a client that is sending makes its
# system drop our answer.
_NUM_DRAINED_LIMITS = 4

T = TypeVar("T")


class BodyReader:
    """Reads and checks JSON bodies within limits of size and time."""

    def __init__(self, *, max_bytes: int = MAX_BODY_BYTES, timeout: float = BODY_TIMEOUT) -> None:
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def read(self, request: Request, schema: type[B]) -> B:
        """The request's body as ``schema``. Raises a ``RequestError`` that says what is wrong."""
        # Of all types this is one that a browser asks about before a foreign page may send it here.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise UnsupportedMediaTypeError(
                "the body is not declared as JSON; send the header 'Content-Type: application/json'"
            )
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMediaTypeError("the body is compressed; send it without an encoding")
        try:
            async with asyncio.timeout(self._timeout):
                content = await self._read_bytes(request)
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body did not arrive within {self._timeout:g} seconds; send it faster"
            ) from None
        if len(content) <= _MAX_INLINE_BYTES:
            return parse(schema, content)
        return await asyncio.to_thread(parse, schema, content)  # others' streams go on meanwhile

    async def _read_bytes(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes <= self._max_bytes:
                chunks.append(chunk)
            elif num_bytes > self._max_bytes * _NUM_DRAINED_LIMITS:
                break
            else:
                chunks.clear()
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"the body is over the limit of {self._max_bytes} bytes; send less at once"
            )
        return b"".join(chunks)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``; if the client goes away first, cancel it and raise ``ClientDisconnect``.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(content: object, name: str = "") -> bytes:
    """One server-sent event."""
    line = f"event: {name}\n" if name else ""
    return line.encode() + b"data: " + msgspec.json.encode(content) + b"\n\n"


def _error_event(error: Exception) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(Response):
    """Server-sent events, closed by ``end`` or by an error event.

    Takes the first event apart from the others: whoever awaited it can still answer with an error
    status. Closes ``events`` however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        request_id: str,
        headers: Mapping[str, str],
        error_event: Callable[[Exception], bytes] = _error_event,
        end: bytes = b"data: [DONE]\n\n",
    ) -> None:
        self._error_event = error_event
        self._end = end
        self._first = first
        self._events = events
        self._request_id = request_id
        self.status_code = 200
        self.background = None
        # the second header keeps nginx from collecting events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client goes away."""
        del scope
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_disconnected(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await _send_part(send, self._first)
        try:
            async for event in self._events:
                await _send_part(send, event)
        except Exception as error:  # the status is sent, so the stream itself must tell
            if not isinstance(error, RequestError | EngineError):
                log_failure(self._request_id, error)
            last = self._error_event(error)
        else:
            last = self._end
        await _send_part(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
