"""Calls of tools as Llama 3.1 to 3.3 write them: an answer that is one JSON object.

    {"name": "weather", "parameters": {"city": "Paris"}}

``<|python_tag|>`` may stand before it. An answer that begins like that is held back until its end
tells what it is. What is no call of a function that the request offers is text, and delivered as it
was written.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from anaphora.text.detokenizer import Detokenizer
from anaphora.text.output import Output
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import SamplingParams, ToolCallDelta

PYTHON_TAG = "<|python_tag|>"
_KEYS = ("name", "parameters", "arguments", "type")


class Llama3Reader:
    """Takes an answer apart, token by token. The template takes one call in a message, so one is
    looked for."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._python_tag = tokenizer.token_id(PYTHON_TAG)
        self._names = frozenset(params.tool_names)
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._held = ""
        self._may_be_call = True
        self._has_call = False

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has ended the answer, None as long as there is none."""
        return self._detokenizer.stop_reason

    def add(self, token_id: int) -> Output:
        """What this token adds; nothing after a stop string."""
        if token_id == self._python_tag and self.stop_reason is None:
            before = self.flush()
            self._may_be_call = not self._has_call
            return before
        self._held += self._detokenizer.add((token_id,))
        if self._may_be_call and self.stop_reason is None and _begins_like_call(self._held):
            return Output()
        return self._release()

    def flush(self) -> Output:
        """What was held back, at the end of the output."""
        self._held += self._detokenizer.flush()
        call = _read_call(self._held, self._names) if self._may_be_call else None
        if call is None:
            return self._release()
        self._held = ""
        self._has_call = True
        self._may_be_call = False
        return Output(tool_calls=(call,), part="tool_call")

    def _release(self) -> Output:
        text, self._held = self._held, ""
        self._may_be_call = False
        return Output(text)


def _begins_like_call(text: str) -> bool:
    text = text.lstrip()
    if not text.startswith("{"):
        return not text
    key = text[1:].lstrip()
    return any(key.startswith(f'"{name}"') or f'"{name}"'.startswith(key) for name in _KEYS)


def _read_call(text: str, names: frozenset[str]) -> ToolCallDelta | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        name, arguments = _parts(value)
        if name not in names:
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        written.encode()  # a lone surrogate, escaped in the text, is not for JSON in UTF-8
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCallDelta(index=0, name=name, arguments=written)


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments. Raises ``ValueError`` for what has another shape."""
    if not isinstance(value, dict) or set(value) - set(_KEYS):
        raise ValueError
    given = [value[key] for key in ("parameters", "arguments") if key in value]
    name = value.get("name")
    is_function = value.get("type", "function") == "function"
    if not isinstance(name, str) or len(given) != 1 or not isinstance(given[0], dict):
        raise ValueError
    if not is_function:
        raise ValueError
    return name, given[0]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
