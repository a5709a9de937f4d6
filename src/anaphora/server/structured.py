"""What a request wants its answer to match: OpenAI's ``response_format`` and vLLM's fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from anaphora.constraints import Constraint, json_constraint
from anaphora.errors import InvalidRequest
from anaphora.server.envelope import describe, unsupported

_ANY_OBJECT = {"type": "object"}
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
_OPTIONS_WITHOUT_EFFECT = ("disable_fallback",)  # there is no other backend to fall back to


def read_constraint(fields: Mapping[str, Any]) -> Constraint | None:
    """That of a body's fields, of which one at most may ask for any.

    Raises ``InvalidRequest`` that names the field, or both.
    """
    found = [
        *_of_response_format(fields.get("response_format")),
        *_of_structured_outputs(fields.get("structured_outputs")),
    ]
    for kind in ("json", "regex", "choice", "grammar"):
        name = f"guided_{kind}"
        if (value := fields.get(name)) is not None:
            found.append(_of(kind, value, name))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(
            f"{first} and {second} both say what the answer has to match; send one of them",
            param=second,
        )
    return found[0] if found else None


def _of_response_format(value: Any) -> list[Constraint]:
    field = "response_format"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is {describe(value)}; it must be an object", param=field)
    match value.get("type"):
        case "text":
            return []
        case "json_object":
            return [json_constraint(_ANY_OBJECT, field)]
        case "json_schema":
            return [_of_json_schema(value.get("json_schema"))]
    raise InvalidRequest(
        f'{field}.type must be "text", "json_object" or "json_schema"', param=f"{field}.type"
    )


def _of_json_schema(value: Any) -> Constraint:
    field = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is {describe(value)}; it must be an object", param=field)
    name = value.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{field}.name must be 1 to 64 letters, digits, underscores and hyphens",
            param=f"{field}.name",
        )
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidRequest(
            f"{field}.strict is {describe(value['strict'])}; it must be true or false",
            param=f"{field}.strict",
        )
    schema = value.get("schema")
    if not isinstance(schema, dict | bool | None):
        raise InvalidRequest(
            f"{field}.schema is {describe(schema)}; it must be a JSON schema",
            param=f"{field}.schema",
        )
    return json_constraint(_ANY_OBJECT if schema is None else schema, field)


def _of_structured_outputs(value: Any) -> list[Constraint]:
    field = "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is {describe(value)}; it must be an object", param=field)
    found: list[Constraint] = []
    for kind, given in value.items():
        where = f"{field}.{kind}"
        if given is None or given is False or kind in _OPTIONS_WITHOUT_EFFECT:
            continue
        if kind == "json_object" and given is True:
            found.append(json_constraint(_ANY_OBJECT, where))
        elif kind in ("json", "regex", "choice", "grammar"):
            found.append(_of(kind, given, where))
        else:
            raise unsupported(where[:64], "send json, regex, choice, grammar or json_object")
    return found


def _of(kind: str, value: Any, field: str) -> Constraint:
    match kind, value:
        case "json", str():
            return Constraint("json_schema", value, field)
        case "json", dict() | bool():
            return json_constraint(value, field)
        case "choice", list():
            return Constraint("choice", json.dumps(value, ensure_ascii=False), field)
        case "regex", str():
            return Constraint("regex", value, field)
        case "grammar", str():
            return Constraint("grammar", value, field)
    what = {"json": "a JSON schema", "choice": "an array of strings"}.get(kind, "a string")
    raise InvalidRequest(f"{field} is {describe(value)}; it must be {what}", param=field)
