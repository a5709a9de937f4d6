"""Bodies of OpenAI's Responses API, and the chats that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation
from pydantic_core import PydanticCustomError

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
    as_parts,
)
from anaphora.server.tools import MAX_TOOLS
from anaphora.server.translate import function, given, naming, only, validate

_INT32 = 2**31 - 1
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's bounds
# What a ChatRequest's errors call something else.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _as_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("union", "must be a string or an array of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Part(Body):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: SkipValidation[Any] = None
    logprobs: SkipValidation[Any] = None

    def as_chat_part(self, where: str) -> dict[str, Any]:
        """The same in a chat. Raises ``InvalidRequest`` for images and files."""
        if self.type not in (*_TEXTS, "refusal"):
            raise unsupported(f"{where}.type", "send parts of text only")
        text = self.refusal if self.type == "refusal" else self.text
        if text is None:
            raise InvalidRequest(f"{where} has no text; add it", param=where)
        return {"type": "text", "text": text}


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)]


class Item(Body):
    """One item of ``input``; which fields it needs follows from its type."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: SkipValidation[Any] = None
    encrypted_content: SkipValidation[Any] = None

    def as_message(self, where: str) -> dict[str, Any] | None:
        """The message of a chat, None for reasoning, which is not put into prompts again.

        Raises ``InvalidRequest`` for other types than these four.
        """
        match self.type:
            case "message":
                role = _required(self.role, f"{where}.role")
                return {"role": role, "content": _parts(self.content, f"{where}.content")}
            case "function_call":
                called = {
                    "name": _required(self.name, f"{where}.name"),
                    "arguments": _required(self.arguments, f"{where}.arguments"),
                }
                call_id = _required(self.call_id, f"{where}.call_id")
                call = {"id": call_id, "type": "function", "function": called}
                return {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                call_id = _required(self.call_id, f"{where}.call_id")
                content = _parts(self.output, f"{where}.output")
                return {"role": "tool", "tool_call_id": call_id, "content": content}
            case "reasoning":
                return None
        raise unsupported(
            f"{where}.type", "send message, function_call, function_call_output or reasoning"
        )


class TextOptions(Body):
    """``text``."""

    format: SkipValidation[Any] = None
    verbosity: SkipValidation[Any] = None  # the models served have one


class ReasoningOptions(Body):
    """``reasoning``."""

    effort: str | None = None
    summary: SkipValidation[Any] = None  # reasoning is delivered as it is
    generate_summary: SkipValidation[Any] = None


class InputTokensRequest(Body):
    """The body of ``POST /v1/responses/input_tokens``."""

    model: str
    input: Annotated[list[Item], Field(max_length=MAX_MESSAGES), BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: SkipValidation[Any] = None
    tool_choice: SkipValidation[Any] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: SkipValidation[Any] = None
    conversation: SkipValidation[Any] = None
    parallel_tool_calls: SkipValidation[Any] = None  # as in chats

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of the chat that choose tokens: none, where tokens are only counted."""
        return {}

    def check(self) -> None:
        """Raises ``InvalidRequest`` for a field that would change the meaning and is not built."""
        only("truncation", self.truncation, "disabled")
        only("conversation", self.conversation)


class ResponsesRequest(InputTokensRequest):
    """The body of ``POST /v1/responses``."""

    max_output_tokens: int | None = Field(None, ge=1, le=_INT32)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: SkipValidation[Any] = None  # obfuscation alone
    store: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=_MAX_METADATA)
    service_tier: ServiceTier | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_CACHE_KEY_CHARS)
    prompt_cache_options: SkipValidation[Any] = None
    background: SkipValidation[Any] = None
    prompt: SkipValidation[Any] = None
    context_management: SkipValidation[Any] = None
    include: SkipValidation[Any] = None
    top_logprobs: SkipValidation[Any] = None
    max_tool_calls: SkipValidation[Any] = None  # of built-in tools: there are none

    def check(self) -> None:
        """As for counting."""
        super().check()
        only("background", self.background, False)
        only("prompt", self.prompt)
        only("context_management", self.context_management, [])
        only("include", self.include, [], ["reasoning.encrypted_content"])
        only("top_logprobs", self.top_logprobs, 0)
        for key, value in (self.metadata or {}).items():
            if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
                raise InvalidRequest(
                    f"metadata has a key of over {_MAX_KEY_CHARS} characters or a value of over "
                    f"{_MAX_VALUE_CHARS}; shorten it",
                    param="metadata",
                )

    def sampling_fields(self) -> dict[str, Any]:
        """Those of a chat."""
        return given(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            service_tier=self.service_tier,
            cache_salt=self.cache_salt,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_options=self.prompt_cache_options,
        )


def own_messages(body: InputTokensRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of ``input``, and where each was. Raises ``InvalidRequest``."""
    places = [f"input[{index}]" for index in range(len(body.input))]
    found = [
        (item.as_message(place), place) for item, place in zip(body.input, places, strict=True)
    ]
    kept = [(message, place) for message, place in found if message is not None]
    return [message for message, _ in kept], [place for _, place in kept]


def to_chat(
    body: InputTokensRequest,
    history: Sequence[dict[str, Any]],
    messages: Sequence[dict[str, Any]],
    places: Sequence[str],
) -> tuple[ChatRequest, list[str]]:
    """The chat that ``body`` asks for after ``history``, and where its messages came from."""
    body.check()
    head: list[dict[str, Any]] = []
    if body.instructions is not None:
        head.append({"role": "system", "content": body.instructions})
    fields = given(
        model=body.model,
        messages=[*head, *history, *messages],
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=body.reasoning and body.reasoning.effort,
        response_format=_response_format(body.text),
    )
    of_head = ["instructions"] * len(head) + ["previous_response_id"] * len(history)
    all_places = [*of_head, *places]
    with naming(NAMES, all_places):
        return validate(ChatRequest, fields | body.sampling_fields()), all_places


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools is {describe(tools)}; it must be an array", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(tools)} elements; at most {MAX_TOOLS} are allowed", param="tools"
        )
    result = []
    for index, tool in enumerate(tools):
        result.append(function(tool, f"tools[{index}]", "parameters"))
        if tool.get("type") != "function":
            raise unsupported(f"tools[{index}].type", 'send tools of type "function" only')
    return result


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):  # "allowed_tools"
        tools = [_tool_choice(tool) for tool in choice["tools"]]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": choice.get("type"), "allowed_tools": allowed}
    return choice


def _response_format(text: TextOptions | None) -> Any:
    if text is None or text.format is None:
        return None
    wanted = text.format
    if not isinstance(wanted, dict):
        where = "text.format"
        raise InvalidRequest(f"{where} is {describe(wanted)}; it must be an object", param=where)
    if wanted.get("type") != "json_schema":
        return wanted
    names = ("name", "description", "schema", "strict")
    schema = {name: wanted[name] for name in names if wanted.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _parts(parts: list[Part] | None, where: str) -> list[dict[str, Any]]:
    if parts is None:
        raise InvalidRequest(f"{where} is missing; send a string or parts of text", param=where)
    return [part.as_chat_part(f"{where}[{index}]") for index, part in enumerate(parts)]


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is missing; add it", param=where)
    return value
