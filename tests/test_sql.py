"""AI functions in DuckDB: types, NULLs, whole columns at once, errors, threads, interruption."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from anaphora import LLM, FakeLLM, sql
from anaphora.batch.client import Client, Reply
from anaphora.errors import InvalidArgument, MissingExtra, RowFailed
from anaphora.functions.tasks import SENTIMENTS
from anaphora.sql import Registration
from tests.server.running import serving

ROWS = ["I love this toaster.", None, "", "It broke. Call Ann in Rome."]


@pytest.fixture(scope="module")
def real() -> Iterator[Client]:
    with LLM("smollm2", kv_cache_memory=2**27) as llm, Client(llm) as client:
        yield client


@pytest.fixture
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as con:
        con.execute("CREATE TABLE reviews (id INTEGER, text VARCHAR)")
        con.executemany("INSERT INTO reviews VALUES (?, ?)", list(enumerate(ROWS)))
        yield con


@pytest.fixture
def ai(con: duckdb.DuckDBPyConnection, real: Client) -> Registration:
    return sql.register(con, real)


@pytest.fixture
def fake() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def faked(con: duckdb.DuckDBPyConnection, fake: FakeLLM) -> Iterator[Registration]:
    """Answers with what it was asked, or with what ``fake`` is given."""
    with Client(fake, concurrency=1) as client:
        yield sql.register(con, client)


def prompts(fake: FakeLLM) -> list[str]:
    return [fake.tokenizer.decode(request.prompt_token_ids) for request in fake.requests]


MORE = "modelParameters => {'max_tokens': 4}"
TYPES = {
    f"ai_query('smollm2', text, {MORE})": "VARCHAR",
    f"ai_query('smollm2', text, returnType := 'INT', failOnError := false, {MORE})": (
        "STRUCT(result BIGINT, errorMessage VARCHAR)"
    ),
    "ai_query('smollm2', text, responseFormat => 'STRUCT<r: STRUCT<good: BOOLEAN>>')": (
        "STRUCT(good BOOLEAN)"
    ),
    "ai_query('smollm2', text, responseFormat => '"
    '{"type": "object", "properties": {"stars": {"type": "integer", "minimum": 1, "maximum": 5}}, '
    '"required": ["stars"]}\')': "STRUCT(stars BIGINT)",
    f"ai_gen(text, {MORE})": "VARCHAR",
    "ai_classify(text, ['good', 'bad'])": "VARCHAR",
    'ai_classify(text, \'["good", "bad"]\', failOnError => false)': (
        "STRUCT(result VARCHAR, errorMessage VARCHAR)"
    ),
    "ai_classify(text, ['good', 'bad'], MAP {'multilabel': 'true'})": "VARCHAR[]",
    "ai_classify(text, ['good', 'bad'], options := {'instructions': 'Be kind.'})": "VARCHAR",
    "ai_extract(text, ['who', 'where'])": 'STRUCT(who VARCHAR, "where" VARCHAR)',
    f"ai_summarize(text, 10, {MORE})": "VARCHAR",
    f"ai_translate(text, 'de', {MORE})": "VARCHAR",
    f"ai_fix_grammar(text, {MORE})": "VARCHAR",
    f"ai_mask(text, ['person'], failOnError => false, {MORE})": (
        "STRUCT(result VARCHAR, errorMessage VARCHAR)"
    ),
    "ai_analyze_sentiment(text)": "VARCHAR",
    "ai_similarity(text, 'I love this toaster.')": "FLOAT",
}


@pytest.mark.parametrize("call", list(TYPES))
def test_types_nulls_and_order(call: str, ai: Registration) -> None:
    result = ai.sql(f"SELECT id, {call} AS value FROM reviews ORDER BY id")
    assert str(result.types[1]) == TYPES[call]
    rows = result.fetchall()
    assert [number for number, _ in rows] == [0, 1, 2, 3]
    assert [value is None for _, value in rows] == [False, True, False, False]


def test_values_are_of_what_was_asked(ai: Registration, con: duckdb.DuckDBPyConnection) -> None:
    rows = con.sql(
        "SELECT ai_classify(text, ['good', 'bad']), ai_analyze_sentiment(text), "
        "ai_similarity(text, 'I love this toaster.'), ai_extract(text, ['who']).who FROM reviews"
    ).fetchall()
    assert {row[0] for row in rows} <= {"good", "bad", None}
    assert {row[1] for row in rows} <= {*SENTIMENTS, None}
    assert rows[0][2] == 1.0
    assert 0 < rows[2][2] < 1


def test_a_column_is_one_batch(
    faked: Registration, con: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    con.execute("CREATE TABLE many AS SELECT 'row ' || (i % 2500) AS text FROM range(5000) t(i)")
    batches: list[int] = []

    def complete(bodies: list[Any], *, on_done: Callable[[Reply], None]) -> list[Reply]:
        batches.append(len(bodies))
        texts = [body["messages"][-1]["content"] for body in bodies]
        replies = [Reply(200, {"choices": [{"message": {"content": t}}]}) for t in texts]
        for reply in replies:
            on_done(reply)
        return replies

    monkeypatch.setattr(faked.client, "complete", complete)
    [(count,)] = faked.sql("SELECT count(DISTINCT ai_gen(text)) FROM many").fetchall()
    assert (count, batches) == (2500, [2500])
    [(count,)] = con.sql("SELECT count(DISTINCT ai_gen(text)) FROM many").fetchall()
    assert (count, batches) == (2500, [2500])  # all were remembered
    batches.clear()
    con.sql("SELECT count(ai_fix_grammar(text)) FROM many").fetchall()
    assert batches == [2048, 452]  # DuckDB's vectors; of the second and third what is new
    assert faked.usage.num_rows == faked.num_rows_asked == 5000


def test_usage_counts_different_rows(faked: Registration, con: duckdb.DuckDBPyConnection) -> None:
    faked.sql("SELECT ai_gen('a' || i // 2) FROM range(4) t(i)")
    assert faked.usage.num_rows == 2
    con.sql("SELECT ai_gen('b' || i // 2) FROM range(4) t(i)").fetchall()
    assert faked.usage.num_rows == faked.usage.num_requests == 4
    assert str(faked.usage).startswith("4 different rows, 4 requests, ")
    chance = "modelParameters => {'temperature': 1}"
    con.sql(f"SELECT ai_gen('c' || i // 2, {chance}) FROM range(4) t(i)").fetchall()
    assert faked.usage.num_requests == 8


def test_functions_stand_on_each_other(faked: Registration, fake: FakeLLM) -> None:
    rows = faked.sql(
        "SELECT id, ai_gen('again: ' || ai_gen(text)) FROM reviews WHERE text <> '' ORDER BY id"
    ).fetchall()
    assert rows == [
        (0, "You said: again: You said: I love this toaster."),
        (3, "You said: again: You said: It broke. Call Ann in Rome."),
    ]
    assert len(fake.requests) == 4


def test_only_the_branch_that_is_taken_is_asked(faked: Registration, fake: FakeLLM) -> None:
    for label in ("no", "yes", "yes"):  # in the order of the prompts: '', I, It
        fake.enqueue(label)
    rows = faked.sql(
        "SELECT CASE WHEN ai_classify(text, ['yes', 'no']) = 'yes' THEN ai_gen('A ' || text) "
        "ELSE 'not asked' END FROM reviews WHERE text IS NOT NULL ORDER BY id"
    ).fetchall()
    assert len(fake.requests) == 5
    assert sum(value == "not asked" for (value,) in rows) == 1
    assert faked.num_rows_asked == 5


@pytest.mark.parametrize(
    "query",
    [
        "SELECT ai_gen(text) FROM reviews WHERE text IS NOT NULL LIMIT 2",
        "SELECT ai_gen(text) FROM (SELECT text FROM reviews USING SAMPLE 2 ROWS)",
        "SELECT ai_gen(random()::VARCHAR) FROM range(2)",
        "SELECT ai_gen(text, modelParameters => {'temperature': 1}) FROM reviews WHERE id = 0",
    ],
)
def test_what_differs_from_run_to_run_runs_once(
    query: str, faked: Registration, fake: FakeLLM
) -> None:
    rows = faked.sql(query).fetchall()
    assert len(fake.requests) == sum(value is not None for (value,) in rows) <= 2
    assert all(value is None or value.startswith("You said: ") for (value,) in rows)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT coalesce(ai_gen(text), error('none')) FROM reviews WHERE id = 2", "You said: "),
        ("SELECT coalesce(regexp_extract(ai_gen('a7' || text), '\\d'), 'bad')::INT FROM reviews "
         "WHERE id = 0", 7),
        ("SELECT (SELECT id FROM reviews r WHERE coalesce(ai_gen(text), 'You said: ') = "
         "'You said: ' AND text IS NOT NULL)", 2),
        ("SELECT ai_gen('again ' || coalesce(ai_gen(text), error('none'))) FROM reviews "
         "WHERE id = 2", "You said: again You said: "),
        ("WITH RECURSIVE q(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM q WHERE "
         "ai_gen(n::VARCHAR) IS DISTINCT FROM 'You said: 5') SELECT count(*) FROM q", 5),
    ],
)  # fmt: skip
def test_nulls_of_the_gathering_pass_do_no_harm(
    query: str, expected: Any, faked: Registration
) -> None:
    assert faked.sql(query).fetchall() == [(expected,)]


def test_an_error_of_the_query_is_its_own(faked: Registration) -> None:
    with pytest.raises(duckdb.ConversionException, match="You said: I love"):
        faked.sql("SELECT ai_gen(text)::INT FROM reviews WHERE id = 0")


def test_in_a_transaction_it_runs_once(faked: Registration, con: duckdb.DuckDBPyConnection) -> None:
    con.execute("BEGIN")
    query = "SELECT coalesce(ai_gen(text), error('none')) FROM reviews WHERE id = 2"
    assert faked.sql(query).fetchall() == [("You said: ",)]
    con.execute("COMMIT")


@pytest.mark.parametrize(
    "value",
    [
        "340282366920938463463374607431768211455::UHUGEINT",
        "'1010'::BIT",
        "'12:00:00+02'::TIMETZ",
        "'00000000-0000-0000-0000-000000000001'::UUID",
        "['1010'::BIT]",
        "MAP {'a': 1}",
    ],
)
def test_values_keep_their_types(
    value: str, faked: Registration, con: duckdb.DuckDBPyConnection
) -> None:
    ours, theirs = (run(f"SELECT {value} AS v, ai_gen('a')") for run in (faked.sql, con.sql))
    assert ours.types == theirs.types
    assert ours.fetchall() == theirs.fetchall()


def test_statements_other_than_one_select_run(
    faked: Registration, con: duckdb.DuckDBPyConnection
) -> None:
    faked.sql("CREATE TABLE answers AS SELECT ai_gen(text) AS answer FROM reviews WHERE id = 0")
    assert con.sql("FROM answers").fetchall() == [("You said: I love this toaster.",)]
    assert faked.sql("SELECT 1; SELECT ai_gen('b')").fetchall() == [("You said: b",)]


@pytest.mark.parametrize(
    "write",
    [
        "INSERT INTO log VALUES (7) RETURNING n",
        "UPDATE log SET n = n + 1 RETURNING n",
        "DELETE FROM log RETURNING n",
    ],
)
def test_a_query_that_writes_does_so_once(
    write: str, faked: Registration, con: duckdb.DuckDBPyConnection
) -> None:
    con.execute("CREATE TABLE log AS SELECT 6 AS n")
    [(answer,)] = faked.sql(f"WITH x AS ({write}) SELECT ai_gen(n::VARCHAR) FROM x").fetchall()
    verb = write.split()[0]
    assert answer == ("You said: 6" if verb == "DELETE" else "You said: 7")
    left = {"INSERT": [(6,), (7,)], "UPDATE": [(7,)], "DELETE": []}[verb]
    assert con.sql("FROM log ORDER BY n").fetchall() == left


def test_labels_of_each_rows_own_are_one_batch_too(faked: Registration, fake: FakeLLM) -> None:
    for _ in range(20):
        fake.enqueue("x")
    asked: list[int] = []
    complete = faked.client.complete

    def count(bodies: Any, **more: Any) -> list[Reply]:
        asked.append(len(bodies))
        return complete(bodies, **more)

    faked.client.complete = count  # type: ignore[method-assign, assignment]
    query = "SELECT ai_classify('a', ['x', 'y' || i]) FROM range(20) t(i)"
    assert faked.sql(query).fetchall() == [("x",)] * 20
    assert asked == [20]


def test_parameters_and_the_callers_tables_are_seen(faked: Registration) -> None:
    mine = pa.table({"text": ["a", "b"]})
    rows = faked.sql("SELECT ai_gen(text || $1) FROM mine ORDER BY 1", ["!"]).fetchall()
    assert rows == [("You said: a!",), ("You said: b!",)]
    assert mine.num_rows == 2


def test_an_empty_result_keeps_its_types(faked: Registration) -> None:
    result = faked.sql("SELECT ai_extract(text, ['who']) FROM reviews WHERE false")
    assert [str(kind) for kind in result.types] == ["STRUCT(who VARCHAR)"]
    assert result.fetchall() == []


def test_a_failed_row_is_the_querys_or_its_own(
    faked: Registration, fake: FakeLLM, con: duckdb.DuckDBPyConnection
) -> None:
    query = "SELECT ai_classify(text, ['good', 'bad']{}) FROM reviews WHERE id = 3"
    message = "ai_classify, row 'It broke. Call Ann in Rome.': .*'fine' is none of the labels"
    fake.enqueue("fine")
    with pytest.raises(RowFailed, match=message):
        faked.sql(query.format("")).fetchall()
    fake.enqueue("fine")
    with pytest.raises(duckdb.InvalidInputException, match=message):
        con.sql(query.format("")).fetchall()
    fake.enqueue("fine")
    [(value,)] = faked.sql(query.format(", failOnError => false")).fetchall()
    assert value["result"] is None
    assert "'fine' is none of the labels" in value["errorMessage"]
    [(value,)] = faked.sql(query.format("")).fetchall() if fake.enqueue("good") else [("good",)]
    assert value == "good"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("ai_query('gpt', text)", "'gpt', which is not served; served: fake"),
        ("ai_query('fake', text, modelParameters => {'max_token': 1})", "have 'max_token', which"),
        ("ai_query('fake', text, responseFormat => 'STRUCT<a: INT, b: INT>')", "2 top-level"),
        ("ai_query('fake', text, returnType => 'DATE')", "returnType is 'DATE'"),
        ("ai_summarize(text, -1)", "INVALID_MAX_WORDS"),
        ("ai_classify(text, ['a'])", "labels are 1; 2 to 500"),
        ("ai_classify(text, ['a', 'b'], {'version': '2.1'})", "no option 'version'"),
        ("ai_translate(text, 'xx')", "to_lang is 'xx'"),
        ("ai_gen(text, failOnError => 'maybe')", "failOnError is 'maybe'; it must be"),
    ],
)
def test_wrong_arguments_are_named(
    call: str, message: str, faked: Registration, con: duckdb.DuckDBPyConnection
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        faked.sql(f"SELECT {call} FROM reviews")
    with pytest.raises(duckdb.InvalidInputException, match=message):
        con.sql(f"SELECT {call} FROM reviews").fetchall()


def test_mistakes_in_sql_are_duckdbs_own_words(faked: Registration) -> None:
    with pytest.raises(duckdb.ParserException, match="syntax error"):
        faked.sql("SELEC 1")
    with pytest.raises(InvalidArgument, match="the query is empty"):
        faked.sql(" ")
    with pytest.raises(duckdb.CatalogException, match="nosuch does not exist") as caught:
        faked.sql("SELECT nosuch(1)")
    assert "EXPLAIN" not in str(caught.value)
    with pytest.raises(duckdb.BinderException, match=r"ai_query\(\) does not support"):
        faked.sql("SELECT ai_query('fake', text, files => text) FROM reviews")


@pytest.mark.parametrize(
    "call",
    [
        "ai_extract(text, [text])",
        "ai_gen(text, failOnError => id = 1)",
        "ai_gen(text, failOnError => (SELECT true))",
        "ai_gen(text, modelParameters => {'max_tokens': id})",
        "ai_summarize(text, id)",
        "ai_query(text, 'fake')",
    ],
)
def test_what_decides_the_type_has_to_be_a_constant(call: str, faked: Registration) -> None:
    with pytest.raises(InvalidArgument, match="column or a subquery where a constant has to be"):
        faked.sql(f"SELECT {call} FROM reviews")


def test_labels_of_a_row_are_its_own_error(
    faked: Registration, fake: FakeLLM, con: duckdb.DuckDBPyConnection
) -> None:
    labels = "FROM (VALUES (['x', 'y']), (['x', NULL]), (NULL)) v(labels)"
    fake.enqueue("x")
    for run in (faked.sql, con.sql):
        rows = run(f"SELECT ai_classify('a', labels, failOnError => false) {labels}").fetchall()
        assert rows[0] == ({"result": "x", "errorMessage": None},)
        assert "labels have None" in rows[1][0]["errorMessage"]
        assert "labels are None" in rows[2][0]["errorMessage"]
    with pytest.raises(InvalidArgument, match="labels have None"):
        faked.sql(f"SELECT ai_classify('a', labels) {labels}")
    with pytest.raises(InvalidArgument, match="modelParameters have 'max'"):
        faked.sql(
            "SELECT ai_classify('a', labels, failOnError => false, modelParameters => {'max': 1}) "
            + labels
        )


def test_a_closed_registration_says_so(con: duckdb.DuckDBPyConnection, fake: FakeLLM) -> None:
    with sql.register(con, fake):
        pass
    with pytest.raises(duckdb.InvalidInputException, match="the client was closed"):
        con.sql("SELECT ai_gen('a')").fetchall()
    with sql.register(con, fake):
        assert con.sql("SELECT ai_gen('a')").fetchall() == [("You said: a",)]


def test_labels_of_a_class_may_come_from_a_column(faked: Registration, fake: FakeLLM) -> None:
    fake.enqueue("x")
    query = "SELECT ai_classify('a', labels) FROM (VALUES (['x', 'y'])) v(labels)"
    assert faked.sql(query).fetchall() == [("x",)]


def test_a_failed_transaction_leaves_the_next_query_as_it_should_be(
    faked: Registration, con: duckdb.DuckDBPyConnection
) -> None:
    con.execute("BEGIN")
    with pytest.raises(duckdb.Error, match="bad luck"):
        faked.sql("SELECT error('bad luck' || text) FROM reviews")
    con.execute("ROLLBACK")
    assert con.sql("SELECT ai_gen('a')").fetchall() == [("You said: a",)]
    faked.sql("SELECT 1")
    settings = "current_setting('python_scan_all_frames'), getvariable('anaphora_run')"
    assert con.sql(f"SELECT {settings}").fetchall() == [(False, None)]


def test_connections_and_threads_do_not_wait_for_each_other(real: Client) -> None:
    answers: dict[int, Any] = {}
    with duckdb.connect() as con:

        def work(number: int) -> None:
            with con.cursor() as own:
                registration = sql.register(own, real)
                run = registration.sql if number % 2 else own.sql
                answers[number] = run(
                    f"SELECT ai_classify('row {number} ' || i, ['a', 'b']) FROM range(20) t(i)"
                ).fetchall()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
    assert {len(rows) for rows in answers.values()} == {20}
    assert len(answers) == 4


@pytest.mark.parametrize("is_gathered", [True, False], ids=["gathered", "by vectors"])
def test_an_interrupt_ends_the_query(is_gathered: bool, con: duckdb.DuckDBPyConnection) -> None:
    fake = FakeLLM(token_delay=0.01)
    limit = "" if is_gathered else "LIMIT 2000"
    with Client(fake, concurrency=1) as client:
        registration = sql.register(con, client)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            registration.sql(f"SELECT ai_gen('row ' || i) FROM range(2000) t(i) {limit}")
        assert time.monotonic() - start < 10
        timer.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert con.sql("SELECT ai_gen('a')").fetchall() == [("You said: a",)]


def test_a_server_answers_too(con: duckdb.DuckDBPyConnection) -> None:
    with serving() as serve:
        server = serve()
        with sql.register(con, f"{server.url}/v1") as registration:
            rows = registration.sql("SELECT ai_gen(text) FROM reviews ORDER BY id").fetchall()
    assert [value for (value,) in rows][:2] == ["You said: I love this toaster.", None]


def test_the_latest_values_are_remembered(
    faked: Registration,
    fake: FakeLLM,
    con: duckdb.DuckDBPyConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sql, "_MEMO_ROWS", 2)
    for text, num_requests in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
        con.sql("SELECT ai_gen($1)", params=[text]).fetchall()
        assert len(fake.requests) == num_requests


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"duckdb.*pip install 'anaphora\[sql\]'"):
        sql.check_extra()
