"""Functions for models whose template knows none, and forced calls of those that write JSON.

The functions stand in the system message, a call is the JSON object that Llama 3.1 writes, and the
calls and results of earlier turns are text:

    {"name": "weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anaphora.constraints import Constraint, compose, json_constraint
from anaphora.errors import InvalidRequest
from anaphora.types import Message

_BEFORE = "You may call one of these functions:\n"
_AFTER = (
    '\nTo call one, answer with nothing but {"name": its name, "parameters": its arguments} as '
    "JSON. If no call is needed, answer in words."
)
_RESULT = "Result of the call:\n"


def adapt_messages(
    messages: Sequence[Message], tools: Iterable[Mapping[str, Any]]
) -> list[Message]:
    """Normalised messages in which ``tools``, calls and results are text.

    The same functions give the same bytes, right after the system prompt.
    """
    adapted: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = [part for part in (message.get("content"), *map(_write_call, calls)) if part]
            adapted.append({"role": "assistant", "content": "\n".join(written)})
        elif message["role"] != "tool":
            adapted.append(message)
        elif adapted and adapted[-1].get("content", "").startswith(_RESULT):  # roles take turns
            last = adapted.pop()
            joined = f"{last['content']}\n\n{_RESULT}{message.get('content') or ''}"
            adapted.append({"role": "user", "content": joined})
        else:
            adapted.append({"role": "user", "content": _RESULT + (message.get("content") or "")})
    if text := _write_tools(tools):
        if adapted and adapted[0]["role"] == "system":
            text = f"{adapted[0].get('content') or ''}\n\n{text}"
            adapted = adapted[1:]
        adapted.insert(0, {"role": "system", "content": text})
    return adapted


def _write_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        json.dumps(tool["function"], ensure_ascii=False, sort_keys=True)
        for tool in tools
        if isinstance(tool.get("function"), Mapping)
    ]
    return _BEFORE + "\n".join(lines) + _AFTER if lines else ""


def _write_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    arguments = function.get("arguments")
    value = {"name": function.get("name"), "parameters": arguments}
    return json.dumps(value, ensure_ascii=False)


def frame(tools: Sequence[Mapping[str, Any]], content: Constraint | None, param: str) -> Constraint:
    """An answer that calls one of ``tools``, or is ``content`` if that may be."""
    parts = {f"call{i}": _call(tool, i) for i, tool in enumerate(tools)}
    if content is not None:
        parts["content"] = content
    return compose("start: " + " | ".join(f"@{name}" for name in parts), parts, param)


def _call(tool: Mapping[str, Any], index: int) -> Constraint:
    # A schema, not a text with the arguments in it: then other JSON may begin like a call.
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": tool["function"]["name"]},
            "parameters": _move_references(parameters(tool, index)),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return json_constraint(schema, "tools")


def parameters(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The schema of a function's arguments, an object. Raises ``InvalidRequest`` for another."""
    where = f"tools[{index}].function.parameters"
    schema = tool["function"].get("parameters")
    if schema is None:  # OpenAI: a function without parameters
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest(f'{where} must be a schema of the type "object"', param=where)
    return {**schema, "type": "object"}


def _move_references(schema: Any) -> Any:
    """The schema as a part of that of the call, with its references to itself."""
    if isinstance(schema, list):
        return [_move_references(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {
        key: value if key in ("const", "enum") else _move_references(value)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = "#/properties/parameters" + reference[1:]
    return moved
