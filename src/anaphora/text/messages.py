"""OpenAI's chat messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.types import Message


def normalize_message(message: Message, index: int, *, keep_arguments: bool = False) -> Message:
    """A copy as templates expect it: content one string or None, tool arguments an object.

    With ``keep_arguments`` they stay the text that OpenAI's clients send. Raises
    ``InvalidRequest`` naming the message and the field.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] is not an object", param=f"messages[{index}]")
    result = dict(message)
    if not isinstance(result.get("role"), str):
        raise InvalidRequest(
            f"messages[{index}].role is {result.get('role')!r}; it must be a string",
            param=f"messages[{index}].role",
        )
    if "content" in result:
        result["content"] = _content_text(result["content"], f"messages[{index}].content")
    calls = result.get("tool_calls")
    if calls is None:
        result.pop("tool_calls", None)  # templates test whether the field is there
    elif isinstance(calls, list) and not keep_arguments:
        result["tool_calls"] = [
            _parse_arguments(call, f"messages[{index}].tool_calls[{number}]")
            for number, call in enumerate(calls)
        ]
    return result


def _content_text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} is {type(content).__name__}; it must be a string, null or a list of parts",
            param=where,
        )
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, str):
            texts.append(part)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InvalidRequest(
                f"{where}[{number}] has type {kind!r}; only text parts with a string in 'text' "
                "are supported",
                param=f"{where}[{number}]",
            )
    return "\n".join(texts)


def _parse_arguments(call: Any, where: str) -> Any:
    """OpenAI sends a tool call's arguments as JSON in a string; templates print an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments is not a JSON object: {text[:100]!r}",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}
