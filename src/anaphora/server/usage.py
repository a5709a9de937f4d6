"""One row for each request that was let in, written once and never changed."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Iterable

from sqlalchemy import insert

from anaphora.errors import StoreUnavailable
from anaphora.server.store import Store
from anaphora.server.tables import USAGE

logger = logging.getLogger("anaphora.usage")

_RETRY_SECONDS = 1.0
_MAX_ROWS_AT_ONCE = 1000
_GATHER_SECONDS = 0.1
MAX_PENDING_ROWS = 100_000  # while the database cannot be written; some 50 MB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UsageRow:
    """What one request used. Columns as in ``tables.USAGE``, which says what they mean."""

    at: float
    request_id: str
    tenant: str
    key_id: str
    endpoint: str
    workload: str
    adapter: str
    input_tokens: int
    cached_tokens: int
    cached_host_tokens: int
    cached_disk_tokens: int
    output_tokens: int
    reasoning_tokens: int
    charged_tokens: float
    ttft: float | None
    duration: float
    finish_reason: str
    status: int


FIELDS = dataclasses.fields(UsageRow)
COLUMNS = tuple(field.name for field in FIELDS)
HEADER = tuple("class" if name == "workload" else name for name in COLUMNS)  # as people say


class UsageLog:
    """Takes rows from the event loop at once; a thread writes them, together what has gathered.

    While the database cannot be written (a full disk), rows wait in memory and are tried again;
    beyond ``MAX_PENDING_ROWS`` the newest are lost, and counted.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: queue.SimpleQueue[UsageRow | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._is_closing = threading.Event()
        self.num_written = 0
        self.num_lost = 0
        self._num_added = 0
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Rows that are not in the database yet."""
        return self._num_added - self.num_written - self.num_lost

    def add(self, row: UsageRow) -> None:
        """Never waits."""
        self._num_added += 1
        if self.num_pending > MAX_PENDING_ROWS:
            self.num_lost += 1
        else:
            self._rows.put(row)

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until all rows added so far are written; whether they are."""
        done = threading.Event()
        self._rows.put(done)
        return done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Writes what is left, for at most ``timeout`` seconds."""
        self._rows.put(None)
        self._thread.join(timeout)
        self._is_closing.set()
        if self.num_pending:
            logger.error("%d usage rows could not be written and are lost", self.num_pending)
        self._thread.join(2 * _RETRY_SECONDS)

    def _run(self) -> None:
        while True:
            items = self._gather()
            rows = [item for item in items if isinstance(item, UsageRow)]
            if rows and not self._write(rows):
                return
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return

    def _gather(self) -> list[UsageRow | threading.Event | None]:
        """What comes in a while, so that many rows are one commit; at once if somebody waits."""
        items = [self._rows.get()]
        end = time.monotonic() + _GATHER_SECONDS
        while len(items) < _MAX_ROWS_AT_ONCE:
            is_awaited = not isinstance(items[-1], UsageRow)
            try:
                wait = 0.0 if is_awaited else max(0.0, end - time.monotonic())
                items.append(self._rows.get(timeout=wait) if wait else self._rows.get_nowait())
            except queue.Empty:
                break
        return items

    def _write(self, rows: Iterable[UsageRow]) -> bool:
        """Writes ``rows``, however long it takes; False if that is given up."""
        values = [{name: getattr(row, name) for name in COLUMNS} for row in rows]
        is_failing = False
        while not self._is_closing.is_set():
            try:
                with self._store.write() as connection:
                    connection.execute(insert(USAGE), values)
            except StoreUnavailable as error:
                if not is_failing:
                    logger.error("usage cannot be written and waits: %s", error)
                is_failing = True
                self._is_closing.wait(_RETRY_SECONDS)
            else:
                self.num_written += len(values)
                if is_failing:
                    logger.info("usage is being written again")
                return True
        return False


def now() -> float:
    """When a request ended, in seconds since 1970."""
    return time.time()
