"""Files of rows, in and out: OpenAI's batch JSONL, and tables as JSONL, CSV or Parquet.

A file is read twice: for the requests, and again when the answers are put beside its rows. Both
times the same rows come in the same order, also those that cannot be read.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import csv
import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec

from anaphora.errors import ConfigError

Format = Literal["openai", "jsonl", "csv", "parquet"]

MAX_LINE_BYTES = 2**24
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_PARQUET_ROWS = 2048  # at a time
_OPENAI_FIELDS = ("custom_id", "body")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; ``error`` says why it cannot be used."""

    values: dict[str, Any]
    error: str | None = None


def format_of(path: Path, field: str) -> Format:
    """By the file's name. Raises ``ConfigError``."""
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise ConfigError(
            f"{field} is {str(path)!r}; its name must end in {', '.join(_SUFFIXES)}, which says "
            "what is in it"
        )
    return found


class Table:
    """An input file. ``columns`` is None where each row names its own."""

    def __init__(self, path: Path, *, is_table: bool) -> None:
        """``is_table``: JSONL holds rows, whatever they look like. Raises ``ConfigError``."""
        self.path = path
        self.format = format_of(path, "IN")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is no regular file; it has to be read twice")
            self.num_bytes = status.st_size
            self.columns = self._read_columns()
            if self.format == "jsonl" and not is_table and self._is_openai():
                self.format = "openai"
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    def rows(self, position: list[int] | None = None) -> Iterator[Row]:
        """All rows. ``position[0]`` is set to the bytes that were read so far, for a bar."""
        position = [0] if position is None else position
        match self.format:
            case "csv":
                return self._csv_rows(position)
            case "parquet":
                return self._parquet_rows(position)
        return self._json_rows(position)

    def _read_columns(self) -> list[str] | None:
        if self.format == "csv":
            csv.field_size_limit(MAX_LINE_BYTES)
            try:
                with _open_csv(self.path) as file:
                    header = next(csv.reader(file, strict=True), None)
            except csv.Error as error:
                raise ConfigError(f"{self.path} has no header that is CSV: {error}") from None
            if not header:
                raise ConfigError(f"{self.path} is empty; its first line must name the columns")
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise ConfigError(f"{self.path} has two columns {twice!r}; rename one")
            return header
        if self.format == "parquet":
            return list(_parquet_file(self.path).schema_arrow.names)
        return None

    def _is_openai(self) -> bool:
        first = next((row for row in self._json_rows([0]) if row.error is None), None)
        return first is not None and all(name in first.values for name in _OPENAI_FIELDS)

    def _json_rows(self, position: list[int]) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                position[0] += len(line)
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield _json_row(line, number)

    def _csv_rows(self, position: list[int]) -> Iterator[Row]:
        assert self.columns is not None
        csv.field_size_limit(MAX_LINE_BYTES)
        with _open_csv(self.path) as file:
            # Strict: a quote that is never closed would take all that follows into its field.
            reader = csv.reader(_counted(file, position), strict=True)
            next(reader, None)
            while True:
                first = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    last = reader.line_num
                    where = f"line {first}" if first == last else f"lines {first} to {last}"
                    yield Row({}, f"{where}: no CSV, {error}")
                    continue
                if fields:
                    yield self._csv_row(fields, reader.line_num)

    def _csv_row(self, fields: list[str], line: int) -> Row:
        assert self.columns is not None
        values = dict(zip(self.columns, fields, strict=False))
        if len(fields) != len(self.columns):
            return Row(
                values,
                f"line {line} has {len(fields)} fields, but there are {len(self.columns)} columns",
            )
        if any("\ud800" <= char <= "\udfff" for field in fields for char in field):
            clean = {name: _without_surrogates(value) for name, value in values.items()}
            return Row(clean, f"line {line} is not UTF-8")
        return Row(values)

    def _parquet_rows(self, position: list[int]) -> Iterator[Row]:
        file = _parquet_file(self.path)
        total = max(file.metadata.num_rows, 1)
        num_read = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in _rows_of(batch, num_read):
                num_read += 1
                position[0] = self.num_bytes * num_read // total
                yield row


class Writer(Protocol):
    """Where rows go."""

    def write(self, row: Row, result: Mapping[str, Any]) -> None:
        """The next row, with the columns of its result."""

    def close(self) -> None:
        """Writes what is left."""


