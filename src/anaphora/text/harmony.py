"""Harmony, the format of GPT-OSS: an answer is a sequence of messages, each in a channel.

    <|channel|>analysis<|message|>They ask for ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json
    <|message|>{"city": "Paris"}<|call|>

``analysis`` is reasoning, a message to a function is a call, all else is for the user. The marks
are control tokens, so that text which spells one stays text. ``<|return|>`` and ``<|call|>`` end a
turn. The prompt ends with ``<|start|>assistant``, in the middle of a header.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from anaphora.constraints import Constraint, compose, json_constraint
from anaphora.errors import InvalidRequest
from anaphora.text.detokenizer import Detokenizer
from anaphora.text.json_tools import parameters
from anaphora.text.output import Output
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import Message, OutputPart, SamplingParams, ToolCallDelta

MARKS = ("start", "channel", "constrain", "message", "end", "return", "call")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field
_NO_TOOLS = ("all", "assistant", "user")  # recipients that are nobody's function
_MAX_HEADER_TOKENS = 64  # more without a mark is no header


@dataclasses.dataclass
class _Message:
    part: OutputPart
    detokenizer: Detokenizer
    call_index: int = 0
    is_empty: bool = True


class HarmonyReader:
    """Takes an answer apart, token by token. Stop strings are looked for in content alone."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._marks = {tokenizer.token_id(f"<|{name}|>"): name for name in MARKS}
        self._message: _Message | None = None  # None: in a header
        self._header: dict[str, list[int]] = {"role": []}  # the text after each mark
        self._section = "role"
        self._is_marked = False  # whether the header began with <|start|>
        self._num_tokens = 0
        self._num_calls = 0
        self._written: set[OutputPart] = set()

    def add(self, token_id: int) -> Output:
        """What this token adds; nothing after a stop string."""
        if self.stop_reason is not None:
            return Output(part="format")
        self._num_tokens += 1
        mark = self._marks.get(token_id)
        if mark is None:
            return self._add_text(token_id)
        if mark == "message":
            return self._begin()
        if self._message is None and mark in ("channel", "constrain"):
            self._section = mark
            self._header[mark] = []
            return Output(part="format")
        output = self._close(is_whole=True)
        self._section = mark if mark in ("channel", "constrain") else "role"
        self._header = {self._section: []}
        self._is_marked = mark == "start"
        return output

    def flush(self) -> Output:
        """What was held back, at the end of the output."""
        if self.stop_reason is not None:
            return Output(part="format")
        return self._close(is_whole=False)

    def _add_text(self, token_id: int) -> Output:
        if self._message is not None:
            return self._write(self._message.detokenizer.add((token_id,)))
        self._header[self._section].append(token_id)
        too_long = sum(map(len, self._header.values())) > _MAX_HEADER_TOKENS
        if too_long and self._is_stray():
            return self._take_stray()
        return Output(part="format")

    def _is_stray(self) -> bool:
        """Whether what should be a header is an answer without one."""
        text = self._text_of("role").strip()
        return not self._is_marked and self._section == "role" and _RECIPIENT.search(text) is None

    def _take_stray(self) -> Output:
        token_ids = self._header["role"]
        self._message = self._new_message("content")
        return self._write(self._message.detokenizer.add(token_ids))

    def _begin(self) -> Output:
        """A message begins, as its header says; a second mark inside one says nothing."""
        if self._message is not None:
            return Output(part="format")
        channel = self._text_of("channel").split()
        found = _RECIPIENT.search(self._text_of("role")) or _RECIPIENT.search(
            self._text_of("channel")
        )
        name = found[1].removeprefix("functions.") if found else ""
        if name and name not in _NO_TOOLS:
            self._message = self._new_message("tool_call")
            self._message.call_index = self._num_calls
            self._num_calls += 1
            call = ToolCallDelta(index=self._message.call_index, name=name)
            return Output(tool_calls=(call,), part="format")
        self._message = self._new_message("reasoning" if channel[:1] == ["analysis"] else "content")
        return Output(part="format")

    def _close(self, *, is_whole: bool) -> Output:
        """The end of a message, or of a header that never became one."""
        text = ""
        if self._message is None and self._is_stray():
            text = self._take_stray().text
        if self._message is None or self.stop_reason is not None:
            return Output(text, part="format")
        output = self._write(self._message.detokenizer.flush())
        output = dataclasses.replace(output, text=text + output.text)
        message, self._message = self._message, None
        if message.part == "tool_call" and message.is_empty and is_whole:
            call = ToolCallDelta(index=message.call_index, arguments="{}")
            output = Output(tool_calls=(call,))
        return dataclasses.replace(output, part="format")

    def _write(self, text: str) -> Output:
        message = self._message
        assert message is not None
        if message.part == "content":
            self.stop_reason = message.detokenizer.stop_reason
        if not text:
            return Output(part=message.part)
        if message.part == "tool_call":
            message.is_empty = False
            call = ToolCallDelta(index=message.call_index, arguments=text)
            return Output(tool_calls=(call,), part="tool_call")
        if message.is_empty and message.part in self._written:
            text = "\n\n" + text
        message.is_empty = False
        self._written.add(message.part)
        if message.part == "reasoning":
            return Output(reasoning=text, part="reasoning")
        return Output(text)

    def _new_message(self, part: Literal["content", "reasoning", "tool_call"]) -> _Message:
        params = self._params
        return _Message(
            part,
            Detokenizer(
                self._tokenizer,
                stop=params.stop if part == "content" else (),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=max(0, params.min_tokens - self._num_tokens),
            ),
        )

    def _text_of(self, section: str) -> str:
        return self._tokenizer.decode(self._header.get(section, ()))


