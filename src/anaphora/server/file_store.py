"""Uploaded files and batches' results, as chunks in the database."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import Connection, delete, func, insert, select, tuple_, update

from anaphora.errors import Conflict, InvalidRequest, NotFound
from anaphora.server.store import Store
from anaphora.server.tables import BATCHES, FILE_CHUNKS, FILES

CHUNK_BYTES = 2**20
MAX_FILE_BYTES = 200 * 2**20  # OpenAI's bound for a batch's input
MAX_TENANT_BYTES = 4 * 2**30
MAX_TENANT_FILES = 10_000
_UPLOAD_SECONDS = 3600.0  # what is not complete by then never will be
OPEN_STATES = ("validating", "in_progress", "finalizing", "cancelling")


@dataclasses.dataclass(frozen=True)
class File:
    """What is known of a file beside its content. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None


_COLUMNS = [FILES.c[field.name] for field in dataclasses.fields(File)]


class FileStore:
    """Files of all tenants; each sees its own. All methods block."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._clock = clock

    def begin(self, tenant: str) -> str:
        """A file's id, whose content is to come, and then its name and purpose.

        Raises ``InvalidRequest`` if the tenant has as many as it may.
        """
        now = self._clock()
        with self.store.write() as connection:
            mine = FILES.c.tenant == tenant
            query = select(func.count(), func.coalesce(func.sum(FILES.c.bytes), 0)).where(mine)
            num_files, num_bytes = connection.execute(query).one()
            if num_files >= MAX_TENANT_FILES or num_bytes >= MAX_TENANT_BYTES:
                raise InvalidRequest(
                    f"you have {num_files} files with {num_bytes} bytes, as much as is kept; "
                    "delete some",
                    code="file_quota_exceeded",
                )
            return _begin(connection, tenant, "", "", now, None)

    def append(self, file_id: str, number: int, data: bytes) -> None:
        """Adds the chunk ``number``."""
        with self.store.write() as connection:
            row = {"file_id": file_id, "number": number, "data": data}
            connection.execute(insert(FILE_CHUNKS), row)

    def complete(
        self, file_id: str, num_bytes: int, *, purpose: str, filename: str, seconds: float | None
    ) -> File:
        """All of it is there."""
        with self.store.write() as connection:
            created = select(FILES.c.created_at).where(FILES.c.id == file_id)
            created_at = connection.execute(created).scalar_one()
            values = {
                "bytes": num_bytes,
                "is_complete": True,
                "purpose": purpose,
                "filename": filename,
                "expires_at": None if seconds is None else created_at + seconds,
            }
            connection.execute(update(FILES).where(FILES.c.id == file_id).values(values))
            query = select(*_COLUMNS).where(FILES.c.id == file_id)
            return File(*connection.execute(query).one())

    def get(self, tenant: str, file_id: str) -> File:
        """Raises ``NotFound``, also for another tenant's."""
        query = select(*_COLUMNS).where(
            FILES.c.id == file_id, FILES.c.tenant == tenant, FILES.c.is_complete
        )
        with self.store.read() as connection:
            row = connection.execute(query).first()
        if row is None or (row.expires_at is not None and row.expires_at <= self._clock()):
            raise NotFound(f"there is no file {file_id[:64]!r}", param="file_id")
        return File(*row)

    def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> list[File]:
        """A page of the tenant's files and one more, if there is one. Raises ``NotFound``."""
        query = select(*_COLUMNS).where(FILES.c.tenant == tenant, FILES.c.is_complete)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        order = [FILES.c.created_at, FILES.c.id]
        if after is not None:
            last = self.get(tenant, after)
            place, known = tuple_(*order), tuple_(last.created_at, last.id)
            query = query.where(place > known if ascending else place < known)
        query = query.order_by(*[c if ascending else c.desc() for c in order])
        with self.store.read() as connection:
            return [File(*row) for row in connection.execute(query.limit(limit + 1))]

    def read(self, file_id: str) -> Iterator[bytes]:
        """The content, chunk by chunk, each in a transaction of its own."""
        number = 0
        while (chunk := self._chunk(file_id, number)) is not None:
            yield chunk
            number += 1

    def read_range(self, file_id: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``."""
        first, last = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
        query = (
            select(FILE_CHUNKS.c.data)
            .where(FILE_CHUNKS.c.file_id == file_id, FILE_CHUNKS.c.number.between(first, last))
            .order_by(FILE_CHUNKS.c.number)
        )
        with self.store.read() as connection:
            data = b"".join(connection.execute(query).scalars())
        offset = start - first * CHUNK_BYTES
        return data[offset : offset + length]

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises ``NotFound``, and ``Conflict`` while a batch needs it."""
        self.get(tenant, file_id)
        with self.store.write() as connection:
            needed = select(BATCHES.c.id).where(
                BATCHES.c.input_file_id == file_id, BATCHES.c.status.in_(OPEN_STATES)
            )
            if (batch_id := connection.execute(needed).scalar()) is not None:
                raise Conflict(f"{batch_id} still needs this file; cancel it, or wait for its end")
            _delete(connection, [file_id])

    def sweep(self) -> None:
        """Deletes what has expired or was never completed."""
        now = self._clock()
        needed = select(BATCHES.c.input_file_id).where(BATCHES.c.status.in_(OPEN_STATES))
        old = (FILES.c.expires_at <= now) | (
            ~FILES.c.is_complete & (FILES.c.created_at < now - _UPLOAD_SECONDS)
        )
        with self.store.read() as connection:
            query = select(FILES.c.id).where(old, FILES.c.id.not_in(needed))
            ids = list(connection.execute(query).scalars())
        if ids:
            with self.store.write() as connection:
                _delete(connection, ids)

    def discard(self, file_id: str) -> None:
        """An upload was broken off."""
        with self.store.write() as connection:
            _delete(connection, [file_id])

    def _chunk(self, file_id: str, number: int) -> bytes | None:
        query = select(FILE_CHUNKS.c.data).where(
            FILE_CHUNKS.c.file_id == file_id, FILE_CHUNKS.c.number == number
        )
        with self.store.read() as connection:
            return connection.execute(query).scalar()


def write_file(
    connection: Connection,
    tenant: str,
    filename: str,
    lines: Iterable[bytes],
    *,
    now: float,
    seconds: float | None,
) -> str | None:
    """A whole file of a batch's results within a transaction; None if there are no ``lines``."""
    file_id: str | None = None
    buffer, number, num_bytes = bytearray(), 0, 0
    for line in lines:
        if file_id is None:
            file_id = _begin(connection, tenant, filename, "batch_output", now, seconds)
        buffer += line
        while len(buffer) >= CHUNK_BYTES:
            _append(connection, file_id, number, bytes(buffer[:CHUNK_BYTES]))
            del buffer[:CHUNK_BYTES]
            number, num_bytes = number + 1, num_bytes + CHUNK_BYTES
    if file_id is None:
        return None
    _append(connection, file_id, number, bytes(buffer))
    values = {"bytes": num_bytes + len(buffer), "is_complete": True}
    connection.execute(update(FILES).where(FILES.c.id == file_id).values(values))
    return file_id


def delete_of_tenant(connection: Connection, tenant: str) -> None:
    """All files of a tenant."""
    ids = connection.execute(select(FILES.c.id).where(FILES.c.tenant == tenant)).scalars()
    _delete(connection, list(ids))


def _begin(
    connection: Connection,
    tenant: str,
    filename: str,
    purpose: str,
    now: float,
    seconds: float | None,
) -> str:
    file_id = f"file-{secrets.token_hex(12)}"
    row = {
        "id": file_id,
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": 0,
        "created_at": now,
        "expires_at": None if seconds is None else now + seconds,
        "is_complete": False,
    }
    connection.execute(insert(FILES), row)
    return file_id


def _append(connection: Connection, file_id: str, number: int, data: bytes) -> None:
    row = {"file_id": file_id, "number": number, "data": data}
    connection.execute(insert(FILE_CHUNKS), row)


def _delete(connection: Connection, file_ids: list[str]) -> None:
    connection.execute(delete(FILE_CHUNKS).where(FILE_CHUNKS.c.file_id.in_(file_ids)))
    connection.execute(delete(FILES).where(FILES.c.id.in_(file_ids)))
