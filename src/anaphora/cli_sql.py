"""``anaphora sql``: one query with AI functions over local files."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from anaphora.cli_common import (
    ApiKey,
    CacheMemory,
    DtypeOption,
    Model,
    Threads,
    Url,
    console,
    open_client,
    option,
)
from anaphora.config import EngineConfig
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    import duckdb

    from anaphora.batch.client import Reply
    from anaphora.sql import Registration

_DEFAULTS = EngineConfig()
_INTERRUPTED = 130
_REFRESH_SECONDS = 0.2
_NESTED = ("struct", "list", "array", "map")  # DuckDB's types
_STRING_OR_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')
_SUFFIXES = (".csv", ".parquet", ".jsonl")


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


def sql(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="SQL of DuckDB; - reads standard input.")
    ],
    output: Annotated[
        Path | None,
        option(
            "Write the result to this file, .csv, .parquet or .jsonl, instead of printing it.",
            "Output",
            "--output",
            "-o",
        ),
    ] = None,
    overwrite: Annotated[
        bool, option("Replace the file if it is there.", "Output", "--overwrite")
    ] = False,
    format_: Annotated[Format, option("How it is printed.", "Output", "--format")] = Format.TABLE,
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    kv_cache_memory: CacheMemory = None,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Run a query over local files, with AI functions in it.

    Files are tables: 'reviews.csv', 'sales/*.parquet', 'log.jsonl'. Functions: ai_classify,
    ai_extract, ai_summarize, ai_analyze_sentiment, ai_translate, ai_fix_grammar, ai_mask,
    ai_similarity, ai_gen, ai_query. Each column of them is one planned batch: rows that begin
    alike meet in the cache, equal ones are computed once.

        anaphora sql "select text, ai_classify(text, ['praise', 'complaint']) from 'reviews.csv'"
    """
    from anaphora import sql as functions

    functions.check_extra()
    import duckdb

    query = _read_query(query)
    if output is not None and output.suffix not in _SUFFIXES:
        raise ConfigError(f"--output is {str(output)!r}; its name must end in {_listed()}")
    if output is not None and output.exists() and not overwrite:
        raise ConfigError(f"{output} exists; use --overwrite, or another --output")
    try:
        with duckdb.connect() as con:
            con.extract_statements(query)  # a slip of the pen needs no model
            with (
                open_client(model, url, api_key, None, dtype, kv_cache_memory, threads) as client,
                _Progress() as progress,
            ):
                progress.registration = functions.register(con, client, on_done=progress.on_done)
                result = progress.registration.sql(query)
            if output is not None:
                _write(result, output)
            else:
                _print(result, format_)
    except duckdb.Error as error:
        raise ConfigError(str(error).partition("\n\nLINE")[0].replace("\n", " ")) from None
    except KeyboardInterrupt:
        console(stderr=True).print("interrupted", style="yellow")
        raise typer.Exit(_INTERRUPTED) from None


def _read_query(query: str) -> str:
    try:
        query = sys.stdin.read() if query == "-" else query
        query.encode()
    except UnicodeError:
        raise ConfigError("the query is not valid UTF-8; write it in that encoding") from None
    return query


class _Progress:
    """A bar while rows are computed, on a terminal; what they cost afterwards, always."""

    registration: Registration

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=None)
        self._started = time.monotonic()
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._progress.stop()
        if kind is None and self.registration.usage.num_rows:
            self._console.print(Text(f"{self.registration.usage}, {self._rate()}", style="dim"))

    def on_done(self, _: Reply) -> None:
        """One row more."""
        now = time.monotonic()
        if now - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = now
        usage = self.registration.usage
        self._progress.update(
            self._bar,
            completed=usage.num_rows,
            total=self.registration.num_rows_asked,
            description=f"rows, {self._rate()}, {usage.cached_share:.0%} cached",
        )

    def _rate(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self.registration.usage.num_rows / seconds:.1f} rows/s"


def _print(result: duckdb.DuckDBPyRelation, format_: Format) -> None:
    if format_ is Format.JSONL:
        for line in _json_lines(result):
            typer.echo(line)
        return
    if format_ is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(result.columns)
        writer.writerows(zip(*_csv_columns(result), strict=True))
        return
    shown = Table()
    for name in result.columns:
        shown.add_column(Text(name), overflow="fold")
    for row in result.project("CAST(COLUMNS(*) AS VARCHAR)").fetchall():
        shown.add_row(*(Text("NULL", "dim") if cell is None else Text(cell) for cell in row))
    console().print(shown)


def _json_lines(result: duckdb.DuckDBPyRelation) -> Iterator[str]:
    for row in result.project("to_json(COLUMNS(*))").fetchall():
        cells = zip(result.columns, row, strict=True)
        fields = (f"{json.dumps(name)}: {_json_text(cell) or 'null'}" for name, cell in cells)
        yield f"{{{', '.join(fields)}}}"


def _csv_columns(result: duckdb.DuckDBPyRelation) -> list[list[str | None]]:
    """All columns as text, nested values as JSON."""
    texts = result.project("CAST(COLUMNS(*) AS VARCHAR)").to_arrow_table()
    columns: list[list[str | None]] = [column.to_pylist() for column in texts.columns]
    nested = [i for i, kind in enumerate(result.types) if kind.id in _NESTED]
    if nested:
        jsons = result.project("CAST(to_json(COLUMNS(*)) AS VARCHAR)").to_arrow_table()
        for index in nested:
            columns[index] = [_json_text(cell) for cell in jsons.column(index).to_pylist()]
    return columns


def _json_text(cell: str | None) -> str | None:
    """DuckDB writes NaN and Infinity, which JSON does not have: null in their place."""
    if cell is None:
        return None
    return _STRING_OR_NO_NUMBER.sub(lambda m: m[0] if m[0][0] == '"' else "null", cell)


def _write(result: duckdb.DuckDBPyRelation, path: Path) -> None:
    if path.suffix == ".csv":
        import duckdb
        import pyarrow as pa

        columns = [pa.array(column, pa.string()) for column in _csv_columns(result)]
        table = pa.Table.from_arrays(columns, names=result.columns)
        with duckdb.connect() as con:
            con.from_arrow(table).write_csv(str(path), header=True)
    elif path.suffix == ".parquet":
        result.write_parquet(str(path))
    else:
        path.write_text("".join(f"{line}\n" for line in _json_lines(result)), encoding="utf-8")


def _listed() -> str:
    return f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
