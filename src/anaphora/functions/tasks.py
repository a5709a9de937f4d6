"""What each AI function asks a model, and what it makes of the answer.

A request's system message holds what all rows share, instruction, labels and schema, and the row
stands last and alone in the user's message: all rows have the longest common prefix. Temperature is
0. Labels and schemas are constraints on decoding, so that answers parse.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from anaphora.batch.client import Reply
from anaphora.errors import InvalidArgument, RowFailed
from anaphora.functions import arguments
from anaphora.functions.shapes import TEXT, Shape, parse_ddl, shape_of

SENTIMENTS = ("positive", "negative", "neutral", "mixed")
MASK = "[MASKED]"
DEFAULT_MAX_WORDS = 50

_CLASSIFY = "Classify the user's text. Answer with exactly one of these labels:"
_CLASSIFY_ALL = "Classify the user's text. List every one of these labels that applies, as JSON:"
_EXTRACT = "Extract these fields from the user's text, as JSON; null for what it does not say:"
_EXTRACT_SCHEMA = "Extract from the user's text what this JSON schema describes, as JSON:"
_SUMMARIZE = "Summarize the user's text{limit}. Answer with the summary only."
_TRANSLATE = "Translate the user's text into {language}. Answer with the translation only."
_FIX_GRAMMAR = (
    "Correct the grammar and spelling of the user's text and leave everything else as it is. "
    "Answer with the corrected text only."
)
_MASK = "List, word for word, every part of the user's text that is one of these, as JSON:"
_SENTIMENT = (
    "Say which sentiment the user's text expresses. Answer with exactly one of: "
    + ", ".join(SENTIMENTS)
    + "."
)
_SIMILARITY = "Do the two texts mean the same? Answer with Yes or No."

_TEXT_TOKENS = 512  # ai_gen, ai_query: as long as nothing else is asked for
_UNLIMITED_SUMMARY_TOKENS = 1024
_TOKENS_PER_WORD = 3
_FIELD_CHARS = 200  # of an extracted field
_FIELD_TOKENS = 160
_MAX_SPANS, _SPAN_CHARS = 32, 100
_JSON_TOKENS = 1024
_MAX_ROW_TOKENS = 4096
_SPARE_TOKENS = 64
_NUM_TOP = 20  # OpenAI's most

Read = Callable[[str, Reply], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A function with its arguments. A row is text; for ``ai_similarity`` a JSON pair of texts."""

    function: str
    shape: Shape
    read: Read
    fields: Mapping[str, Any]  # of each request's body
    system: str = ""
    row_tokens: Callable[[str], int] | None = None  # max_tokens where it depends on the row
    known: Callable[[str], Any] = lambda _: None  # a value that needs no model, else None
    user: Callable[[str], str] = lambda row: row

    @property
    def is_repeatable(self) -> bool:
        """Whether equal rows have equal values."""
        return bool(self.fields["temperature"] == 0)

    def request(self, row: str) -> dict[str, Any]:
        """The body of ``POST /v1/chat/completions`` for one row."""
        messages = [{"role": "user", "content": self.user(row)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        size = {} if self.row_tokens is None else {"max_tokens": self.row_tokens(row)}
        return {"messages": messages, **size, **self.fields}

    def value(self, row: str, reply: Reply) -> Any:
        """The row's value, JSON-compatible. Raises ``RowFailed`` that names the cause."""
        if reply.error is not None:
            raise RowFailed(f"AI_FUNCTION_HTTP_REQUEST_ERROR: {reply.error}")
        value = self.read(row, reply)
        if not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise RowFailed(
                f"AI_FUNCTION_HTTP_PARSE_CAST_ERROR: the answer {reply.text!r:.60} has half a "
                "surrogate pair, which is no text: ask in other words"
            )
        return value


def ai_query(
    endpoint: str,
    *,
    return_type: str | None = None,
    response_format: Any = None,
    model_parameters: Any = None,
) -> Task:
    """The row is the prompt. ``endpoint`` is the name of a model or an adapter."""
    if not isinstance(endpoint, str) or not endpoint:
        shown = repr(endpoint) if isinstance(endpoint, str) else type(endpoint).__name__
        raise InvalidArgument(
            f"ai_query's endpoint is {shown}; give a model's name, and the prompts after it"
        )
    parameters = arguments.read_model_parameters(model_parameters, "ai_query")
    kind, schema, field = arguments.read_response_format(response_format)
    if return_type is not None and kind != "text":
        raise InvalidArgument("ai_query has both returnType and responseFormat; give one of them")
    if return_type is not None:
        wanted = parse_ddl(return_type, "ai_query's returnType")
        if wanted["type"] == "object":
            kind, schema = "json_schema", wanted
        elif wanted != {"type": "string"}:
            kind, schema, field = "json_schema", _object({"result": wanted}), "result"
    fields = {"model": endpoint, "max_tokens": _TEXT_TOKENS}
    if kind == "text":
        return _task("ai_query", TEXT, _read_whole, fields, parameters)
    if kind == "json_object":
        fields |= {"max_tokens": _JSON_TOKENS, "response_format": {"type": "json_object"}}
        read = _read_json(Shape("json"), None)
        return _task("ai_query", TEXT, read, fields, parameters)
    return _json_task(
        "ai_query", schema, field, fields, parameters, argument="ai_query's responseFormat"
    )


def ai_gen(*, model_parameters: Any = None) -> Task:
    """The row is the prompt."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_gen")
    return _task("ai_gen", TEXT, _read_whole, {"max_tokens": _TEXT_TOKENS}, parameters)


def ai_classify(labels: Any, *, options: Any = None, model_parameters: Any = None) -> Task:
    """One of 2 to 500 labels; with the option ``multilabel`` a list of them."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_classify")
    found = arguments.read_labels(labels, "ai_classify", min_labels=arguments.MIN_CLASSES)
    given = arguments.read_options(options, "ai_classify", ("instructions", "multilabel"))
    is_multilabel = given.get("multilabel", False)
    system = _instruct(
        _CLASSIFY_ALL if is_multilabel else _CLASSIFY, _list(found), given.get("instructions")
    )
    if not is_multilabel:
        return _choice_task("ai_classify", list(found), system, parameters)
    items = {"type": "string", "enum": list(found)}
    listed = {"type": "array", "items": items, "maxItems": len(found)}
    schema = _object({"labels": listed})
    size = {"max_tokens": _SPARE_TOKENS + sum(len(label.encode()) + 4 for label in found)}
    task = _json_task("ai_classify", schema, "labels", size, parameters, system=system)
    return dataclasses.replace(task, read=lambda row, reply: _once(task.read(row, reply)))


def ai_extract(labels: Any, *, options: Any = None, model_parameters: Any = None) -> Task:
    """A STRUCT with a field for each label, or as a JSON schema says."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_extract")
    given = arguments.read_options(options, "ai_extract", ("instructions",))
    found, schema = arguments.read_fields(labels)
    more = given.get("instructions")
    if found is None:
        system = _instruct(_EXTRACT_SCHEMA, json.dumps(schema, ensure_ascii=False), more)
        size = {"max_tokens": _JSON_TOKENS}
        argument = "ai_extract's schema"
        return _json_task("ai_extract", schema, None, size, parameters, system, argument)
    field = {"type": ["string", "null"], "maxLength": _FIELD_CHARS}
    system = _instruct(_EXTRACT, _list(found), more)
    size = {"max_tokens": min(_MAX_ROW_TOKENS, _SPARE_TOKENS + _FIELD_TOKENS * len(found))}
    schema = _object(dict.fromkeys(found, field))
    return _json_task("ai_extract", schema, None, size, parameters, system)


def ai_summarize(max_words: Any = DEFAULT_MAX_WORDS, *, model_parameters: Any = None) -> Task:
    """Asked for in ``max_words``; 0 is no limit."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_summarize")
    max_words = arguments.read_max_words(max_words)
    limit, max_tokens = "", _UNLIMITED_SUMMARY_TOKENS
    if max_words:
        limit = f" in at most {max_words} words"
        max_tokens = min(_MAX_ROW_TOKENS, _TOKENS_PER_WORD * max_words + 16)
    system = _SUMMARIZE.format(limit=limit)
    return _task("ai_summarize", TEXT, _read_text, {"max_tokens": max_tokens}, parameters, system)


