"""Anthropic's bodies, and the chats that they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, SkipValidation

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import describe, unsupported
from anaphora.server.fields import ServiceTier
from anaphora.server.schemas import (
    MAX_CACHE_KEY_CHARS,
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_PARTS,
    Body,
    ChatRequest,
    as_list,
    as_parts,
)
from anaphora.server.tools import MAX_TOOLS
from anaphora.server.translate import function, given, naming, only, validate

MAX_MARKS = 4  # Anthropic's bound
MARK_SECONDS = {"5m": 300, "1h": 3600}
_INT32 = 2**31 - 1
# What a ChatRequest's errors call something else.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
# A turn that differs from any real one, so that what comes before it can be told.
_OTHER_TURN = {"role": "user", "content": "."}


class CacheControl(Body):
    """A mark: keep the prefix that ends here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """A block of text, and what is common to all blocks."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None

    def part(self, where: str) -> dict[str, Any]:
        """A part of a chat's message. Raises ``InvalidRequest`` for other blocks than text."""
        if self.type != "text":
            raise unsupported(f"{where}.type", 'send blocks of type "text" here')
        return {"type": "text", "text": _required(self.text, f"{where}.text")}


class Block(TextBlock):
    """One block of content; which fields it needs follows from its type."""

    id: str | None = None
    name: str | None = None
    input: SkipValidation[Any] = None
    tool_use_id: str | None = None
    content: (
        Annotated[list[TextBlock], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)] | None
    ) = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class AnthropicMessage(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: Annotated[list[Block], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)]


class ToolChoice(Body):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None  # models that call make one call in an answer


class Thinking(Body):
    """``thinking``: a model that thinks always does; what it thought can be left out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Body):
    """``output_config``."""

    effort: str | None = None
    format: SkipValidation[Any] = None


class CountTokensRequest(Body):
    """The body of ``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: (
        Annotated[list[TextBlock], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)] | None
    ) = None
    tools: SkipValidation[Any] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=0, le=_INT32)
    stream: bool | None = None
    stop_sequences: Annotated[list[str], BeforeValidator(as_list)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=_INT32)
    metadata: SkipValidation[Any] = None
    service_tier: ServiceTier | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_CACHE_KEY_CHARS)
    container: SkipValidation[Any] = None
    mcp_servers: SkipValidation[Any] = None
    context_management: SkipValidation[Any] = None
    inference_geo: SkipValidation[Any] = None
    speed: SkipValidation[Any] = None
    diagnostics: SkipValidation[Any] = None


@dataclasses.dataclass(frozen=True)
class Mark:
    """A prefix that a client wants kept: the beginning of a chat that ends with a marked block."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    seconds: int


@dataclasses.dataclass(frozen=True)
class Translation:
    """A chat, where its messages were in Anthropic's body, and the marks in it."""

    chat: ChatRequest
    places: list[str]
    marks: list[Mark]


def to_chat(body: CountTokensRequest) -> Translation:
    """The chat that ``body`` asks for. Raises ``InvalidRequest`` in its terms."""
    return _Translator(body).translate()