def adapt_message(message: Message, index: int) -> Message:
    """A normalised message as the format's templates read it.

    They take the reasoning before a call as ``thinking`` and leave it out once a final answer
    follows; the reasoning of a final answer is never in a later prompt. Raises ``InvalidRequest``
    for several calls in one message, of which they would render the first.
    """
    if message["role"] != "assistant":
        return message
    given = [name for name in _REASONING if message.get(name)]
    for name in given:
        if not isinstance(message[name], str):
            where = f"messages[{index}].{name}"
            raise InvalidRequest(f"{where} must be a string", param=where)
    thinking = message[given[0]] if given else ""
    result = {name: value for name, value in message.items() if name not in _REASONING}
    content = result.get("content") or ""
    calls = result.get("tool_calls")
    if calls and len(calls) > 1:
        where = f"messages[{index}].tool_calls"
        raise InvalidRequest(
            f"{where} has {len(calls)} calls; this model makes one in a message, so send each in "
            "a message of its own, followed by its result",
            param=where,
        )
    if not calls:
        return {**result, "content": content}
    # They refuse a message with both, and would show content before a call as reasoning.
    parts = [part for part in (thinking, content) if part]
    return {**result, "content": "", **({"thinking": "\n\n".join(parts)} if parts else {})}


def adapt_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the description that the format's templates cannot do without."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def frame(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    content: Constraint | None,
    param: str,
) -> Constraint:
    """A turn that reasons freely, then calls one of ``tools``, or answers as ``content`` says.

    Without ``content`` it has to call.
    """
    mark = {name: f"<[{tokenizer.token_id(f'<|{name}|>')}]>" for name in MARKS}
    json_type = f'" "? ({mark["constrain"]} "json" | "json")? {mark["message"]}'
    rules: list[str] = []
    parts: dict[str, Constraint] = {}
    for index, tool in enumerate(tools):
        to = json.dumps(f"to=functions.{tool['function']['name']}", ensure_ascii=False)[1:-1]
        rules.append(
            f'call{index}: ({mark["channel"]} "commentary {to}" | '
            f'" {to}" {mark["channel"]} "commentary") {json_type} @arguments{index}'
        )
        parts[f"arguments{index}"] = json_constraint(parameters(tool, index), param)
    ends = [f"call{i}" for i in range(len(tools))]
    if content is not None:
        ends.append("final")
        rules.append(f'final: {mark["channel"]} "final" {json_type} @content')
        parts["content"] = content
    lark = [
        f"start: analysis* ({' | '.join(ends)})",
        f'analysis: {mark["channel"]} "analysis" {mark["message"]} TEXT {mark["end"]} '
        f'{mark["start"]} "assistant"',
        "TEXT: /(?s:.*)/",
        *rules,
    ]
    return compose("\n".join(lark), parts, param)
