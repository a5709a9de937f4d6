"""anaphora sql: tables in, answers out, mistakes in one line."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.conftest import Run
from tests.server.running import Running, serving

REVIEWS = 'id,text\n1,"I like it, really."\n2,\n3,It broke.\n'


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    path.write_text(REVIEWS)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as serve:
        yield serve("alice=secret-key-of-alice")


def ask(run: Run, server: Running, *words: str) -> tuple[int, str, str]:
    return run("sql", "--url", server.url, "--api-key", "secret-key-of-alice", *words)


def test_a_table_and_what_it_cost(run: Run, reviews: Path, smollm2_path: Path) -> None:
    query = f"SELECT id, ai_classify(text, ['good', 'bad']) AS label FROM '{reviews}' ORDER BY id"
    status, out, err = run("sql", query, "--kv-cache-memory", "128MiB")
    assert status == 0, err
    rows = [line.split("│")[1:3] for line in out.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["1", "2", "3"]
    labels = [row[1].strip() for row in rows]
    assert labels[1] == "NULL"
    assert {labels[0], labels[2]} <= {"good", "bad"}
    assert "2 different rows, 2 requests, " in err
    assert "rows/s" in err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("csv", 'id,a\n1,"You said: I like it, really."\n2,\n'),
        (
            "jsonl",
            '{"id": 1, "a": "You said: I like it, really."}\n{"id": 2, "a": null}\n',
        ),
    ],
)
def test_formats(name: str, expected: str, run: Run, reviews: Path, server: Running) -> None:
    query = f"SELECT id, ai_gen(text) AS a FROM '{reviews}' WHERE id < 3 ORDER BY id"
    assert ask(run, server, query, "--format", name)[:2] == (0, expected)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files(suffix: str, run: Run, reviews: Path, server: Running, tmp_path: Path) -> None:
    path = tmp_path / f"answers.{suffix}"
    query = f"SELECT id, ai_gen(text) AS a FROM '{reviews}' ORDER BY id"
    assert ask(run, server, query, "-o", str(path))[:2] == (0, "")
    assert duckdb.sql(f"FROM '{path}'").fetchall() == [
        (1, "You said: I like it, really."),
        (2, None),
        (3, "You said: It broke."),
    ]


NESTED = (
    "SELECT {'a': 'x\\\"NaN', 'n': 'nan'::DOUBLE} AS s, ['b', NULL] AS l, MAP {'k': 1} AS m, "
    "'-inf'::FLOAT AS f, 'NaN, [NaN]' AS t, NULL::INT[] AS e"
)


def test_nested_values_are_json(run: Run, server: Running, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert ask(run, server, NESTED, "-o", str(path))[0] == 0
    for text in (path.read_text(), ask(run, server, NESTED, "--format", "csv")[1]):
        [row] = csv.DictReader(text.splitlines())
        assert json.loads(row["s"]) == {"a": 'x\\"NaN', "n": None}
        assert json.loads(row["l"]) == ["b", None]
        assert json.loads(row["m"]) == {"k": 1}
        assert (row["f"], row["t"], row["e"]) == ("-inf", "NaN, [NaN]", "")
    _, out, _ = ask(run, server, NESTED, "--format", "jsonl")
    assert json.loads(out, parse_constant=pytest.fail) == {
        "s": {"a": 'x\\"NaN', "n": None},
        "l": ["b", None],
        "m": {"k": 1},
        "f": None,
        "t": "NaN, [NaN]",
        "e": None,
    }


def test_a_file_is_replaced_only_if_it_may_be(run: Run, server: Running, reviews: Path) -> None:
    query = f"SELECT id FROM '{reviews}' WHERE id > 2"
    status, out, err = ask(run, server, query, "-o", str(reviews))
    assert (status, out) == (2, "")
    assert f"error: {reviews} exists; use --overwrite, or another --output" in err
    assert reviews.read_text() == REVIEWS
    assert ask(run, server, query, "-o", str(reviews), "--overwrite")[0] == 0
    assert reviews.read_text() == "id\n3\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SELEC 1"], 'Parser Error: syntax error at or near "SELEC"'),
        (["SELECT '\udcff'"], "the query is not valid UTF-8; write it in that encoding"),
        (["SELECT nosuch(1)"], "Catalog Error: Scalar Function with name nosuch does not exist!"),
        (["FROM 'nofile.csv'"], 'IO Error: No files found that match the pattern "nofile.csv"'),
        (["SELECT ai_translate('a', 'xx')"], "ai_translate's to_lang is 'xx'; it must be one of"),
        (["SELECT ai_query('gpt', 'a')"], "'gpt', which is not served; served: fake"),
        (["SELECT 1", "-o", "a.txt"], "--output is 'a.txt'; its name must end in .csv, .parquet"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, run: Run, server: Running) -> None:
    status, out, err = ask(run, server, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}" if "served" not in message else "error: ai_query")
    assert message in err
    assert err.count("\n") == 1


def test_a_refused_key_is_one_line(run: Run, server: Running) -> None:
    status, out, err = run("sql", "SELECT 1", "--url", server.url)
    assert (status, out) == (2, "")
    assert "refuses the API key" in err


def test_the_missing_extra_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    status, out, err = run("sql", "SELECT 1")
    assert (status, out) == (2, "")
    assert "pip install 'anaphora[sql]'" in err


def test_ctrl_c_ends_it(server: Running, tmp_path: Path) -> None:
    server.llm.token_delay = 0.02
    try:
        command = [sys.executable, "-m", "anaphora", "sql", "--url", server.url]
        command += ["--api-key", "secret-key-of-alice"]
        process = subprocess.Popen(
            [*command, "SELECT ai_gen('row ' || i) FROM range(300) t(i)"],
            stderr=subprocess.PIPE,
            text=True,
        )
        num_before = len(server.llm.requests)
        while len(server.llm.requests) == num_before:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        server.llm.token_delay = 0.0
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_help_reads_well(run: Run) -> None:
    status, out, _ = run("sql", "--help")
    assert status == 0
    for word in ("ai_classify", "reviews.csv", "--url", "--format", "--output"):
        assert word in out
