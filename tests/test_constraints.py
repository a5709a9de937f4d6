"""Constraints as data, and the child process that tries them."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from anaphora import constraint_check
from anaphora.constraints import Constraint, json_constraint, shorten
from anaphora.errors import InvalidRequest
from anaphora.types import SamplingParams

CANARY = "canary7531"


def refuse(kind, text) -> str:
    with pytest.raises(InvalidRequest) as error:
        constraint_check.check_now(Constraint(kind, text, "guided_x"))
    assert error.value.param == "guided_x"
    assert len(str(error.value)) < 300
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("nothing", "x", "must be one of"),
        ("regex", "a" * (2**18 + 1), "at most 262144"),
        ("grammar", "a" * (2**16 + 1), "at most 65536"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000, "not valid JSON"),
        ("json_schema", "5", "must be a JSON schema"),
        ("choice", "{}", "array of strings"),
        ("choice", "[1]", "array of strings"),
        ("choice", "[]", "1 to 4096"),
        ("choice", json.dumps(["x"] * 5000), "1 to 4096"),
    ],
)
def test_what_is_no_constraint_is_refused_at_once(kind, text, message) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        Constraint(kind, text, "guided_x")
    assert error.value.param == "guided_x"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "matches no text"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text"),  # noqa: E501
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"type": "string", "format": "nonsense"}, "Unknown format"),
        ({"$ref": "http://example.com/x"}, "not present"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "multipleOf": 9999991}, "too complex"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(10)]}, "too large"),  # noqa: E501
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_followed(schema, message) -> None:
    start = time.monotonic()
    text = refuse("json_schema", json.dumps(schema))
    assert re.search(message, text), text
    assert time.monotonic() - start < 10


def test_a_chain_that_overflows_the_stack_kills_the_child_alone() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(7000)}
    schema = {"$defs": {**chain, "a7000": {"type": "null"}}, "$ref": "#/$defs/a0"}
    text = json.dumps(schema, separators=(",", ":"))
    assert "too complex" in refuse("json_schema", text)
    constraint_check.check_now(json_constraint({"type": "object"}, "x"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", f"({CANARY}", "unclosed group"),
        ("regex", f"{CANARY}(?=b)", "look-around"),
        ("regex", "(" * 5000 + CANARY + ")" * 5000, "nested"),
        ("regex", "(a*)*" * 20_000, "too complex|limits"),
        ("grammar", f"start: {CANARY}", ""),
        ("grammar", "start: a\na: b\nb: a", "matches no text"),
        ("grammar", 'start: "a" ' * 5000, ""),
        ("grammar", f"root ::= {CANARY} ::=", ""),
        ("grammar", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"', "too big"),  # noqa: E501
    ],
)  # fmt: skip
def test_expressions_and_grammars_that_cannot_be_followed(kind, text, message) -> None:
    complaint = refuse(kind, text)
    assert any(part in complaint for part in message.split("|"))
    if kind == "regex":
        assert CANARY not in complaint


def test_what_is_costly_but_bounded_is_taken() -> None:
    recursive = {"$defs": {"n": {"type": "object", "properties": {"c": {"items": {"$ref": "#/$defs/n"}}}}}, "$ref": "#/$defs/n"}  # noqa: E501  # fmt: skip
    doubled = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}
    for schema in (
        recursive,
        {"$defs": {**doubled, "a30": {"type": "null"}}, "$ref": "#/$defs/a0"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000},
        {"enum": [f"value {i}" for i in range(3000)]},
        {"type": "string", "title": "x", "x-unknown": 5},
        True,
    ):
        constraint_check.check_now(json_constraint(schema, "x"))
    constraint_check.check_now(Constraint("regex", "((a{1000}){1000}){1000}"))
    constraint_check.check_now(Constraint("choice", json.dumps(["", "a", 'quo"te', "\n"])))


def test_the_loop_goes_on_meanwhile() -> None:
    async def main() -> tuple[float, int]:
        costly = json_constraint({"type": "integer", "multipleOf": 9999973}, "x")
        task = asyncio.create_task(constraint_check.check(costly))
        longest, last, num_turns = 0.0, time.monotonic(), 0
        while not task.done():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last, num_turns = max(longest, now - last), now, num_turns + 1
        for verdict in (task, constraint_check.check(costly)):  # it is remembered
            start = time.monotonic()
            with pytest.raises(InvalidRequest):
                await verdict
            assert time.monotonic() - start < 0.1
        return longest, num_turns

    longest, num_turns = asyncio.run(main())
    assert longest < 0.5
    assert num_turns > 20


def test_params_take_a_constraint_and_nothing_else() -> None:
    params = SamplingParams(constraint=Constraint("regex", "a+"))
    assert params.constraint is not None
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(constraint="a+")  # type: ignore[arg-type]
    assert error.value.param == "constraint"


def test_complaints_quote_little() -> None:
    assert shorten("panic: something\n<backtrace>") == "it is too complex"
    assert CANARY not in shorten(f'1(3): wrong (at "{CANARY}" ({CANARY}))\n  1 | {CANARY}')
    assert len(shorten("x" * 10_000)) == 200
