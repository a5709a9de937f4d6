"""Files of rows: read alike twice, with a reason for each row that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anaphora.batch import rows as rows_module
from anaphora.batch.rows import Row, Table
from anaphora.errors import ConfigError


def table(path: Path, content: str | bytes) -> Table:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Table(path, is_table=True)


def test_csv_with_everything_that_csv_has(tmp_path: Path) -> None:
    text = '\ufeffname,text\nä,"two\nlines, one ""quote"""\n\nb,\n'
    found = table(tmp_path / "t.csv", text)
    assert found.columns == ["name", "text"]
    expected = [
        Row({"name": "ä", "text": 'two\nlines, one "quote"'}),
        Row({"name": "b", "text": ""}),
    ]
    assert list(found.rows()) == expected == list(found.rows())


def test_bad_lines_of_csv_are_rows_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 100)
    text = b"a,b\n1\n1,2,3\n\xff,2\n" + b"x" * 200 + b",1\ngood,row\n"
    found = list(table(tmp_path / "t.csv", text).rows())
    assert [row.error for row in found] == [
        "line 2 has 1 fields, but there are 2 columns",
        "line 3 has 3 fields, but there are 2 columns",
        "line 4 is not UTF-8",
        "line 5: no CSV, field larger than field limit (100)",
        None,
    ]
    assert found[-1].values == {"a": "good", "b": "row"}
    assert json.dumps(found[2].values)  # text that can be written


def test_bad_lines_of_json_are_rows_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 60)
    lines = [b'{"a": 1}', b"", b'{"a": 1', b"[1]", b'{"a": "\xff"}', b"[" * 50]
    lines += [b'{"a": "' + b"x" * 300 + b'"}', b'{"a": 2}']
    found = list(table(tmp_path / "t.jsonl", b"\n".join(lines)).rows())
    assert [row.values for row in found] == [{"a": 1}, {}, {}, {}, {}, {}, {"a": 2}]
    assert [row.error is None for row in found] == [True, *[False] * 5, True]
    assert str(found[1].error).startswith("line 3 is not JSON: ")
    assert found[2].error == "line 4 is no JSON object"
    assert found[5].error == "line 7 has more than 60 bytes"


def test_a_quote_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    found = list(table(tmp_path / "t.csv", 'a,b\n1,"x\n2,y\n3,z\n').rows())
    assert [row.error for row in found] == ["lines 2 to 4: no CSV, unexpected end of data"]


def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path) -> None:
    found = list(table(tmp_path / "t.jsonl", '\ufeff{"a": 1}\n').rows())
    assert found == [Row({"a": 1})]


def test_a_pipe_is_refused_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="no regular file"):
        Table(tmp_path / "t.csv", is_table=True)


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    content = pa.table({"n": pa.array([1, None], pa.int8()), "t": ["x", None]})
    pq.write_table(content, path)
    found = Table(path, is_table=True)
    assert found.columns == ["n", "t"]
    assert [row.values for row in found.rows()] == [{"n": 1, "t": "x"}, {"n": None, "t": None}]


def test_whole_requests_are_known_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('broken\n{"custom_id": "a", "body": {}}\n', encoding="utf-8")
    assert Table(path, is_table=False).format == "openai"
    assert Table(path, is_table=True).format == "jsonl"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.xlsx", b"", "must end in .jsonl"),
        ("t.csv", b"", "is empty; its first line"),
        ("t.csv", b"a,b,a\n", "two columns 'a'"),
        ("t.parquet", b"PAR0", "no Parquet file"),
        ("missing.csv", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: Any, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        Table(path, is_table=True)
