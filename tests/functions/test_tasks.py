"""What each function asks, what it makes of answers, and which arguments it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from anaphora.batch.client import Reply
from anaphora.errors import InvalidArgument, RowFailed
from anaphora.functions import tasks
from anaphora.functions.tasks import FUNCTIONS, Task

CITY = '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'


OBJECT = '{"type":"object","properties":{"a":{"type":"string"}},"required":%s}'
NESTED = '{"properties":' + '{"not":' * 3000 + "{}" + "}" * 3001


def schema_of(**field: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def reply(text: str, finish_reason: str = "stop", **more: Any) -> Reply:
    choice = {"message": {"content": text}, "finish_reason": finish_reason, **more}
    return Reply(200, {"choices": [choice]})


def every_task() -> list[Task]:
    return [
        tasks.ai_query("m"),
        tasks.ai_gen(),
        tasks.ai_classify(["a", "b"]),
        tasks.ai_extract(["name"]),
        tasks.ai_summarize(),
        tasks.ai_translate("de"),
        tasks.ai_fix_grammar(),
        tasks.ai_mask(["person"]),
        tasks.ai_analyze_sentiment(),
        tasks.ai_similarity(),
    ]


def test_the_row_is_last_and_alone() -> None:
    for task in every_task():
        row = tasks.pair("the row", "other") if task.function == "ai_similarity" else "the row"
        body = task.request(row)
        *before, last = body["messages"]
        assert "the row" in last["content"]
        assert "the row" not in json.dumps(before)
        assert last["role"] == "user"
        assert body["temperature"] == 0
        assert 0 < body["max_tokens"] <= 4096
        assert [message["role"] for message in before] == ["system"] * len(before)
        is_instructed = task.function not in ("ai_query", "ai_gen")
        assert len(before) == is_instructed
    assert [task.function for task in every_task()] == list(FUNCTIONS)


def test_labels_and_schemas_are_constraints() -> None:
    body = tasks.ai_classify({"a": "the first", "b": ""}).request("x")
    assert body["structured_outputs"] == {"choice": ["a", "b"]}
    assert "- a: the first\n- b" in body["messages"][0]["content"]
    body = tasks.ai_extract(["name", "city"]).request("x")
    schema = body["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["name", "city"]
    body = tasks.ai_classify(["a", "b"], options={"instructions": "Be strict."}).request("x")
    assert body["messages"][0]["content"].endswith("- a\n- b\nBe strict.")


def test_model_parameters_win() -> None:
    for name in FUNCTIONS:
        more: dict[str, Any] = {
            "ai_query": {"endpoint": "m"},
            "ai_classify": {"labels": ["a", "b"]},
            "ai_extract": {"labels": ["a"]},
            "ai_mask": {"labels": ["a"]},
            "ai_translate": {"to_lang": "en"},
        }.get(name, {})
        parameters = {"max_tokens": 7, "temperature": 0.5, "top_p": None}
        task = FUNCTIONS[name](**more, model_parameters=parameters)
        body = task.request(tasks.pair("a", "b") if name == "ai_similarity" else "row")
        assert (body["max_tokens"], body["temperature"]) == (7, 0.5)
        assert "top_p" not in body
        assert not task.is_repeatable
        with pytest.raises(InvalidArgument, match=f"{name}'s modelParameters have 'max_token'"):
            FUNCTIONS[name](**more, model_parameters={"max_token": 7})


def test_a_label_that_is_none_is_an_error() -> None:
    task = tasks.ai_classify(["good", "bad"])
    assert task.value("x", reply("bad")) == "bad"
    with pytest.raises(RowFailed, match="'fine' is none of the labels: the server does not honour"):
        task.value("x", reply("fine"))
    with pytest.raises(RowFailed, match="it was cut off at max_tokens, raise it"):
        task.value("x", reply("goo", "length"))


def test_a_failed_request_is_an_error() -> None:
    failed = Reply(400, {"error": {"message": "the prompt is too long"}})
    with pytest.raises(RowFailed, match="HTTP_REQUEST_ERROR: the prompt is too long"):
        tasks.ai_gen().value("x", failed)


def test_several_labels_are_a_list_without_repetitions() -> None:
    task = tasks.ai_classify(["a", "b"], options='{"multilabel": "true"}')
    assert task.value("x", reply('{"labels": ["b", "a", "b"]}')) == ["b", "a"]
    assert task.shape.duckdb() == ["VARCHAR"]


def test_extracted_fields_are_of_the_labels() -> None:
    task = tasks.ai_extract(["name", "city"])
    assert task.value("x", reply('{"name": null, "city": "Rome"}')) == {
        "name": None,
        "city": "Rome",
    }
    with pytest.raises(RowFailed, match="is not valid JSON: it was cut off at max_tokens"):
        task.value("x", reply('{"name": "A', "length"))
    with pytest.raises(RowFailed, match="the answer has no field 'city': the server does not"):
        task.value("x", reply('{"name": "A"}'))


def test_masks_are_put_into_the_rows_own_text() -> None:
    task = tasks.ai_mask(["person", "phone"])
    row = "Ann (555-1) met Annabel; call Ann Lee."
    found = reply('{"parts": ["Ann", "Ann Lee", "555-1", "nobody", ""]}')
    assert task.value(row, found) == "[MASKED] ([MASKED]) met Annabel; call [MASKED]."
    assert task.value(row, reply('{"parts": []}')) == row


def test_similarity_is_of_two_tokens() -> None:
    def of(chosen: str, top: dict[str, float]) -> float:
        tops = [{"token": t, "logprob": math.log(p)} for t, p in top.items()]
        first = {"token": chosen, "logprob": math.log(top[chosen]), "top_logprobs": tops}
        return float(task.value("", reply(chosen, logprobs={"content": [first]})))

    task = tasks.ai_similarity()
    assert of("Yes", {"Yes": 0.6, "No": 0.2, "Maybe": 0.2}) == pytest.approx(0.75)
    assert of("No", {"Yes": 0.1, "Y": 0.1, "No": 0.2}) == pytest.approx(0.5)
    assert of("Yes", {"Yes": 0.9, "Well": 0.1}) == pytest.approx(0.9)  # No is no likelier
    assert task.known(tasks.pair("a", "a")) == 1.0
    assert task.known(tasks.pair("a", "b")) is None
    with pytest.raises(RowFailed, match="has no logprobs"):
        task.value("", reply("Yes"))
    far = [{"token": t, "logprob": p} for t, p in (("Well", 0.0), ("Yes", -2000), ("No", -2000))]
    first = {**far[1], "top_logprobs": far}
    assert task.value("", reply("Yes", logprobs={"content": [first]})) == 0.5
    for wrong in (None, "x", [], -math.inf):
        first = {"token": "Yes", "logprob": wrong, "top_logprobs": []}
        with pytest.raises(RowFailed, match="logprob"):
            task.value("", reply("Yes", logprobs={"content": [first]}))
    with pytest.raises(RowFailed, match="neither Yes nor No"):
        of("Well", {"Well": 0.9, "Yes": 0.1})


@pytest.mark.parametrize(
    ("given", "answer", "value", "structure"),
    [
        ({}, " text ", " text ", "VARCHAR"),
        ({"return_type": "STRING"}, "text", "text", "VARCHAR"),
        ({"return_type": "INT"}, '{"result": 3}', 3, "BIGINT"),
        ({"return_type": "STRUCT<a: INT>"}, '{"a": 3}', {"a": 3}, {"a": "BIGINT"}),
        ({"return_type": "ARRAY<STRING>"}, '{"result": ["x"]}', ["x"], ["VARCHAR"]),
        ({"response_format": "text"}, "text", "text", "VARCHAR"),
        ({"response_format": '{"type":"json_object"}'}, '{"a":1}', '{"a": 1}', "VARCHAR"),
        ({"response_format": CITY}, '{"city":"Rome"}', {"city": "Rome"}, {"city": "VARCHAR"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": json.loads(CITY)},
                }
            },
            '{"city":"Rome"}',
            {"city": "Rome"},
            {"city": "VARCHAR"},
        ),
        (
            {"response_format": "STRUCT<result: STRUCT<city: STRING>>"},
            '{"result": {"city": "Rome"}}',
            {"city": "Rome"},
            {"city": "VARCHAR"},
        ),
        ({"response_format": "struct<n: BIGINT>"}, '{"n": 3}', 3, "BIGINT"),
    ],
)
def test_answers_of_ai_query(
    given: dict[str, Any], answer: str, value: Any, structure: Any
) -> None:
    task = tasks.ai_query("m", **given)
    assert task.value("x", reply(answer)) == value
    assert task.shape.duckdb() == structure
    assert task.request("x")["model"] == "m"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.ai_query(""), "ai_query's endpoint is ''"),
        (lambda: tasks.ai_query("m", response_format="STRUCT<a: INT, b: INT>"), "2 top-level"),
        (lambda: tasks.ai_query("m", response_format="xml"), "responseFormat is 'xml'; give"),
        (lambda: tasks.ai_query("m", response_format='{"type":"json_schema"}'), "no json_schema.s"),
        (
            lambda: tasks.ai_query("m", return_type="INT", response_format=CITY),
            "both returnType and responseFormat",
        ),
        (lambda: tasks.ai_query("m", return_type="DATE"), "returnType is 'DATE', which has"),
        (lambda: tasks.ai_query("m", return_type=5), "returnType is 5; give a type"),
        (lambda: tasks.ai_query("m", return_type="ARRAY<" * 2000), "more than 12 levels"),
        (lambda: tasks.ai_extract(schema_of(enum=5)), "an enum that is a number"),
        (lambda: tasks.ai_extract(schema_of(type=5)), "has the type 5; give a name"),
        (lambda: tasks.ai_extract(schema_of(type=[["x"]])), r"type \[\['x'\]\]; give a name"),
        (lambda: tasks.ai_extract(json.loads(OBJECT % "5")), "has required 5; give an array"),
        (lambda: tasks.ai_extract(OBJECT % '[["x"]]'), "has required .*; give an array"),
        (lambda: tasks.ai_extract(schema_of(**nested(3000))), "nested too deeply"),
        (lambda: tasks.ai_extract(NESTED), "nested too deeply"),
        (lambda: tasks.ai_query("m", response_format=NESTED), "nested too deeply"),
        (lambda: tasks.ai_extract(schema_of(const=math.nan)), "schema is no JSON"),
        (lambda: tasks.ai_gen(model_parameters={"temperature": math.nan}), "temperature nan; it"),
        (lambda: tasks.ai_gen(model_parameters='{"top_p": -Infinity}'), "top_p -inf; it must be"),
        (lambda: tasks.ai_classify(["a"]), "labels are 1; 2 to 500 are allowed"),
        (lambda: tasks.ai_classify([str(i) for i in range(501)]), "labels are 501; 2 to 500"),
        (lambda: tasks.ai_classify(["a", ""]), "must be text of 1 to 100 characters"),
        (lambda: tasks.ai_classify(["a", "b" * 101]), "must be text of 1 to 100 characters"),
        (lambda: tasks.ai_classify(["a", None]), "labels have None"),
        (lambda: tasks.ai_classify(["a", "a"]), "hold one label twice"),
        (lambda: tasks.ai_classify("a, b"), "labels are 'a, b'; give an array"),
        (lambda: tasks.ai_classify({"a": 1, "b": ""}), "describe 'a' by 1; give text"),
        (
            lambda: tasks.ai_classify(["a", "b"], options={"enableRationales": True}),
            "ai_classify has no option 'enableRationales'; it has instructions and multilabel",
        ),
        (
            lambda: tasks.ai_classify(["a", "b"], options={"multilabel": 2}),
            "multilabel is 2; it must be true or false",
        ),
        (
            lambda: tasks.ai_classify(["a", "b"], options={"instructions": "x" * 20_001}),
            "is str of 20001 characters; it must be text of at most 20,000",
        ),
        (lambda: tasks.ai_classify(["a", "b"], options="x"), "options are 'x'; give names"),
        (lambda: tasks.ai_extract([]), "labels are 0; 1 to 500"),
        (lambda: tasks.ai_extract(["Name", "name"]), "'Name' and 'name'"),
        (lambda: tasks.ai_extract(["a"], options={"mode": "x"}), "no option 'mode'"),
        (lambda: tasks.ai_summarize(-1), "INVALID_MAX_WORDS: ai_summarize's max_words is -1"),
        (lambda: tasks.ai_summarize(2.5), "INVALID_MAX_WORDS"),
        (lambda: tasks.ai_summarize("5"), "INVALID_MAX_WORDS"),
        (
            lambda: tasks.ai_translate("xx"),
            "'xx'; it must be one of en, de, fr, it, pt, hi, es, th",
        ),
        (lambda: tasks.ai_mask("person"), "labels are 'person'; give an array"),
    ],
)
def test_wrong_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_objects_of_a_schema_are_closed_unless_it_says_else() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    opened = {**inner, "additionalProperties": True}
    schema = {"type": "object", "properties": {"a": inner, "b": {"anyOf": [opened, inner]}}}
    body = tasks.ai_extract(schema).request("x")
    closed = {**inner, "additionalProperties": False}
    assert body["response_format"]["json_schema"]["schema"] == {
        "type": "object",
        "properties": {"a": closed, "b": {"anyOf": [opened, closed]}},
        "additionalProperties": False,
    }


def test_a_summary_without_a_limit_says_none() -> None:
    assert "at most" not in tasks.ai_summarize(0).system
    assert "at most 20 words" in tasks.ai_summarize(20).system
