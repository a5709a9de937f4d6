"""Batches and their lines in the database. What is recorded there is done; the rest is done again.

A server claims a batch for a while and renews the claim as long as it works on it; when a server
is gone, another one, or the same after its restart, goes on. A result is recorded once.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, delete, func, insert, select, tuple_, update

from anaphora.errors import Conflict, NotFound
from anaphora.server.file_store import OPEN_STATES, write_file
from anaphora.server.store import Store
from anaphora.server.tables import BATCH_LINES, BATCHES

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
_LINES_AT_ONCE = 500
_COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Columns as in ``tables.BATCHES``."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    output_expires_after: float | None
    status: Status
    model: str | None
    metadata: str | None
    errors: str | None
    total: int
    created_at: float
    expires_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    completed_at: float | None
    failed_at: float | None
    expired_at: float | None
    cancelling_at: float | None
    cancelled_at: float | None


@dataclasses.dataclass(frozen=True)
class Line:
    """One request of a batch: where it is in the input file."""

    line: int
    custom_id: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a line; ``result`` is the line of the output or error file."""

    line: int
    result: str
    is_error: bool
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Progress:
    """Of a batch's lines."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


_COLUMNS = [BATCHES.c[field.name] for field in dataclasses.fields(Batch)]


class BatchStore:
    """All batches; each tenant sees its own. All methods block."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def create(self, **values: Any) -> Batch:
        """A new batch, to be validated."""
        now = self._clock()
        window = values.pop("window_seconds")
        row = {
            "id": f"batch_{secrets.token_hex(12)}",
            "status": "validating",
            "total": 0,
            "created_at": now,
            "expires_at": now + window,
            "claimed_until": 0.0,
            **values,
        }
        with self._store.write() as connection:
            connection.execute(insert(BATCHES), row)
        return self.get(values["tenant"], row["id"])

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises ``NotFound``, also for another tenant's."""
        query = select(*_COLUMNS).where(BATCHES.c.id == batch_id, BATCHES.c.tenant == tenant)
        with self._store.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise NotFound(f"there is no batch {batch_id[:64]!r}", param="batch_id")
        return Batch(*row)

    def page(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """The tenant's batches, newest first, and one more if there is one."""
        query = select(*_COLUMNS).where(BATCHES.c.tenant == tenant)
        if after is not None:
            last = self.get(tenant, after)
            place = tuple_(BATCHES.c.created_at, BATCHES.c.id)
            query = query.where(place < tuple_(last.created_at, last.id))
        query = query.order_by(BATCHES.c.created_at.desc(), BATCHES.c.id.desc())
        with self._store.read() as connection:
            return [Batch(*row) for row in connection.execute(query.limit(limit + 1))]

    def num_open(self, tenant: str) -> int:
        """Batches of the tenant that have not ended."""
        query = select(func.count()).where(
            BATCHES.c.tenant == tenant, BATCHES.c.status.in_(OPEN_STATES)
        )
        with self._store.read() as connection:
            return int(connection.execute(query).scalar_one())

    def progress(self, batch_ids: Sequence[str]) -> dict[str, Progress]:
        """Counts of the lines that are done."""
        is_error = BATCH_LINES.c.is_error
        sums = [func.coalesce(func.sum(BATCH_LINES.c[name]), 0) for name in _COUNTS]
        query = (
            select(BATCH_LINES.c.batch_id, is_error, func.count(), *sums)
            .where(BATCH_LINES.c.batch_id.in_(batch_ids), BATCH_LINES.c.result.is_not(None))
            .group_by(BATCH_LINES.c.batch_id, is_error)
        )
        found = {batch_id: Progress() for batch_id in batch_ids}
        with self._store.read() as connection:
            for batch_id, failed, count, *tokens in connection.execute(query):
                before = dataclasses.astuple(found[batch_id])
                added = (0 if failed else count, count if failed else 0, *map(int, tokens))
                found[batch_id] = Progress(*map(sum, zip(before, added, strict=True)))
        return found

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """No further line begins. Raises ``NotFound``, and ``Conflict`` for one that has ended."""
        batch = self.get(tenant, batch_id)
        with self._store.write() as connection:
            change = update(BATCHES).where(
                BATCHES.c.id == batch_id, BATCHES.c.status.in_(("validating", "in_progress"))
            )
            values = {"status": "cancelling", "cancelling_at": self._clock()}
            is_changed = connection.execute(change.values(values)).rowcount == 1
        if not is_changed and batch.status not in ("cancelling", "cancelled"):
            raise Conflict(f"the batch is {batch.status} already and cannot be cancelled")
        return self.get(tenant, batch_id)

    def claim(self, server: str, seconds: float) -> list[Batch]:
        """Open batches that nobody works on, from now on ``server``'s for ``seconds``."""
        now = self._clock()
        is_free = (BATCHES.c.claimed_until <= now) & BATCHES.c.status.in_(OPEN_STATES)
        with self._store.read() as connection:
            if connection.execute(select(BATCHES.c.id).where(is_free).limit(1)).first() is None:
                return []  # the usual case takes no lock
        with self._store.write() as connection:
            query = select(*_COLUMNS).where(is_free).order_by(BATCHES.c.created_at)
            found = [Batch(*row) for row in connection.execute(query)]
            mine = update(BATCHES).where(BATCHES.c.id.in_([batch.id for batch in found]))
            connection.execute(mine.values(claimed_by=server, claimed_until=now + seconds))
        return found

    def renew(self, server: str, batch_ids: Sequence[str], seconds: float) -> dict[str, Status]:
        """Keeps ``server``'s claims; the states of these batches that are still its own and open.

        With 0 seconds it gives them up.
        """
        mine = BATCHES.c.id.in_(batch_ids) & (BATCHES.c.claimed_by == server)
        mine &= BATCHES.c.status.in_(OPEN_STATES)
        with self._store.write() as connection:
            change = update(BATCHES).where(mine)
            connection.execute(change.values(claimed_until=self._clock() + seconds))
            rows = connection.execute(select(BATCHES.c.id, BATCHES.c.status).where(mine))
            return {row.id: row.status for row in rows}

    def begin(self, batch_id: str, model: str, lines: Iterable[dict[str, Any]], total: int) -> None:
        """The input is valid: these are its lines."""
        with self._store.write() as connection:
            connection.execute(delete(BATCH_LINES).where(BATCH_LINES.c.batch_id == batch_id))
            connection.execute(
                insert(BATCH_LINES), [{"batch_id": batch_id, **line} for line in lines]
            )
            change = update(BATCHES).where(BATCHES.c.id == batch_id)
            connection.execute(change.values(model=model, total=total))
            is_wanted = change.where(BATCHES.c.status == "validating")
            started = {"status": "in_progress", "in_progress_at": self._clock()}
            connection.execute(is_wanted.values(started))

    def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """The input is not valid; nothing of it is done."""
        with self._store.write() as connection:
            change = update(BATCHES).where(BATCHES.c.id == batch_id)
            values = {"status": "failed", "failed_at": self._clock(), "errors": json.dumps(errors)}
            connection.execute(change.values(values))

    def pending(self, batch_id: str, after: int) -> list[tuple[int, Line]]:
        """Some of the lines without a result, with their positions, which are above ``after``."""
        columns = [BATCH_LINES.c[field.name] for field in dataclasses.fields(Line)]
        query = (
            select(BATCH_LINES.c.position, *columns)
            .where(
                BATCH_LINES.c.batch_id == batch_id,
                BATCH_LINES.c.result.is_(None),
                BATCH_LINES.c.position > after,
            )
            .order_by(BATCH_LINES.c.position)
            .limit(_LINES_AT_ONCE)
        )
        with self._store.read() as connection:
            return [(row[0], Line(*row[1:])) for row in connection.execute(query)]

    def record(self, batch_id: str, outcomes: Sequence[Outcome]) -> None:
        """Keeps results; a line that has one keeps that one."""
        with self._store.write() as connection:
            for outcome in outcomes:
                values = dataclasses.asdict(outcome)
                line = values.pop("line")
                _set_result(connection, batch_id, line, values)

    def finish(
        self, batch: Batch, status: Status, rest: Callable[[Line], Outcome] | None = None
    ) -> None:
        """Writes the files and ends the batch, all at once; ``rest`` is for lines without a result.

        A batch that has ended stays as it is.
        """
        now = self._clock()
        with self._store.write() as connection:
            current = select(BATCHES.c.status).where(BATCHES.c.id == batch.id)
            if connection.execute(current).scalar() not in OPEN_STATES:
                return
            if rest is not None:
                columns = [BATCH_LINES.c[field.name] for field in dataclasses.fields(Line)]
                query = select(*columns).where(
                    BATCH_LINES.c.batch_id == batch.id, BATCH_LINES.c.result.is_(None)
                )
                for row in connection.execute(query).all():
                    values = dataclasses.asdict(rest(Line(*row)))
                    _set_result(connection, batch.id, values.pop("line"), values)
            files = [
                write_file(
                    connection,
                    batch.tenant,
                    f"{batch.id}_{kind}.jsonl",
                    _results(connection, batch.id, is_error=kind == "error"),
                    now=now,
                    seconds=batch.output_expires_after,
                )
                for kind in ("output", "error")
            ]
            change = update(BATCHES).where(BATCHES.c.id == batch.id)
            ended = {f"{status}_at": now, "finalizing_at": batch.finalizing_at or now}
            values = {"status": status, "output_file_id": files[0], "error_file_id": files[1]}
            connection.execute(change.values({**values, **ended}))


def delete_of_tenant(connection: Connection, tenant: str) -> None:
    """All batches of a tenant."""
    mine = select(BATCHES.c.id).where(BATCHES.c.tenant == tenant)
    connection.execute(delete(BATCH_LINES).where(BATCH_LINES.c.batch_id.in_(mine)))
    connection.execute(delete(BATCHES).where(BATCHES.c.tenant == tenant))


def _set_result(connection: Connection, batch_id: str, line: int, values: dict[str, Any]) -> None:
    change = update(BATCH_LINES).where(
        BATCH_LINES.c.batch_id == batch_id,
        BATCH_LINES.c.line == line,
        BATCH_LINES.c.result.is_(None),
    )
    connection.execute(change.values(values))


def _results(connection: Connection, batch_id: str, *, is_error: bool) -> Iterator[bytes]:
    """The lines of an output or error file in the order of the input."""
    last = 0
    while True:
        query = (
            select(BATCH_LINES.c.line, BATCH_LINES.c.result)
            .where(
                BATCH_LINES.c.batch_id == batch_id,
                BATCH_LINES.c.is_error == is_error,
                BATCH_LINES.c.line > last,
            )
            .order_by(BATCH_LINES.c.line)
            .limit(_LINES_AT_ONCE)
        )
        rows = connection.execute(query).all()
        if not rows:
            return
        last = rows[-1].line
        for row in rows:
            yield row.result.encode() + b"\n"
