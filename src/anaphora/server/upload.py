"""A multipart upload as it comes in, straight into the database: memory holds a chunk of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import BodyTooLargeError, BodyTooSlowError, UnsupportedMediaTypeError
from anaphora.server.file_store import CHUNK_BYTES, MAX_FILE_BYTES, FileStore

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 255
_PAUSE_SECONDS = 30.0  # without a byte


class Upload:
    """Fields of a form, and the one file among them."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.chunks: list[bytes] = []  # whole ones that nobody has taken yet
        self.num_bytes = 0
        self.is_whole = False  # whether its end has come
        self._buffer = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value = b"", b""
        self._field: str | None = None  # whose data comes; None: the file's
        self._data = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        """For the parser."""
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end,
        }

    def _end(self) -> None:
        self.is_whole = True

    def rest(self) -> bytes:
        """What does not fill a chunk, at the end."""
        return bytes(self._buffer)

    def _begin_part(self) -> None:
        self._headers.clear()
        self._data.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file":
            if self.filename is not None:
                raise InvalidRequest("the form has two files; send one", param="file")
            given = options.get(b"filename", b"file").decode(errors="replace")
            # a name to show, never a path
            shown = "".join(c for c in given if c.isprintable()).replace("\\", "/")
            self.filename = shown.rpartition("/")[2][:_MAX_NAME_CHARS] or "file"
            self._field = None
        elif len(self.fields) == _MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields; send fewer")
        else:
            self._field = name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._data += data[start:end]
            if len(self._data) > _MAX_FIELD_BYTES:
                raise InvalidRequest(f"a field of the form has over {_MAX_FIELD_BYTES} bytes")
            return
        self.num_bytes += end - start
        if self.num_bytes > MAX_FILE_BYTES:
            raise BodyTooLargeError(
                f"the file is over the limit of {MAX_FILE_BYTES} bytes; split it",
            )
        self._buffer += data[start:end]
        while len(self._buffer) >= CHUNK_BYTES:
            self.chunks.append(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._data.decode(errors="replace")


async def receive(request: Request, files: FileStore) -> tuple[str, Upload]:
    """Stores the form's file as it comes; its id, and the form. On any error nothing is left.

    Raises ``RequestError``.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise UnsupportedMediaTypeError("a file is sent as multipart/form-data; send it so")
    upload = Upload()
    parser = MultipartParser(options[b"boundary"], upload.callbacks())
    file_id = await files.store.run(files.begin, request.state.tenant)
    number = 0
    try:
        async for data in _timed(request):
            parser.write(data)
            for chunk in upload.chunks:
                await files.store.run(files.append, file_id, number, chunk)
                number += 1
            upload.chunks.clear()
        parser.finalize()
        if not upload.is_whole:
            raise InvalidRequest("the form is cut off before its end; send it again", param="file")
        if rest := upload.rest():
            await files.store.run(files.append, file_id, number, rest)
        if upload.filename is None:
            raise InvalidRequest("the form has no file; send one as the field file", param="file")
    except FormParserError as error:
        await files.store.run(files.discard, file_id)
        raise InvalidRequest(f"the form is not valid ({error}); send it again") from None
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.shield(files.store.run(files.discard, file_id))
        raise
    return file_id, upload


async def _timed(request: Request) -> AsyncIterator[bytes]:
    """The body; a client that stops sending is cut off."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(_PAUSE_SECONDS):
                data = await anext(stream, None)
        except TimeoutError:
            raise BodyTooSlowError(
                f"nothing came for {_PAUSE_SECONDS:g} seconds; send the file again"
            ) from None
        if data is None:
            return
        yield data