def ai_translate(to_lang: Any, *, model_parameters: Any = None) -> Task:
    """Into one of en, de, fr, it, pt, hi, es, th."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_translate")
    system = _TRANSLATE.format(language=arguments.read_language(to_lang))
    return _row_sized_task("ai_translate", system, parameters, lambda row: len(row.encode()))


def ai_fix_grammar(*, model_parameters: Any = None) -> Task:
    """The row's text without mistakes."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_fix_grammar")
    return _row_sized_task(
        "ai_fix_grammar", _FIX_GRAMMAR, parameters, lambda row: len(row.encode()) // 2
    )


def ai_mask(labels: Any, *, model_parameters: Any = None) -> Task:
    """The row's own text with ``[MASKED]`` where the model finds what ``labels`` name."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_mask")
    found = arguments.read_labels(labels, "ai_mask")
    span = {"type": "string", "maxLength": _SPAN_CHARS}
    schema = _object({"parts": {"type": "array", "items": span, "maxItems": _MAX_SPANS}})
    system = _instruct(_MASK, _list(found), None)
    size = {"max_tokens": _JSON_TOKENS}
    task = _json_task("ai_mask", schema, "parts", size, parameters, system)
    return dataclasses.replace(
        task, shape=TEXT, read=lambda row, reply: _mask(row, task.read(row, reply))
    )


def ai_analyze_sentiment(*, model_parameters: Any = None) -> Task:
    """One of positive, negative, neutral, mixed."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_analyze_sentiment")
    return _choice_task("ai_analyze_sentiment", list(SENTIMENTS), _SENTIMENT, parameters)


