"""Usage rows summed up by any column, with money, and exported whole."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.server.endpoints import Price
from anaphora.server.store import Store
from anaphora.server.tables import USAGE
from anaphora.server.usage import COLUMNS, FIELDS, HEADER

SUMS = (
    "input_tokens",
    "cached_tokens",
    "cached_host_tokens",
    "cached_disk_tokens",
    "output_tokens",
    "reasoning_tokens",
    "charged_tokens",
)
# "day": UTC
GROUPS = ("tenant", "key_id", "endpoint", "class", "adapter", "finish_reason", "status", "day")
_IS_OURS = "is_ours"  # whose fault it was that a request failed
_SERVER_ERROR = 500
_DAY = 86400
_MILLION = 1e6
_ROWS_AT_ONCE = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rows count. Times are seconds since 1970; ``since`` counts, ``until`` does not."""

    tenant: str | None = None
    since: float | None = None
    until: float | None = None

    def apply(self, query: Select[Any]) -> Select[Any]:
        """``query`` for these rows only."""
        if self.tenant is not None:
            query = query.where(USAGE.c.tenant == self.tenant)
        if self.since is not None:
            query = query.where(USAGE.c.at >= self.since)
        if self.until is not None:
            query = query.where(USAGE.c.at < self.until)
        return query


def totals(
    store: Store, by: Sequence[str], which: Filter, prices: Mapping[str, Price]
) -> list[dict[str, Any]]:
    """A row for each combination of the columns ``by``, of ``GROUPS``.

    Beside them it has the number of ``requests`` and the sums ``SUMS``. Where an endpoint has a
    price also ``cost``, what is to be paid, and ``saved``, how much more it would be without the
    cache. What our fault ended costs nothing.
    Raises ``InvalidRequest`` for a column that there is not.
    """
    by = list(dict.fromkeys(by))
    if unknown := sorted(set(by) - set(GROUPS)):
        raise InvalidRequest(f"by is {unknown[0]!r}; use some of {', '.join(GROUPS)}", param="by")
    columns = [*by] if "endpoint" in by else [*by, "endpoint"]  # prices are an endpoint's
    keys = [*map(_column, columns), _column(_IS_OURS)]
    sums = [func.coalesce(func.sum(USAGE.c[name]), 0).label(name) for name in SUMS]
    query = select(*keys, func.count().label("requests"), *sums).group_by(*keys).order_by(*keys)
    with store.read() as connection:
        rows = [dict(row) for row in connection.execute(which.apply(query)).mappings()]
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        row |= _money(row, prices, is_free=row.pop(_IS_OURS))
        if "day" in row:
            row["day"] = _date(row["day"])
        group = tuple(row[name] for name in by)
        if "endpoint" not in by:
            del row["endpoint"]
        if group in result:
            _add(result[group], row)
        else:
            result[group] = row
    return list(result.values())


def _column(name: str) -> ColumnElement[Any]:
    if name == "day":
        return func.floor(USAGE.c.at / _DAY).label("day")
    if name == "class":
        return USAGE.c.workload.label("class")
    if name == _IS_OURS:
        return case((USAGE.c.status >= _SERVER_ERROR, 1), else_=0).label(_IS_OURS)
    return USAGE.c[name]


def _money(
    row: Mapping[str, Any], prices: Mapping[str, Price], *, is_free: bool
) -> dict[str, float]:
    """Nobody pays for what failed through our fault, or was given back."""
    price = prices.get(row["endpoint"])
    if price is None:
        return {}
    if is_free:
        return {"cost": 0.0, "saved": 0.0}
    computed = row["input_tokens"] - row["cached_tokens"]
    cost = computed * price.input + row["cached_tokens"] * price.cached_input
    cost += row["output_tokens"] * price.output
    saved = row["cached_tokens"] * (price.input - price.cached_input)
    return {"cost": round(cost / _MILLION, 9), "saved": round(saved / _MILLION, 9)}


def _add(total: dict[str, Any], row: Mapping[str, Any]) -> None:
    for name in ("requests", *SUMS, "cost", "saved"):
        if name in row:
            total[name] = round(total.get(name, 0) + row[name], 9)


def _date(day: float) -> str:
    return datetime.datetime.fromtimestamp(int(day) * _DAY, datetime.UTC).date().isoformat()


def rows(store: Store, which: Filter) -> Iterator[list[tuple[Any, ...]]]:
    """All rows in the order in which they were written, some at a time; columns as ``COLUMNS``."""
    last = 0
    while True:
        query = select(USAGE.c.id, *[USAGE.c[name] for name in COLUMNS])
        query = which.apply(query).where(USAGE.c.id > last).order_by(USAGE.c.id)
        with store.read() as connection:
            found = connection.execute(query.limit(_ROWS_AT_ONCE)).all()
        if not found:
            return
        last = found[-1][0]
        yield [tuple(row[1:]) for row in found]


def csv_chunks(batches: Iterable[Sequence[Sequence[Any]]]) -> Iterator[str]:
    """A header, then the rows, in pieces; times in seconds since 1970."""
    for lines in itertools.chain([[HEADER]], batches):
        buffer = io.StringIO()
        csv.writer(buffer).writerows(lines)
        yield buffer.getvalue()


def write_parquet(batches: Iterable[Sequence[Sequence[Any]]], path: Path) -> None:
    """The rows as a Parquet file. Raises ``ConfigError`` without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs pyarrow; install it: pip install 'anaphora[sql]', or export CSV"
        ) from None
    kinds = {"str": pa.string(), "int": pa.int64()}  # else a float
    schema = pa.schema(
        [
            (name, kinds.get(str(field.type), pa.float64()))
            for name, field in zip(HEADER, FIELDS, strict=True)
        ]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in batches:
            columns = [
                pa.array(column, kind)
                for column, kind in zip(zip(*batch, strict=True), schema.types, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
