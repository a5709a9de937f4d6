"""Types from JSON schemas and DDL: what is read, what is refused, what fits."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from anaphora.errors import InvalidArgument
from anaphora.functions.shapes import Shape, parse_ddl, shape_of, with_error

NULLABLE = {"type": ["string", "null"]}
REVIEW = {
    "type": "object",
    "properties": {
        "stars": {"type": "integer"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "more": {},
    },
    "required": ["stars"],
    "$defs": {"tag": {"enum": ["new", "old"]}},
}


def test_a_schema_has_the_types_of_its_values() -> None:
    shape = shape_of(REVIEW, "schema")
    assert shape.arrow() == pa.struct(
        [
            ("stars", pa.int64()),
            ("tags", pa.list_(pa.string())),
            ("price", pa.float64()),
            ("more", pa.string()),
        ]
    )
    assert shape.duckdb() == {
        "stars": "BIGINT",
        "tags": ["VARCHAR"],
        "price": "DOUBLE",
        "more": "VARCHAR",
    }
    assert with_error(Shape("float")).duckdb() == {"result": "FLOAT", "errorMessage": "VARCHAR"}


def test_values_are_put_into_the_order_of_the_type() -> None:
    value = {"more": {"a": [1]}, "price": 3, "stars": 4, "unknown": 1}
    fitted = shape_of(REVIEW, "schema").fit(value)
    assert fitted == {"stars": 4, "tags": None, "price": 3.0, "more": '{"a": [1]}'}
    assert list(fitted) == ["stars", "tags", "price", "more"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the answer is an array; object was asked for"),
        ({}, "the answer has no field 'stars'"),
        ({"stars": "4"}, r"the answer.stars is text; integer was asked for"),
        ({"stars": True}, r"the answer.stars is a boolean; integer"),
        ({"stars": None}, r"the answer.stars is null; integer"),
        ({"stars": 2**63}, "no room in 64 bits"),
        ({"stars": 1, "tags": ["new", "red"]}, r"the answer.tags\[1\] is 'red', none of"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(REVIEW, "schema").fit(value)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (True, "json"),
        ({"type": ["string", "integer"]}, "json"),
        ({"type": "object"}, "json"),
        ({"type": "array"}, "json"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "json"),
        ({"const": "a"}, "string"),
        ({"$ref": "#"}, "json"),
    ],
)
def test_what_a_schema_leaves_open_is_json_text(schema: Any, kind: str) -> None:
    assert shape_of(schema, "schema").kind == kind


def deep(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(levels - 1)} if levels else {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "has the type 'strin', which"),
        ({"properties": {"a": 3}, "type": "object"}, "has a number where a JSON schema"),
        (deep(12), "has more than 12 levels"),
        ({"enum": [str(i) for i in range(501)]}, "an enum of 501 values; 500 at most"),
        (
            {"type": "object", "properties": {f"f{i}": NULLABLE for i in range(257)}},
            "has more than 256 fields",
        ),
        ({"type": "object", "properties": {"A": NULLABLE, "a": NULLABLE}}, "'A' and 'a'"),
        ({"$ref": "#/$defs/a"}, "refers to '#/\\$defs/a', which it does not have"),
    ],
)
def test_a_schema_that_is_no_table_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^the schema.*{message}"):
        shape_of(schema, "the schema")


def test_ddl_is_read() -> None:
    schema = parse_ddl("STRUCT<a: INT, `b c`: array<double>, d STRUCT<e: BOOLEAN>>", "type")
    assert shape_of(schema, "type").duckdb() == {
        "a": "BIGINT",
        "b c": ["DOUBLE"],
        "d": {"e": "BOOLEAN"},
    }
    assert schema["required"] == ["a", "b c", "d"]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("DECIMAL", "has 'DECIMAL' where a type has to be; use STRING, BIGINT"),
        ("STRUCT<a: INT", "ends too early"),
        ("STRUCT<a: INT; b: INT>", "has ';' where ',' or '>'"),
        ("ARRAY INT", "has 'INT' where '<'"),
        ("INT INT", "goes on after its end with 'INT'"),
        ("", "ends too early"),
    ],
)
def test_ddl_that_cannot_be_read_is_named(ddl: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_ddl(ddl, "returnType")