def ai_similarity(*, model_parameters: Any = None) -> Task:
    """P(Yes) / (P(Yes) + P(No)) of the first token; 1 for equal texts. Only relative meaning."""
    parameters = arguments.read_model_parameters(model_parameters, "ai_similarity")
    fields = {
        "max_tokens": 1,
        "structured_outputs": {"choice": ["Yes", "No"]},
        "logprobs": True,
        "top_logprobs": _NUM_TOP,
    }
    task = _task("ai_similarity", Shape("float"), _read_yes, fields, parameters, _SIMILARITY)
    return dataclasses.replace(task, user=_show_pair, known=_one_if_equal)


FUNCTIONS: dict[str, Callable[..., Task]] = {
    function.__name__: function
    for function in (
        ai_query,
        ai_gen,
        ai_classify,
        ai_extract,
        ai_summarize,
        ai_translate,
        ai_fix_grammar,
        ai_mask,
        ai_analyze_sentiment,
        ai_similarity,
    )
}


def pair(first: str, second: str) -> str:
    """A row of ``ai_similarity``."""
    return json.dumps([first, second], ensure_ascii=False)


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _task(
    function: str,
    shape: Shape,
    read: Read,
    fields: Mapping[str, Any],
    parameters: Mapping[str, Any],
    system: str = "",
) -> Task:
    return Task(function, shape, read, {"temperature": 0, **fields, **parameters}, system)


def _choice_task(
    function: str, labels: list[str], system: str, parameters: Mapping[str, Any]
) -> Task:
    fields = {
        # A label has no more tokens than bytes.
        "max_tokens": 16 + max(len(label.encode()) for label in labels),
        "structured_outputs": {"choice": labels},
    }
    shape = Shape("string", choices=tuple(labels))
    return _task(function, shape, _read_choice(labels), fields, parameters, system)


def _json_task(
    function: str,
    schema: Mapping[str, Any],
    field: str | None,
    fields: Mapping[str, Any],
    parameters: Mapping[str, Any],
    system: str = "",
    argument: str = "",
) -> Task:
    """``field`` is the one of the answer's that is the value; None for the whole answer."""
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": function, "strict": True, "schema": schema},
    }
    whole = shape_of(schema, argument)
    shape = whole if field is None else whole.fields[field]
    fields = {"max_tokens": _JSON_TOKENS, **fields, "response_format": response_format}
    return _task(function, shape, _read_json(whole, field), fields, parameters, system)


