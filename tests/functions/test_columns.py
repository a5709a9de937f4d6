"""Functions on columns of every kind: types, NULLs, order, errors, what is asked."""

from __future__ import annotations

from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from anaphora import FakeLLM
from anaphora.batch.client import Client
from anaphora.errors import InvalidArgument, RowFailed
from anaphora.functions import (
    Usage,
    ai_analyze_sentiment,
    ai_classify,
    ai_extract,
    ai_fix_grammar,
    ai_gen,
    ai_mask,
    ai_query,
    ai_similarity,
    ai_summarize,
    ai_translate,
)
from anaphora.functions.tasks import SENTIMENTS

ROWS = ["I love this toaster.", None, "", "It broke. Call Ann in Rome."]
SHORT = {"max_tokens": 6}


def columns() -> dict[str, Any]:
    return {
        "list": list(ROWS),
        "tuple": tuple(ROWS),
        "arrow": pa.array(ROWS),
        "arrow large": pa.array(ROWS, pa.large_string()),
        "arrow dictionary": pa.array(ROWS).dictionary_encode(),
        "arrow chunked": pa.chunked_array([ROWS[:2], ROWS[2:]]),
        "pandas": pd.Series(ROWS, name="text", index=[7, 3, 5, 1]),
        "pandas string": pd.Series(ROWS, dtype="string"),
        "pandas arrow": pd.Series(ROWS, dtype=pd.ArrowDtype(pa.string())),
        "polars": pl.Series("text", ROWS),
    }


def is_alike(values: Any, column: Any) -> bool:
    return isinstance(values, pa.Array if isinstance(column, pa.Array) else type(column))


@pytest.mark.parametrize("kind", list(columns()))
def test_a_column_gives_one_of_its_kind(kind: str, real: Client) -> None:
    column = columns()[kind]
    labels = ai_classify(column, ["good", "bad"], client=real)
    fields = ai_extract(column, ["who", "where"], client=real)
    for values in (labels, fields):
        assert is_alike(values, column)
        assert len(values) == 4
    if kind.startswith("arrow"):
        assert labels.type == pa.string()
        assert fields.type == pa.struct([("who", pa.string()), ("where", pa.string())])
    if kind.startswith("pandas"):
        assert list(labels.index) == list(column.index)
        assert (labels.name, labels.dtype) == (column.name, column.dtype)
        labels, fields = labels.astype(object), fields.astype(object)
        labels, fields = labels.where(labels.notna(), None), fields.where(fields.notna(), None)
    if kind == "polars":
        assert labels.name == "text"
        assert fields.dtype == pl.Struct({"who": pl.String, "where": pl.String})
    listed = labels.to_pylist() if kind.startswith("arrow") else list(labels)
    assert listed[1] is None
    assert {listed[0], listed[2], listed[3]} <= {"good", "bad"}
    structs = fields.to_pylist() if kind.startswith("arrow") else list(fields)
    assert structs[1] is None
    assert [list(struct) for i, struct in enumerate(structs) if i != 1] == [["who", "where"]] * 3


def test_every_function_on_the_real_model(real: Client) -> None:
    more: dict[str, Any] = {"client": real, "model_parameters": SHORT}
    for texts in (
        ai_gen(ROWS, **more),
        ai_query("smollm2", ROWS, **more),
        ai_summarize(ROWS, 5, **more),
        ai_translate(ROWS, "de", **more),
        ai_fix_grammar(ROWS, **more),
    ):
        assert [type(text) for text in texts] == [str, type(None), str, str]
    assert set(ai_analyze_sentiment(ROWS, client=real)) <= {*SENTIMENTS, None}
    masked = ai_mask(["Ann", None], ["person"], fail_on_error=False, **more)
    assert masked[1] is None
    assert masked[0]["result"] in ("Ann", "[MASKED]", None)
    several = ai_classify(ROWS, ["a", "b"], options={"multilabel": True}, client=real)
    assert all(value is None or set(value) <= {"a", "b"} for value in several)
    answers = ai_query(
        "smollm2",
        ["Name a city."],
        response_format="STRUCT<r: STRUCT<city: STRING>>",
        model_parameters={"max_tokens": 40},
        fail_on_error=False,
        client=real,
    )
    assert list(answers[0]["result"] or ["city"]) == ["city"]


def test_similarity(real: Client) -> None:
    values = ai_similarity(pd.Series(ROWS), "I love this toaster.", client=real)
    assert values.dtype == "float32"
    assert values[0] == 1.0
    assert values.isna().tolist() == [False, True, False, False]
    assert 0 < values[2] < 1
    usage = Usage()
    assert ai_similarity(ROWS, ROWS, client=real, on_done=usage.add) == [1.0, None, 1.0, 1.0]
    assert usage.num_requests == 0
    with pytest.raises(InvalidArgument, match="4 and 1 rows"):
        ai_similarity(ROWS, ["a"], client=real)


