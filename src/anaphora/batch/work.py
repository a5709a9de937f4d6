"""The work file of a batch: what is to be done and what is done, in SQLite beside the output.

It makes a run safe to kill at any point: a result counts once it is committed, and what has none is
computed again. Nothing grows with the number of rows but this file.
"""

from __future__ import annotations

import dataclasses
import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from anaphora.batch.plan import HitEstimate, num_shared_blocks
from anaphora.errors import ConfigError, WorkFileInUse

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rows (
    number INTEGER PRIMARY KEY,  -- from 0, in the order of the input
    custom_id TEXT,
    request BLOB,                -- path and body, packed. NULL: the row cannot be used
    kept BLOB,                   -- the row itself, where it is written as soon as it is done
    place BLOB,                  -- in the prefix tree
    same BLOB,                   -- equal for rows with equal answers
    num_tokens INTEGER,
    leader INTEGER               -- the first row with this answer
);
CREATE TABLE queue (position INTEGER PRIMARY KEY, number INTEGER NOT NULL, copies INTEGER NOT NULL);
CREATE TABLE results (
    finished INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER NOT NULL UNIQUE, result TEXT NOT NULL
);
"""
_VERSION = "1"
_COMMIT_SECONDS = 0.25
_PAGE = 256
_UNKEEPABLE = "the answer holds text that is not Unicode, or is nested too deep to be kept"
_LEVEL = 1  # of zlib: the dictionary does most of it


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the input, as it is to be done; ``error`` says why it cannot be."""

    custom_id: str | None = None
    path: str = ""
    body: dict[str, Any] | None = None
    kept: Any = None
    error: str | None = None
    place: bytes = b""
    same: bytes | None = None
    num_tokens: int = 0


class Result(msgspec.Struct, omit_defaults=True):
    """How one row ended."""

    error: str | None = None
    status: int = 0  # of HTTP; 0: it was never sent
    request_id: str = ""
    answer: Any = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    body: Any = None  # OpenAI's response, where it is wanted


@dataclasses.dataclass(frozen=True)
class Counts:
    """How far a batch is."""

    num_rows: int  # 0 until the input is read
    num_unusable: int
    num_requests: int  # rows that are computed: neither copies nor unusable
    num_done: int  # rows, with copies and unusable ones
    num_errors: int


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is expected of prompts in one order, in a cache of one size."""

    num_requests: int
    num_tokens: int  # of all prompts
    num_cached_tokens: int  # of them found
    num_unique_tokens: int  # what a cache without bound computes

    @property
    def num_computed_tokens(self) -> int:
        """What is not found."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        return self.num_cached_tokens / max(self.num_tokens, 1)