def _row_sized_task(
    function: str, system: str, parameters: Mapping[str, Any], size: Callable[[str], int]
) -> Task:
    """For answers about as long as their row."""

    def row_tokens(row: str) -> int:
        # Few sizes, so that a prefix cache sees them alike and a batch's limits are alike.
        return min(_MAX_ROW_TOKENS, _SPARE_TOKENS * (2 + size(row) // _SPARE_TOKENS))

    task = Task(function, TEXT, _read_text, {"temperature": 0, **parameters}, system)
    return dataclasses.replace(task, row_tokens=row_tokens)


def _instruct(instruction: str, listed: str, more: str | None) -> str:
    return "\n".join([instruction, listed, *([more] if more else [])])


def _list(labels: Mapping[str, str]) -> str:
    return "\n".join(
        f"- {label}: {said}" if said else f"- {label}" for label, said in labels.items()
    )


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _read_whole(_: str, reply: Reply) -> str:
    return reply.text


def _read_text(_: str, reply: Reply) -> str:
    return reply.text.strip()


def _read_choice(labels: list[str]) -> Read:
    def read(_: str, reply: Reply) -> str:
        if reply.text in labels:
            return reply.text
        raise _unreadable(reply, "none of the labels", "structured_outputs")

    return read


def _read_json(shape: Shape, field: str | None) -> Read:
    def read(_: str, reply: Reply) -> Any:
        try:
            value = shape.fit(json.loads(reply.text))
        except (ValueError, RecursionError) as error:
            why = "not valid JSON" if isinstance(error, json.JSONDecodeError) else str(error)
            raise _unreadable(reply, why, "response_format") from None
        return value if field is None else value[field]

    return read


def _read_yes(_: str, reply: Reply) -> float:
    """From the 20 best tokens; one that is not among them counts as much as the last of these."""
    try:
        first = reply.body["choices"][0]["logprobs"]["content"][0]
        top = {one["token"]: float(one["logprob"]) for one in [*first["top_logprobs"], first]}
        rest = min(top.values())
        yes, no = (
            [p for token, p in top.items() if token and label.startswith(token)] or [rest]
            for label in ("Yes", "No")
        )
    except (LookupError, TypeError, ValueError):
        raise RowFailed(
            "AI_FUNCTION_HTTP_PARSE_COLUMNS_ERROR: the answer has no logprobs; ai_similarity "
            "needs a server that gives them"
        ) from None
    if not reply.text or not any(label.startswith(reply.text) for label in ("Yes", "No")):
        raise _unreadable(reply, "neither Yes nor No", "structured_outputs")
    best = max(*yes, *no)
    if not math.isfinite(best):
        raise _unreadable(reply, "without a logprob that is a number", "logprobs")
    weights = [sum(math.exp(p - best) for p in found) for found in (yes, no)]
    return weights[0] / sum(weights)


def _unreadable(reply: Reply, what: str, field: str) -> RowFailed:
    shown = f"the answer {reply.text!r:.60} is {what}"
    if what.startswith("the answer"):
        shown = what
    fix = f"the server does not honour {field}, use one that does"
    if reply.finish_reason == "length":
        limit = "max_tokens"
        fix = f"it was cut off at {limit}, raise it in modelParameters"
    return RowFailed(f"AI_FUNCTION_HTTP_PARSE_CAST_ERROR: {shown}: {fix}")


def _once(labels: list[str]) -> list[str]:
    return list(dict.fromkeys(labels))


def _mask(row: str, parts: list[str]) -> str:
    """``row`` without ``parts``, where they are whole words; longer ones first."""
    found = sorted({part.strip() for part in parts} - {""}, key=lambda part: (-len(part), part))
    if not found:
        return row
    anywhere = "|".join(re.escape(part) for part in found)
    return re.sub(rf"(?<!\w)(?:{anywhere})(?!\w)", MASK, row)


def _show_pair(row: str) -> str:
    first, second = json.loads(row)
    return f"First text: {first}\n\nSecond text: {second}"


def _one_if_equal(row: str) -> float | None:
    first, second = json.loads(row)
    return 1.0 if first == second else None