def test_equal_rows_are_asked_once_and_usage_counts(fake: FakeLLM, scripted: Client) -> None:
    usage = Usage()
    texts = ai_gen(["a", "b", None, "a", "a"], client=scripted, on_done=usage.add)
    assert texts == ["You said: a", "You said: b", None, "You said: a", "You said: a"]
    assert len(fake.requests) == 2
    assert (usage.num_rows, usage.num_requests) == (4, 2)
    assert usage.num_prompt_tokens == sum(len(one.prompt_token_ids) for one in fake.requests)
    assert "4 rows, 2 requests" in str(usage)
    one = Usage("different row")
    ai_gen(["a"], client=scripted, on_done=one.add)
    assert str(one).startswith("1 different row, 1 request, ")


def test_a_failed_row_names_itself_its_cause_and_the_fix(fake: FakeLLM, scripted: Client) -> None:
    for answer in ("good", "fine"):
        fake.enqueue(answer)
    with pytest.raises(RowFailed, match=r"ai_classify, row 2: .*'fine' is none of the labels.*"):
        ai_classify(["a", None, "b"], ["good", "bad"], client=scripted)
    for answer in ("good", "fine"):
        fake.enqueue(answer)
    kept = ai_classify(
        pa.array(["a", None, "b"]), ["good", "bad"], client=scripted, fail_on_error=False
    )
    first, nothing, last = kept.to_pylist()
    assert first == {"result": "good", "errorMessage": None}
    assert nothing is None
    assert last["result"] is None
    assert "'fine' is none of the labels" in last["errorMessage"]


def test_a_row_that_is_too_long_fails_alone(scripted: Client) -> None:
    good, bad = ai_gen(["a", "x" * 5000], client=scripted, fail_on_error=False)
    assert good["errorMessage"] is None
    assert "4096 tokens" in bad["errorMessage"]


@pytest.mark.parametrize("column", [["a"], pa.array(["a"]), pd.Series(["a"]), pl.Series(["a"])])
@pytest.mark.parametrize("answer", ["9" * 400, "1e999", "NaN"])
def test_answers_that_no_column_holds_fail_alone(
    answer: str, column: Any, fake: FakeLLM, scripted: Client
) -> None:
    fake.enqueue(f'{{"result": {answer}}}')
    values = ai_query("fake", column, return_type="DOUBLE", client=scripted, fail_on_error=False)
    [value] = values.to_pylist() if isinstance(values, pa.Array) else list(values)
    assert value["result"] is None
    assert value["errorMessage"]


def test_half_a_surrogate_pair_fails_alone(fake: FakeLLM, scripted: Client) -> None:
    answers = ai_gen(["a", "\ud800"], client=scripted, fail_on_error=False)
    assert answers[0] == {"result": "You said: a", "errorMessage": None}
    assert "half a surrogate pair" in answers[1]["errorMessage"]
    [pair] = ai_similarity(["\ud800"], ["a"], client=scripted, fail_on_error=False)
    assert "half a surrogate pair" in pair["errorMessage"]
    fake.enqueue('{"a": "\\ud800"}')
    found = ai_extract(pa.array(["x"]), ["a"], client=scripted, fail_on_error=False)
    assert "half a surrogate pair" in found.to_pylist()[0]["errorMessage"]


def test_wrong_columns_are_named(scripted: Client) -> None:
    with pytest.raises(InvalidArgument, match="ai_gen, row 1: the value is int"):
        ai_gen(["a", 3], client=scripted)
    with pytest.raises(InvalidArgument, match="ai_gen's column is dict; give an Arrow array"):
        ai_gen({"a": 1}, client=scripted)
    with pytest.raises(InvalidArgument, match="ai_gen's client is str; give"):
        ai_gen(["a"], client="http://127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="ai_classify's client is missing; give an anaphora"):
        ai_classify(["a"], ["b", "c"])  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="ai_classify has no argument 'batch'; beside"):
        ai_classify(["a"], ["b", "c"], client=scripted, batch=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="ai_similarity has no argument 'rows'; beside"):
        ai_similarity(["a"], "b", client=scripted, rows=["c"])  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="endpoint is Series; give a model's name"):
        ai_query(pd.Series(["a"]), "fake", client=scripted)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="'gpt', which is not served; served: fake"):
        ai_query("gpt", ["a"], client=scripted)


@pytest.mark.parametrize("kind", list(columns()))
def test_an_empty_column_stays_one(kind: str, scripted: Client) -> None:
    empty = columns()[kind][:0]
    values = ai_classify(empty, ["a", "b"], client=scripted)
    assert is_alike(values, empty)
    assert len(values) == 0