class JsonWriter:
    """One object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def write(self, row: Row, result: Mapping[str, Any]) -> None:
        """Dates become text as ISO 8601 has it, bytes as base64, decimals as they are read."""
        line = _json({**row.values, **result})
        self._file.write(line.encode(errors="backslashreplace").decode() + "\n")

    def flush(self) -> None:
        """Lets others read what was written so far."""
        self._file.flush()

    def close(self) -> None:
        """Everything is on the disk afterwards."""
        _sync(self._file)


class CsvWriter:
    """With a header; what is null is empty."""

    def __init__(self, path: Path, columns: Sequence[str], added: Sequence[str]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="", errors="backslashreplace")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._quoting_writer = csv.writer(self._file, lineterminator="\n", quoting=csv.QUOTE_ALL)
        self._columns, self._added = columns, added
        self._writer.writerow([*columns, *added])

    def write(self, row: Row, result: Mapping[str, Any]) -> None:
        """Objects and lists become JSON."""
        values = [row.values.get(name) for name in self._columns]
        cells = [_csv_value(value) for value in [*values, *(result[n] for n in self._added)]]
        # The module quotes line feeds, but not the carriage returns that its reader ends rows at.
        has_return = any("\r" in cell for cell in cells if isinstance(cell, str))
        (self._quoting_writer if has_return else self._writer).writerow(cells)

    def flush(self) -> None:
        """Lets others read what was written so far."""
        self._file.flush()

    def close(self) -> None:
        """Everything is on the disk afterwards."""
        _sync(self._file)


class ParquetWriter:
    """The input's columns in the input's types, read again, and those of the results."""

    def __init__(self, path: Path, source: Path, added: Mapping[str, str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._pa = pa
        file = _parquet_file(source)
        self._batches = file.iter_batches(batch_size=_PARQUET_ROWS)
        self._batch = next(self._batches, None)
        self._fields = [pa.field(name, pa.type_for_alias(kind)) for name, kind in added.items()]
        schema = pa.schema([*file.schema_arrow, *self._fields], file.schema_arrow.metadata)
        self._schema = schema
        self._path = path
        self._writer = pq.ParquetWriter(path, schema)
        self._results: list[Mapping[str, Any]] = []

    def write(self, row: Row, result: Mapping[str, Any]) -> None:  # noqa: ARG002
        """``row`` is taken from the file again, with its types."""
        self._results.append(result)
        if self._batch is not None and len(self._results) == self._batch.num_rows:
            self._write_batch()
            self._batch = next(self._batches, None)

    def _write_batch(self) -> None:
        assert self._batch is not None
        columns = [
            self._pa.array([_text_of(r[f.name], f) for r in self._results], type=f.type)
            for f in self._fields
        ]
        table = self._pa.Table.from_arrays([*self._batch.columns, *columns], schema=self._schema)
        self._writer.write_table(table)
        self._results = []

    def close(self) -> None:
        """Everything is on the disk afterwards."""
        if self._results and self._batch is not None:  # of a part of the rows
            self._batch = self._batch.slice(0, len(self._results))
            self._write_batch()
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())


def _text_of(value: Any, field: Any) -> Any:
    is_text = str(field.type) == "string"
    return _json(value) if is_text and value is not None and not isinstance(value, str) else value


def _csv_value(value: Any) -> Any:
    if isinstance(value, dict | list | bool):
        return _json(value)
    return "" if value is None else _plain(value) if isinstance(value, bytes) else value


def _json(value: Any) -> str:
    """What JSON has no number for is null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), ensure_ascii=False, default=_plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows_of(batch: Any, num_before: int) -> Iterator[Row]:
    try:
        return iter([Row(values) for values in batch.to_pylist()])
    except (ValueError, OverflowError):  # pyarrow's errors among them
        return (_row_of(batch, index, num_before) for index in range(batch.num_rows))


def _row_of(batch: Any, index: int, num_before: int) -> Row:
    try:
        return Row(batch.slice(index, 1).to_pylist()[0])
    except (ValueError, OverflowError) as error:
        return Row({}, f"row {num_before + index + 1} has a value that cannot be read: {error}")


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _json_row(line: bytes, number: int) -> Row:
    if len(line) > MAX_LINE_BYTES:
        return Row({}, f"line {number} has more than {MAX_LINE_BYTES} bytes")
    try:
        values = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return Row({}, f"line {number} is not JSON: {error}")
    if not isinstance(values, dict):
        return Row({}, f"line {number} is no JSON object")
    return Row(values)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """A longer line than is allowed comes without its rest."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) <= MAX_LINE_BYTES:
                break


def _open_csv(path: Path) -> IO[str]:
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _counted(lines: Iterable[str], position: list[int]) -> Iterator[str]:
    for line in lines:
        position[0] += len(line)
        yield line


def _without_surrogates(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            "Parquet files need pyarrow; install it: pip install 'anaphora[sql]'"
        ) from None
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is no Parquet file: {error}") from None


def _sync(file: IO[str]) -> None:
    with contextlib.closing(file):
        file.flush()
        os.fsync(file.fileno())
