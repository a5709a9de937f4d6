"""Chat messages to token ids through the model's own template.

Control tokens come from the template only. Where a message, a tool or a template argument holds the
literal of one, a Unicode noncharacter goes inside that literal before the template runs and out
again after the output was cut at the literals which are still whole:

    "<|im_start|>" in a message  → "<\\ufdd0|im_start|>" → rendered, cut → text "<|im_start|>"
    "<|im_start|>" in the template                      → rendered, cut → the control token

A template that builds a control token from its own text around a field, as ``<|{{ role }}|>``, gets
that token: it decides so itself.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from anaphora.constraints import Constraint
from anaphora.errors import CorruptCheckpoint, InvalidRequest
from anaphora.text import harmony, json_tools
from anaphora.text.formats import detect_format
from anaphora.text.messages import normalize_message
from anaphora.text.sandbox import TemplateEnvironment, strftime
from anaphora.text.tokenizer import Tokenizer, literal_pattern, read_json
from anaphora.types import Message, OutputFormat, SamplingParams

# One template, or several by name; "default" and "tool_use" have a meaning.
TemplateSource = str | Mapping[str, str]

MAX_TEMPLATE_CHARS = 2**20
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never to be assigned by Unicode
_SURROGATE = re.compile("[\ud800-\udfff]")
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "pad_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict", "self"),
    }
)
_ANYTHING = Constraint("regex", "(?s:.*)", "tool_choice")
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template. Immutable, so safe to share between threads.

    ``source`` is None for a model without a template. ``strftime_now`` in a template gives
    ``date`` (today when None) for as long as this object lives, so that the clock does not change
    the beginning of every prompt at midnight and with it every cached prefix. ``output_format`` is
    how the model answers a prompt of this template; one that ``reads_reasoning_effort`` takes it as
    a template argument. Raises ``CorruptCheckpoint`` when the template does not compile.
    """

    def __init__(
        self,
        source: TemplateSource | None,
        tokenizer: Tokenizer,
        *,
        date: datetime.date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        day = date if date is not None else datetime.date.today()
        self._environment = TemplateEnvironment({"strftime_now": strftime(day)})
        named = {"default": source} if isinstance(source, str) else dict(source or {})
        self._templates = {name: self._compile(name, text) for name, text in named.items()}
        text = "".join(named.values())
        self._markers = _Markers(tokenizer, text)
        self.output_format = detect_format(text, tokenizer)
        self.reads_reasoning_effort = "reasoning_effort" in text
        # A call's arguments are then as the model wrote them, so that the prompt is too.
        self._takes_argument_text = "arguments is string" in text
        self._special = {
            f"{name}_token": tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            for name in ("bos", "eos", "unk", "pad")
            if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None
        }

    def encode(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation, ready to be continued by the model.

        Content given as a list of text parts becomes one string, its parts joined by newlines.
        With ``continue_final_message`` the output ends inside the last message. Raises
        ``InvalidRequest`` when the template rejects the messages.
        """
        text, marker = self._render(
            messages, add_generation_prompt, continue_final_message, tools, template_kwargs
        )
        # The template writes the beginning-of-sequence token itself where it wants one.
        return self._tokenizer.encode_pieces(
            piece if isinstance(piece, int) else piece.replace(marker, "")
            for piece in self._tokenizer.split_control(text)
        )

    def offer(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """What to ``encode`` so that the model knows ``tools`` and how ``reading`` expects calls.

        Where the template's own form of them is not one that we read, they become text, and so do
        calls and results of earlier turns. Raises as ``encode``.
        """
        if self.output_format != "text":
            return messages, tools
        plain = [normalize_message(m, index) for index, m in enumerate(messages)]
        return json_tools.adapt_messages(plain, tools or ()), None

    def reading(
        self,
        params: SamplingParams,
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        must_call: bool = False,
        only_these: bool = False,
    ) -> SamplingParams:
        """``params`` that take an answer to a prompt of this template apart.

        ``tools`` are those that it may call, and calls one of if it ``must_call``: with arguments
        that match its parameters. With ``only_these`` the prompt shows others, too, that it may
        not call. A constraint is one of the content, whatever stands around it. Raises
        ``InvalidRequest`` for tools of another shape than OpenAI's.
        """
        tools = tools or ()
        try:
            names = tuple(str(tool["function"]["name"]) for tool in tools)
        except (TypeError, KeyError):
            raise InvalidRequest(
                'tools must be objects as {"type": "function", "function": {"name": ...}}',
                param="tools",
            ) from None
        # Without tools, Llama's JSON is an answer like any other.
        output_format: OutputFormat = "harmony"
        if self.output_format != "harmony":
            output_format = "llama3" if names else "text"
        return msgspec.structs.replace(
            params,
            output_format=output_format,
            tool_names=names,
            constraint=self._frame(params.constraint, tools, must_call, only_these),
        )

    def _frame(
        self,
        content: Constraint | None,
        tools: Sequence[dict[str, Any]],
        must_call: bool,
        only_these: bool,
    ) -> Constraint | None:
        if must_call:
            content = None
        elif content is None and only_these and self.output_format == "harmony":
            content = _ANYTHING  # elsewhere a call of another function is text
        elif content is None:
            return None
        param = "tools" if content is None else content.param
        if self.output_format == "harmony":
            return harmony.frame(self._tokenizer, tools, content, param)
        if content is not None and not tools:
            return content
        return json_tools.frame(tools, content, param)

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, for people to read: encoding it again would lose the line
        between control tokens and their literals."""
        text, marker = self._render(
            messages, add_generation_prompt, continue_final_message, tools, template_kwargs
        )
        return text.replace(marker, "")

    def _render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[str, str]:
        """The output with markers, and the marker."""
        template = self._choose(tools)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true; "
                "set add_generation_prompt to false",
                param="continue_final_message",
            )
        for name in template_kwargs or {}:
            if name in _RESERVED:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name!r}; the request's own fields do",
                    param="chat_template_kwargs",
                )
        plain = [
            normalize_message(m, index, keep_arguments=self._takes_argument_text)
            for index, m in enumerate(messages)
        ]
        if self.output_format == "harmony":
            plain = [harmony.adapt_message(m, index) for index, m in enumerate(plain)]
            tools = None if tools is None else [harmony.adapt_tool(tool) for tool in tools]
        data = {
            "messages": plain,
            "tools": tools,
            "kwargs": dict(template_kwargs or {}),
        }
        marker, end_mark = self._markers.choose(data)
        data = self._markers.insert(data, marker)
        if continue_final_message:
            _mark_end(data["messages"], end_mark)
        variables = self._special | data["kwargs"]
        variables |= {"messages": data["messages"], "tools": data["tools"], "documents": None}
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._environment.render(template, variables)
        except _RENDER_ERRORS as error:
            reason = str(error).replace(marker, "") or type(error).__name__
            raise InvalidRequest(
                f"the chat template rejects the messages: {reason[:1000]}", param="messages"
            ) from error
        # tojson(ensure_ascii=true) writes the marker as an escape.
        text = text.replace(f"\\u{ord(marker):04x}", marker)
        return (_cut_at(text, end_mark) if continue_final_message else text), marker

    def _choose(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise InvalidRequest(
            "this model has no chat template; send a prompt to /v1/completions instead",
            param="messages",
        )

    def _compile(self, name: str, source: str) -> jinja2.Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CorruptCheckpoint(
                f"the chat template {name!r} has {len(source)} characters; "
                f"at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        try:
            return self._environment.from_string(source)
        except (jinja2.TemplateError, *_RENDER_ERRORS, SyntaxError) as error:
            raise CorruptCheckpoint(
                f"the chat template {name!r} does not compile: {error}"
            ) from error


class _Markers:
    """Puts a noncharacter into control-token literals, and into what could become one."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        literals = tuple(tokenizer.control_tokens)
        self._literal = literal_pattern(literals)
        self._prefixes = {text[:end] for text in literals for end in range(1, len(text) + 1)}
        self._max_len = max(map(len, literals), default=0)
        firsts = "".join(re.escape(char) for char in sorted({text[0] for text in literals}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        taken = template + "".join(literals)
        self._free = [char for char in _NONCHARACTERS if char not in taken]

    def choose(self, data: Any) -> tuple[str, str]:
        """Two noncharacters that ``data`` does not hold, neither plain nor as JSON escapes."""
        used: set[str] = set()
        for text in _strings(data):
            used |= set(re.findall("[\ufdd0-\ufdef]", text))
            used |= {
                chr(int(code, 16))
                for code in re.findall(r"\\u([fF][dD][dDeE]\w)", text)
                if re.fullmatch("[0-9a-fA-F]{4}", code)
            }
        free = [char for char in self._free if char not in used]
        if len(free) < 2:
            raise InvalidRequest(
                "the messages hold nearly all of U+FDD0 to U+FDEF, which are not characters; "
                "leave them out",
                param="messages",
            )
        return free[0], free[1]

    def insert(self, value: Any, marker: str) -> Any:
        """A copy of ``value`` with ``marker`` after the first character of each literal."""
        if isinstance(value, str):
            return self._mark(value, marker)
        if isinstance(value, Mapping):
            return {self.insert(k, marker): self.insert(v, marker) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.insert(item, marker) for item in value]
        return value

    def _mark(self, text: str, marker: str) -> str:
        # A template may trim, and then what follows joins the text before the white space.
        tail = text.rstrip()
        near_end = len(tail) - self._max_len
        cuts = [
            match.end()
            for match in self._first.finditer(text)
            if self._literal.match(text, match.start())
            or (match.start() > near_end and text[match.start() :] in self._prefixes)
            or (match.start() > near_end and tail[match.start() :] in self._prefixes)
        ]
        if not cuts:
            return text
        bounds = [0, *cuts, len(text)]
        return marker.join(text[a:b] for a, b in itertools.pairwise(bounds))


def _mark_end(messages: list[dict[str, Any]], end_mark: str) -> None:
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue",
            param="continue_final_message",
        )
    # The space shows whether the template trims.
    messages[-1]["content"] += end_mark + " "


def _cut_at(text: str, end_mark: str) -> str:
    head, found, rest = text.rpartition(end_mark)
    if not found:
        raise InvalidRequest(
            "the chat template leaves out the end of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    head = head.replace(end_mark, "")
    return head if rest.startswith(" ") else head.rstrip()


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """All strings in JSON-like ``value``; refuses other things, which a template could call."""
    if depth > 64:
        raise InvalidRequest("messages and tools nest deeper than 64 levels", param="messages")
    if isinstance(value, str):
        if surrogate := _SURROGATE.search(value):
            raise InvalidRequest(
                f"a text holds the lone surrogate U+{ord(surrogate[0]):04X}; send valid Unicode",
                param="messages",
            )
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"the object key {key!r} is not a string", param="messages")
            yield key
            yield from _strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)
    elif value is not None and not isinstance(value, int | float):
        raise InvalidRequest(
            f"a value of type {type(value).__name__} is not JSON", param="messages"
        )


def read_template(directory: Path, config: Mapping[str, Any]) -> TemplateSource | None:
    """The chat templates of a Hugging Face directory, None if it has none.

    Looks where transformers does: ``chat_template.jinja`` and ``additional_chat_templates/``, then
    ``chat_template.json``, then ``chat_template`` in ``config`` (tokenizer_config.json).
    """
    files = {"default": directory / "chat_template.jinja"}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    try:
        named = {
            name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()
        }
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{directory} has an unreadable template: {error}") from error
    if named:
        return named
    value = read_json(directory / "chat_template.json", missing_ok=True).get("chat_template")
    value = config.get("chat_template") if value is None else value
    if value is None or isinstance(value, str):
        return value
    try:
        return {str(item["name"]): str(item["template"]) for item in value}
    except (KeyError, TypeError) as error:
        raise CorruptCheckpoint(
            f"{directory}: chat_template must be a string or a list of name and template"
        ) from error
