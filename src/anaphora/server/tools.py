"""Functions that a request offers, checked, and calls of them in answers."""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import describe, unsupported
from anaphora.types import ToolCallDelta

MAX_TOOLS = 128  # OpenAI's bound
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
_CHOICES = (None, "auto", "none", "required")


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Which functions an answer may call."""

    tools: list[dict[str, Any]]
    must_call: bool = False
    is_subset: bool = False  # of those that the prompt shows


def check_tools(tools: Any, tool_choice: Any) -> list[dict[str, Any]]:
    """The functions that the model may call, none for the choice "none".

    Raises ``InvalidRequest`` that names the element.
    """
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools is {describe(tools)}; it must be an array", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} elements; at most {MAX_TOOLS} are allowed", param="tools"
        )
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise InvalidRequest("tools has two functions of one name; keep one", param="tools")
    choose_tools(tools, tool_choice)
    return [] if tool_choice == "none" else tools


def choose_tools(tools: list[dict[str, Any]], tool_choice: Any) -> ToolChoice:
    """What ``tool_choice`` makes of checked ``tools``. Raises ``InvalidRequest``."""
    if tool_choice is None or isinstance(tool_choice, str):
        if tool_choice not in _CHOICES:
            raise _bad_choice()
        if tool_choice == "required" and not tools:
            raise InvalidRequest(
                'tool_choice is "required" but there are no tools; send some', param="tool_choice"
            )
        called = [] if tool_choice == "none" else tools
        return ToolChoice(called, must_call=tool_choice == "required")
    if not isinstance(tool_choice, dict):
        raise _bad_choice()
    match tool_choice.get("type"):
        case "function":
            return ToolChoice([_find(tools, tool_choice)], must_call=True)
        case "allowed_tools":
            # OpenAI nests them; some clients do not.
            allowed = tool_choice.get("allowed_tools", tool_choice)
            if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
                raise InvalidRequest(
                    'tool_choice.allowed_tools.mode must be "auto" or "required"',
                    param="tool_choice",
                )
            wanted = allowed.get("tools")
            if not isinstance(wanted, list) or not wanted:
                raise InvalidRequest(
                    "tool_choice.allowed_tools.tools must be an array of functions",
                    param="tool_choice",
                )
            names = {_find(tools, one)["function"]["name"] for one in wanted}
            chosen = [tool for tool in tools if tool["function"]["name"] in names]
            return ToolChoice(
                chosen, must_call=allowed["mode"] == "required", is_subset=len(chosen) < len(tools)
            )
        case "custom":
            raise unsupported("tool_choice.type", "only functions can be called")
    raise _bad_choice()


def _find(tools: list[dict[str, Any]], choice: Any) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InvalidRequest(
        "tool_choice names a function that is not among tools; name one of them",
        param="tool_choice",
    )


def _bad_choice() -> InvalidRequest:
    return InvalidRequest(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": '
        '...}} or {"type": "allowed_tools", ...}',
        param="tool_choice",
    )


def check_calls(calls: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The calls of an earlier answer. Raises ``InvalidRequest`` that names the element."""
    where = f"{where}.tool_calls"
    if role != "assistant":
        raise InvalidRequest(
            f"{where} is in a message of the role {role!r}; only an assistant calls", param=where
        )
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} is {describe(calls)}; it must be an array", param=where)
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        if not isinstance(call, dict) or call.get("type", "function") != "function":
            raise InvalidRequest(f'{place} must be an object with the type "function"', param=place)
        function = call.get("function")
        for field in ("name", "arguments"):
            value = function.get(field) if isinstance(function, dict) else None
            if not isinstance(value, str):
                raise InvalidRequest(
                    f"{place}.function.{field} is {describe(value)}; it must be a string",
                    param=f"{place}.function.{field}",
                )
    return calls


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} is {describe(tool)}; it must be an object", param=where)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", 'send tools of type "function" only')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(
            f"{where}.function is {describe(function)}; it must be an object",
            param=f"{where}.function",
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 64 letters, digits, underscores and hyphens",
            param=f"{where}.function.name",
        )
    for field, kind, what in (("description", str, "a string"), ("parameters", dict, "an object")):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(
                f"{where}.function.{field} is {describe(value)}; it must be {what}",
                param=f"{where}.function.{field}",
            )


class ToolCalls:
    """The calls of one answer, as they come and as a whole."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, delta: ToolCallDelta) -> dict[str, Any]:
        """The same as an element of ``delta.tool_calls``."""
        if delta.name is None:
            self._calls[delta.index]["function"]["arguments"] += delta.arguments
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._calls.append(call)
        return {"index": delta.index, **call, "function": dict(function)}

    def whole(self) -> list[dict[str, Any]]:
        """``message.tool_calls``."""
        return self._calls