class _Translator:
    def __init__(self, body: CountTokensRequest) -> None:
        self._body = body
        self._messages: list[dict[str, Any]] = []
        self._places: list[str] = []
        self._tools: list[dict[str, Any]] = []
        self._marks: list[Mark] = []

    def translate(self) -> Translation:
        body = self._body
        self._add_tools()
        self._add_system()
        for index, message in enumerate(body.messages):
            if message.role == "user":
                self._add_user(message, f"messages[{index}]")
            else:
                self._add_assistant(message, f"messages[{index}]")
        self._mark(body.cache_control)
        self._check_marks()
        fields = given(
            model=body.model,
            messages=self._messages,
            tools=self._tools or None,
            tool_choice=_tool_choice(body.tool_choice),
            reasoning_effort=body.output_config and body.output_config.effort,
            response_format=_response_format(body.output_config),
        )
        last = self._messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            fields["continue_final_message"] = True  # Anthropic's way to begin an answer
        if isinstance(body, MessagesRequest):
            fields |= _sampling(body)
        with naming(NAMES, self._places):
            chat = validate(ChatRequest, fields)
        return Translation(chat, self._places, self._marks)

    def _add_tools(self) -> None:
        tools = self._body.tools
        if tools is None:
            return
        if not isinstance(tools, list):
            raise InvalidRequest(f"tools is {describe(tools)}; it must be an array", param="tools")
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest(
                f"tools has {len(tools)} elements; at most {MAX_TOOLS} are allowed", param="tools"
            )
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            self._tools.append(function(tool, where, "input_schema"))
            only(f"{where}.type", tool.get("type"), "custom")
            if tool.get("cache_control") is not None:
                place = f"{where}.cache_control"
                with naming({"type": f"{place}.type", "ttl": f"{place}.ttl"}):
                    control = validate(CacheControl, _object(tool["cache_control"], place))
                self._mark(control, [_OTHER_TURN])

    def _add_system(self) -> None:
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(self._body.system or []):
            parts.append(block.part(f"system[{index}]"))
            message = {"role": "system", "content": list(parts)}
            self._mark(block.cache_control, [message, _OTHER_TURN])
        if parts:
            self._add({"role": "system", "content": parts}, "system")

    def _add_user(self, message: AnthropicMessage, where: str) -> None:
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content[{index}]"
            if block.type == "tool_result":
                if parts:
                    self._add({"role": "user", "content": parts}, where)
                    parts = []
                content = [
                    inner.part(f"{place}.content[{i}]")
                    for i, inner in enumerate(block.content or [])
                ]
                call_id = _required(block.tool_use_id, f"{place}.tool_use_id")
                self._add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
            else:
                parts.append(block.part(place))
            more = [{"role": "user", "content": list(parts)}] if parts else []
            self._mark(block.cache_control, [*self._messages, *more])
        if parts or not message.content:
            self._add({"role": "user", "content": parts}, where)

    def _add_assistant(self, message: AnthropicMessage, where: str) -> None:
        result: dict[str, Any] = {"role": "assistant"}
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content[{index}]"
            if block.type == "thinking":
                thought = result.get("reasoning_content", "") + (block.thinking or "")
                result["reasoning_content"] = thought
            elif block.type == "tool_use":
                result.setdefault("tool_calls", []).append(_call(block, place))
            elif block.type != "redacted_thinking":
                parts.append(block.part(place))
            so_far = {**result, "content": list(parts)}
            if "tool_calls" in so_far:
                so_far["tool_calls"] = list(so_far["tool_calls"])
            self._mark(block.cache_control, [*self._messages, so_far])
        result["content"] = parts or None if "tool_calls" in result else parts
        self._add(result, where)

    def _add(self, message: dict[str, Any], place: str) -> None:
        self._messages.append(message)
        self._places.append(place)

    def _mark(
        self, control: CacheControl | None, messages: list[dict[str, Any]] | None = None
    ) -> None:
        if control is not None:
            seconds = MARK_SECONDS[control.ttl or "5m"]
            kept = self._messages if messages is None else messages
            self._marks.append(Mark(list(kept), list(self._tools), seconds))

    def _check_marks(self) -> None:
        if len(self._marks) > MAX_MARKS:
            raise InvalidRequest(
                f"cache_control is given {len(self._marks)} times; at most {MAX_MARKS} are allowed",
                param="cache_control",
            )
        seconds = [mark.seconds for mark in self._marks]
        if seconds != sorted(seconds, reverse=True):
            raise InvalidRequest(
                'cache_control has the ttl "1h" after "5m" in the order tools, system, messages; '
                "put longer ones first",
                param="cache_control",
            )


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    for field, neutral in (
        ("container", ()),
        ("mcp_servers", ([],)),
        ("context_management", ({}, {"edits": []})),
        ("inference_geo", ("global", "not_available")),
        ("speed", ("standard",)),
        ("diagnostics", ()),
    ):
        only(field, getattr(body, field), *neutral)
    return given(
        stream=body.stream,
        max_tokens=body.max_tokens or 1,  # one is computed and not delivered
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        service_tier=body.service_tier,
        cache_salt=body.cache_salt,
        prompt_cache_key=body.prompt_cache_key,
    )


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    name = _required(choice.name, "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _response_format(config: OutputConfig | None) -> Any:
    if config is None or config.format is None:
        return None
    wanted = _object(config.format, "output_config.format")
    if wanted.get("type") != "json_schema":
        raise unsupported("output_config.format.type", 'send "json_schema"')
    schema = {"name": "output", "schema": wanted.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _call(block: Block, where: str) -> dict[str, Any]:
    called = {
        "name": _required(block.name, f"{where}.name"),
        "arguments": msgspec.json.encode(_object(block.input, f"{where}.input")).decode(),
    }
    call_id = _required(block.id, f"{where}.id")
    return {"id": call_id, "type": "function", "function": called}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is {describe(value)}; it must be an object", param=where)
    return value


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is missing; add it", param=where)
    return value
