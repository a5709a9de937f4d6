"""The database: tenants, keys, limits, usage. SQLite in WAL mode, or PostgreSQL by its URL.

SQLite's file is its owner's alone. All methods block; the event loop calls them in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    create_engine,
    event,
    insert,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import StaticPool

from anaphora.errors import ConfigError, StoreUnavailable
from anaphora.server.migrations import DIALECTS, MIGRATIONS
from anaphora.server.tables import META

MEMORY = "memory"  # a database that ends with the process
VERSION, REVISION = "version", "revision"
_NUM_THREADS = 8
_BUSY_SECONDS = 10.0  # how long to wait for another process that writes
T = TypeVar("T")

_WANTS_WRITE = "anaphora_writes"
_MIGRATION_LOCK = 0x616E6170686F7261  # any number, the same in all servers


class Store:
    """One database. Safe to use from several threads; ``close`` it at the end."""

    def __init__(self, where: str) -> None:
        """``where`` is a path of SQLite, ``memory``, or a URL that SQLAlchemy knows.

        Raises ``ConfigError`` if it cannot be opened, or was made by a newer version.
        """
        self.where = _public(where)
        self._lock = threading.RLock() if where == MEMORY else contextlib.nullcontext()
        self._engine = _open(where)
        self._is_closed = False
        is_file = self._engine.dialect.name == "sqlite" and where != MEMORY and "://" not in where
        self._place = where if is_file else None
        self._identity = _identity(where) if is_file else None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "database")
        try:
            with self.write() as connection:
                _migrate(connection, self.where)
        except StoreUnavailable as error:
            self._engine.dispose()
            raise ConfigError(
                f"--database {self.where} cannot be used: {error}; give another path, a "
                "postgresql:// URL, or 'memory'"
            ) from None

    @property
    def is_volatile(self) -> bool:
        """Whether it ends with the process."""
        return self.where == MEMORY

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state. Raises ``StoreUnavailable``."""
        with self._lock, _translated(), self._open().begin() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction: all of it or nothing. Raises ``StoreUnavailable``."""
        with self._lock, _translated(), self._open().connect() as connection:
            connection = connection.execution_options(**{_WANTS_WRITE: True})
            with connection.begin():
                yield connection

    def _open(self) -> Engine:
        if self._is_closed:  # it would begin anew, empty
            raise StoreUnavailable("the database is closed")
        if self._place is not None and _identity(self._place) != self._identity:
            raise StoreUnavailable(
                "its file was removed or replaced while the server ran; put it back, or restart"
            )
        return self._engine

    def revision(self) -> int:
        """Grows whenever tenants, keys or limits change, by whichever process."""
        with self.read() as connection:
            query = select(META.c.value).where(META.c.name == REVISION)
            return int(connection.execute(query).scalar_one())

    async def run(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Result of ``work``, which blocks, in a thread of the database's own: one that cannot be
        reached for a while holds nobody else's threads."""
        call = functools.partial(work, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def iterate(self, items: Iterator[T]) -> AsyncIterator[T]:
        """``items``, each fetched in such a thread."""
        while (found := await self.run(_next, items)) is not None:
            yield found[0]

    def close(self) -> None:
        """Closes all connections; what is in memory is gone."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = self.is_volatile
            self._engine.dispose()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _next(items: Iterator[T]) -> tuple[T] | None:
    for item in items:
        return (item,)
    return None


def bump_revision(connection: Connection) -> None:
    """To be called by every change that running servers must hear of."""
    change = update(META).where(META.c.name == REVISION).values(value=META.c.value + 1)
    connection.execute(change)


def _open(where: str) -> Engine:
    if where == MEMORY:
        engine = create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
    elif "://" in where:
        engine = _open_url(where)
    else:
        _make_private(Path(where))
        engine = create_engine(f"sqlite:///{where}", connect_args={"timeout": _BUSY_SECONDS})
    if engine.dialect.name not in DIALECTS:
        raise ConfigError(
            f"--database {engine.dialect.name}:// is not supported; give a path of SQLite or a "
            "postgresql:// URL"
        )
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _open_url(where: str) -> Engine:
    try:
        url = make_url(where)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return create_engine(url, pool_pre_ping=True)
    except ArgumentError as error:
        raise ConfigError(f"--database {_public(where)}: {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--database {_public(where)} needs the module {error.name}; install it: "
            "pip install 'anaphora[postgresql]'"
        ) from None


def _make_private(path: Path) -> None:
    """An empty file for its owner alone; SQLite gives its companions the same mode."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"--database {path} cannot be opened ({error.strerror}); give another path, or 'memory'"
        ) from None


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # else the driver begins transactions when it likes
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")  # a crash of the process loses nothing
    connection.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that begins with reading cannot always go on to write.
    is_write = connection.get_execution_options().get(_WANTS_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        reason = str(error.orig).splitlines()[0] if error.orig else type(error).__name__
        raise StoreUnavailable(f"the database failed ({reason})") from error


def _migrate(connection: Connection, where: str) -> None:
    """Takes the steps that are missing; two servers that start at once do it in turn."""
    dialect = connection.dialect.name
    if dialect == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _MIGRATION_LOCK})
    words = DIALECTS[dialect]
    create = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL)"
    connection.execute(text(create))
    names = {row.name: row.value for row in connection.execute(select(META))}
    if not names:
        rows: list[dict[str, Any]] = [{"name": VERSION, "value": 0}, {"name": REVISION, "value": 1}]
        connection.execute(insert(META), rows)
    version = names.get(VERSION, 0)
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"--database {where} was made by a newer Anaphora (version {version} of its tables, "
            f"this one knows {len(MIGRATIONS)}); update Anaphora, or give another database"
        )
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(text(statement.format(**words)))
    connection.execute(update(META).where(META.c.name == VERSION).values(value=len(MIGRATIONS)))


def _public(where: str) -> str:
    """``where`` without a password."""
    if "://" not in where:
        return where
    try:
        return make_url(where).render_as_string(hide_password=True)
    except ArgumentError:
        return where.partition("://")[0] + "://…"
