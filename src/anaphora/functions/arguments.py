"""Checks of what AI functions are given beside their column. Each raises ``InvalidArgument`` that
names the argument, the value and the fix.

SQL hands over nested values as JSON, and MAPs with texts as their values, so both are read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from anaphora.constraints import settled
from anaphora.errors import InvalidArgument
from anaphora.functions.shapes import check_field_names, parse_ddl

LANGUAGES = {
    "en": "English",
    "de": "German",
    "fr": "French",
    "it": "Italian",
    "pt": "Portuguese",
    "hi": "Hindi",
    "es": "Spanish",
    "th": "Thai",
}
MODEL_PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "reasoning_effort",
)
MIN_CLASSES, MAX_LABELS = 2, 500
MAX_LABEL_CHARS = 100
MAX_INSTRUCTIONS_CHARS = 20_000
_BOOLEANS = {"true": True, "false": False}


def read_labels(labels: Any, function: str, *, min_labels: int = 1) -> dict[str, str]:
    """Labels and what is said about each: a list of texts, or a mapping to descriptions; of JSON.

    Labels are 1 to 100 characters, at most 500, all different.
    """
    argument = f"{function}'s labels"
    labels = _parse_json(labels)
    if isinstance(labels, Mapping):
        pairs = [(name, said) for name, said in labels.items()]
    elif isinstance(labels, Iterable) and not isinstance(labels, str | bytes):
        pairs = [(name, "") for name in labels]
    else:
        raise InvalidArgument(f"{argument} are {labels!r:.60}; give an array of texts")
    for name, said in pairs:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_LABEL_CHARS:
            raise InvalidArgument(
                f"{argument} have {name!r:.120}; each must be text of 1 to {MAX_LABEL_CHARS} "
                "characters"
            )
        if not isinstance(said, str):
            raise InvalidArgument(
                f"{argument} describe {name!r} by {said!r:.60}; give text, "
                'or a JSON schema: {"type": "object", "properties": …}'
            )
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidArgument(f"{argument} hold one label twice; give each once")
    if not min_labels <= len(pairs) <= MAX_LABELS:
        raise InvalidArgument(
            f"{argument} are {len(pairs)}; {min_labels} to {MAX_LABELS} are allowed"
        )
    return dict(pairs)


def read_fields(labels: Any) -> tuple[dict[str, str] | None, Any]:
    """What ``ai_extract`` looks for: (labels, None), or (None, a JSON schema)."""
    parsed = _parse_json(labels)
    if isinstance(parsed, Mapping) and ("properties" in parsed or "$ref" in parsed):
        return None, _settled(parsed, "ai_extract's schema")
    found = read_labels(parsed, "ai_extract")
    check_field_names(list(found), "ai_extract's labels")
    return found, None


def read_options(options: Any, function: str, known: tuple[str, ...]) -> dict[str, Any]:
    """``instructions``: text of at most 20,000 characters; ``multilabel``: a boolean."""
    given = _mapping(options, f"{function}'s options")
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(
                f"{function} has no option {name!r:.60}; it has {' and '.join(known)}"
            )
        if name == "multilabel":
            given[name] = read_boolean(value, f"{function}'s option multilabel")
        elif not isinstance(value, str) or len(value) > MAX_INSTRUCTIONS_CHARS:
            size = f" of {len(value)} characters" if isinstance(value, str) else ""
            raise InvalidArgument(
                f"{function}'s option instructions is {type(value).__name__}{size}; "
                f"it must be text of at most {MAX_INSTRUCTIONS_CHARS:,} characters"
            )
    return given


def read_model_parameters(parameters: Any, function: str) -> dict[str, Any]:
    """Fields of a request's body, without those that are not given."""
    given = _mapping(parameters, f"{function}'s modelParameters")
    for name in given:
        if name not in MODEL_PARAMETERS:
            raise InvalidArgument(
                f"{function}'s modelParameters have {name!r:.60}, which is not known; there are "
                f"{', '.join(MODEL_PARAMETERS)}"
            )
        value = given[name]
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(
                f"{function}'s modelParameters have {name} {value}; it must be a finite number"
            )
    return {name: value for name, value in given.items() if value is not None}


def read_boolean(value: Any, argument: str) -> bool:
    """True, false, or one of the two as text."""
    value = _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise InvalidArgument(f"{argument} is {value!r:.60}; it must be true or false")
    return value


def read_max_words(value: Any) -> int:
    """0 is no limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(
            f"AI_FUNCTION_INVALID_MAX_WORDS: ai_summarize's max_words is {value!r:.60}; it must be "
            "a whole number, 0 for no limit"
        )
    return value


def read_language(code: Any) -> str:
    """The language's name."""
    if not isinstance(code, str) or code.lower() not in LANGUAGES:
        raise InvalidArgument(
            f"ai_translate's to_lang is {code!r:.60}; it must be one of {', '.join(LANGUAGES)}"
        )
    return LANGUAGES[code.lower()]


def read_response_format(given: Any) -> tuple[str, Any, str | None]:
    """``(kind, schema, field)``: kind ``text``, ``json_object`` or ``json_schema``; ``field`` is
    the one whose value is meant, None for all.

    Given is 'text', OpenAI's object or its JSON, a bare JSON schema, or STRUCT<name: type> with
    one top-level field, whose name is dropped.
    """
    argument = "ai_query's responseFormat"
    if given is None or given == "text":
        return "text", None, None
    if isinstance(given, str) and given.lstrip()[:6].upper() == "STRUCT":
        schema = parse_ddl(given, argument)
        if len(schema["properties"]) != 1:
            raise InvalidArgument(
                f"{argument} is a STRUCT with {len(schema['properties'])} top-level fields; it "
                "must have exactly one, whose name is dropped: STRUCT<result: STRUCT<…>>"
            )
        return "json_schema", schema, next(iter(schema["properties"]))
    parsed = _parse_json(given)
    if not isinstance(parsed, Mapping):
        raise InvalidArgument(
            f"{argument} is {given!r:.60}; give 'text', '{{\"type\": \"json_object\"}}', a JSON "
            "schema, or STRUCT<name: type>"
        )
    match parsed.get("type"):
        case "text" | "json_object":
            return parsed["type"], None, None
        case "json_schema":
            inner = parsed.get("json_schema")
            if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
                raise InvalidArgument(
                    f"{argument} has no json_schema.schema; give the schema there"
                )
            return "json_schema", _settled(inner["schema"], argument), None
    return "json_schema", _settled(parsed, argument), None


def _settled(schema: Any, argument: str) -> Any:
    try:
        settled_schema = settled(schema)
        json.dumps(settled_schema, allow_nan=False)
    except (RecursionError, TypeError, ValueError) as error:
        why = (
            "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        )
        raise InvalidArgument(f"{argument} {why:.120}; give a simpler schema") from None
    return settled_schema


def _mapping(given: Any, argument: str) -> dict[str, Any]:
    parsed = _parse_json(given)
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise InvalidArgument(f"{argument} are {given!r:.60}; give names and values")
    return dict(parsed)


def _parse_json(value: Any) -> Any:
    """What a JSON text says; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
        except RecursionError:
            raise InvalidArgument(f"{value!r:.60} is nested too deeply") from None
    return value