class WorkFile:
    """Open for one process at a time. Raises ``WorkFileInUse`` if another one has it, and
    ``ConfigError`` for what is no work file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, timeout=0.5, isolation_level=None)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("BEGIN EXCLUSIVE")
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._set("version", _VERSION)
            self._db.execute("COMMIT")
            version = self.get("version")
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise WorkFileInUse(
                    f"another run is using {path}; wait for its end, or choose another output"
                ) from None
            _raise(error, path)
        if version != _VERSION:
            raise ConfigError(f"{path} was made by another version; delete it, or use --overwrite")
        self._dictionary = self._read_dictionary()
        self._num_open = 0
        self._committed_at = time.monotonic()

    def _read_dictionary(self) -> bytes:
        found = self._db.execute("SELECT value FROM meta WHERE name = 'dictionary'").fetchone()
        return b"" if found is None else bytes.fromhex(found[0])

    def get(self, name: str) -> str | None:
        """What was kept under a name."""
        found = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if found is None else found[0]

    def _set(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    @property
    def is_planned(self) -> bool:
        """Whether all of the input is in it."""
        return self.get("planned") is not None

    def clear(self) -> None:
        """Forgets a batch that was begun."""
        self._db.execute("DELETE FROM meta WHERE name = 'planned'")

    def fill(self, entries: Iterable[Entry], identity: Mapping[str, str]) -> None:
        """Takes the rows of the input in, in order, and what identifies this batch."""
        try:
            self._db.execute("BEGIN")
            for table in ("rows", "queue", "results"):
                self._db.execute(f"DELETE FROM {table}")
            for number, entry in enumerate(entries):
                self._add(number, entry)
                if number % 10_000 == 9_999:
                    self._db.execute("COMMIT")
                    self._db.execute("BEGIN")
            self._refuse_repeated_ids()
            self._db.execute("CREATE INDEX IF NOT EXISTS same_rows ON rows (same, number)")
            self._db.execute(
                "UPDATE rows SET leader = COALESCE((SELECT MIN(number) FROM rows AS other WHERE "
                "other.same = rows.same), number) WHERE request IS NOT NULL"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS leaders ON rows (leader)")
            self._db.execute(
                "INSERT INTO queue (number, copies) SELECT number, (SELECT COUNT(*) FROM rows AS "
                "other WHERE other.leader = rows.number) FROM rows WHERE leader = number "
                "ORDER BY place, number"
            )
            for name, value in identity.items():
                self._set(name, value)
            self._set("planned", "yes")
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            _raise(error, self.path)

    def _add(self, number: int, entry: Entry) -> None:
        packed = None
        if entry.body is not None and entry.error is None:
            plain = msgspec.json.encode([entry.path, entry.body])
            if not self._dictionary:  # most rows say most of what the first one says
                self._dictionary = plain[-(2**15) :]
                self._set("dictionary", self._dictionary.hex())
            packer = zlib.compressobj(_LEVEL, zdict=self._dictionary)
            packed = packer.compress(plain) + packer.flush()
        self._db.execute(
            "INSERT INTO rows (number, custom_id, request, kept, place, same, num_tokens) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(number, entry.custom_id, packed),
                None if entry.kept is None else msgspec.json.encode(entry.kept),
                *(entry.place, entry.same, entry.num_tokens),
            ),
        )
        if packed is None:
            self._insert(number, Result(error=entry.error))

    def _refuse_repeated_ids(self) -> None:
        self._db.execute(
            "CREATE INDEX IF NOT EXISTS ids ON rows (custom_id, number) WHERE custom_id IS NOT NULL"
        )
        repeated = self._db.execute(
            "SELECT number, custom_id, (SELECT MIN(number) FROM rows AS other WHERE "
            "other.custom_id = rows.custom_id) AS first FROM rows "
            "WHERE custom_id IS NOT NULL AND request IS NOT NULL AND first < number"
        ).fetchall()
        for number, custom_id, first in repeated:
            error = f"custom_id {custom_id!r} is that of row {first + 1}; give each row its own"
            self._db.execute(
                "UPDATE rows SET request = NULL, same = NULL WHERE number = ?", (number,)
            )
            self._insert(number, Result(error=error))

    def pending(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Number, path and body of the requests without a result, in the planned order."""
        position = 0
        while True:
            page = self._db.execute(
                "SELECT position, number, request FROM queue JOIN rows USING (number) "
                "WHERE position > ? AND NOT EXISTS "
                "(SELECT 1 FROM results WHERE results.number = queue.number) "
                "ORDER BY position LIMIT ?",
                (position, _PAGE),
            ).fetchall()
            if not page:
                return
            for position, number, packed in page:  # noqa: B007  the last one is kept
                yield number, *self._unpack(packed)

    def _unpack(self, packed: bytes) -> tuple[str, dict[str, Any]]:
        unpacker = zlib.decompressobj(zdict=self._dictionary)
        path, body = msgspec.json.decode(unpacker.decompress(packed))
        return path, body

    def record(self, number: int, result: Result) -> None:
        """Keeps a result; it is committed with those of the next moments."""
        try:
            if not self._num_open:
                self._db.execute("BEGIN")
            self._insert(number, result)
            self._num_open += 1
            if time.monotonic() - self._committed_at > _COMMIT_SECONDS:
                self.commit()
        except sqlite3.DatabaseError as error:
            _raise(error, self.path)

    def _insert(self, number: int, result: Result) -> None:
        try:
            encoded = msgspec.json.encode(result).decode()
        except (UnicodeEncodeError, RecursionError):
            encoded = msgspec.json.encode(Result(error=_UNKEEPABLE)).decode()
        self._db.execute("INSERT INTO results (number, result) VALUES (?, ?)", (number, encoded))

    def commit(self) -> None:
        """What was recorded is safe afterwards."""
        if self._num_open:
            self._num_open = 0
            self._db.execute("COMMIT")
        self._committed_at = time.monotonic()

    def counts(self) -> Counts:
        """Of now."""
        num_rows, num_usable = self._db.execute(
            "SELECT COUNT(*), COUNT(request) FROM rows"
        ).fetchone()
        [num_requests] = self._db.execute("SELECT COUNT(*) FROM queue").fetchone()
        num_done, num_errors = self._db.execute(
            "SELECT COALESCE(SUM(COALESCE(copies, 1)), 0), "
            "COALESCE(SUM((result ->> 'error' IS NOT NULL) * COALESCE(copies, 1)), 0) "
            "FROM results LEFT JOIN queue USING (number)"
        ).fetchone()
        return Counts(num_rows, num_rows - num_usable, num_requests, num_done, num_errors)

    def copies(self, number: int) -> int:
        """Rows that get the answer to this one."""
        sql = "SELECT COUNT(*) FROM rows WHERE leader = ?"
        found: int = self._db.execute(sql, (number,)).fetchone()[0]
        return found

    def results(self) -> Iterator[tuple[str | None, Result]]:
        """Custom id and result of every row, in the order of the input."""
        number = -1
        while True:
            page = self._db.execute(
                "SELECT rows.number, custom_id, result FROM rows JOIN results "
                "ON results.number = COALESCE(leader, rows.number) "
                "WHERE rows.number > ? ORDER BY rows.number LIMIT ?",
                (number, _PAGE),
            ).fetchall()
            if not page:
                return
            for number, custom_id, result in page:  # noqa: B007  the last one is kept
                yield custom_id, msgspec.json.decode(result, type=Result)

    def finished(self, after: int = 0) -> Iterator[tuple[int, str | None, Any, Result]]:
        """The same in the order in which they ended, each with a mark to go on after and the row
        that was kept."""
        while True:
            page = self._db.execute(
                "SELECT finished, rows.custom_id, rows.kept, result FROM results JOIN rows "
                "ON results.number = COALESCE(rows.leader, rows.number) WHERE finished > ? AND "
                "finished <= (SELECT MAX(finished) FROM (SELECT finished FROM results "
                "WHERE finished > ? ORDER BY finished LIMIT ?)) ORDER BY finished, rows.number",
                (after, after, _PAGE),
            ).fetchall()
            if not page:
                return
            for after, custom_id, kept, result in page:
                values = None if kept is None else msgspec.json.decode(kept)
                yield after, custom_id, values, msgspec.json.decode(result, type=Result)

    def errors(self, limit: int) -> list[tuple[str, int]]:
        """The most frequent errors, and how many rows have them."""
        return self._db.execute(
            "SELECT result ->> 'error' AS error, SUM(COALESCE(copies, 1)) AS n FROM results "
            "LEFT JOIN queue USING (number) WHERE error IS NOT NULL GROUP BY error "
            "ORDER BY n DESC, error LIMIT ?",
            (limit,),
        ).fetchall()

    def forecast(
        self, *, is_planned: bool, block_size: int, num_cache_blocks: int | None
    ) -> Forecast:
        """Of all rows that can be used in the order of the input, or of those that are computed in
        the planned order. A cache of None blocks is one without bound.
        """
        sql = "SELECT place, num_tokens FROM rows WHERE request IS NOT NULL ORDER BY number"
        if is_planned:
            sql = "SELECT place, num_tokens FROM queue JOIN rows USING (number) ORDER BY position"
        estimate = HitEstimate(num_cache_blocks)
        num_tokens = 0
        for place, tokens in self._db.execute(sql):
            estimate.add(place)
            num_tokens += tokens
        return Forecast(
            num_requests=estimate.num_prompts,
            num_tokens=num_tokens,
            num_cached_tokens=estimate.num_hits * block_size,
            num_unique_tokens=num_tokens - self._num_shared_blocks(is_planned) * block_size,
        )

    def _num_shared_blocks(self, is_planned: bool) -> int:
        """Blocks that are another request's too, each time but the first."""
        source = "queue JOIN rows USING (number)" if is_planned else "rows"
        last, count = b"", 0
        for (place,) in self._db.execute(
            f"SELECT place FROM {source} WHERE request IS NOT NULL ORDER BY place"
        ):
            count += num_shared_blocks(last, place)
            last = place
        return count

    def sample(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Path and body of some requests from all over the plan."""
        [num_requests] = self._db.execute("SELECT COUNT(*) FROM queue").fetchone()
        step = max(1, num_requests // count)
        rows = self._db.execute(
            "SELECT request FROM queue JOIN rows USING (number) WHERE position % ? = 0 LIMIT ?",
            (step, count),
        ).fetchall()
        return [self._unpack(packed) for (packed,) in rows]

    def close(self) -> None:
        """Commits what was recorded."""
        try:
            self.commit()
        except sqlite3.DatabaseError as error:
            _raise(error, self.path)
        finally:
            self._db.close()

    def delete(self) -> None:
        """Closes it, and nothing of it stays."""
        self._db.close()
        discard(self.path)


def discard(path: Path) -> None:
    """Deletes a work file that nobody has open."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _raise(error: sqlite3.Error, path: Path) -> Any:
    if isinstance(error, sqlite3.OperationalError) and re.search("full|I/O", str(error)):
        raise OSError(
            f"no space is left for {path} ({error}); make some, and run the same command again to "
            "go on"
        ) from None
    raise ConfigError(
        f"{path} cannot be used ({error}); delete it to begin anew, or choose another output"
    ) from None
