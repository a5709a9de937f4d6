"""What an answer has to match: plain data, and the same in the form that llguidance reads.

A constraint travels to the engine as it was given. Formats that mark parts of an answer put it in a
frame first, ``compose``: there the whole answer is one grammar, of which the constraint is a part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

import msgspec

from anaphora.errors import InvalidRequest

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "composed"]

MAX_CONSTRAINT_CHARS = 2**18
MAX_GRAMMAR_CHARS = 2**16
MAX_CHOICES = 4096  # of answers


class Limits(TypedDict):
    """Those of llguidance that we set; its documentation says what they count."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


# A step that reaches one ends its own choice. The dearest masks we found take 10 to 40 ms.
LIMITS: Limits = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # they would quote what was asked for
}
# Small models would fill an answer with white space; 40 characters indent ten levels.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,40}"}
_MAX_MESSAGE_CHARS = 200
MAX_INTEGER = 10**18  # fits 64 bits, and so does what llguidance makes of it
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"}


class Constraint(msgspec.Struct, frozen=True):
    """``text`` is a JSON schema, a regular expression, a JSON array of strings, or a grammar in
    llguidance's Lark or in GBNF. ``param`` names the field that asked for it, for error messages.

    Raises ``InvalidRequest`` for what is not even that; whether llguidance can follow it shows
    when it is compiled.
    """

    kind: ConstraintKind
    text: str
    param: str = "constraint"

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            kinds = ", ".join(get_args(ConstraintKind)[:-1])
            raise self.error(f"has the kind {self.kind!r:.40}; it must be one of {kinds}")
        if not isinstance(self.text, str):
            raise self.error(f"is {type(self.text).__name__}; it must be text")
        longest = MAX_GRAMMAR_CHARS if self.kind == "grammar" else MAX_CONSTRAINT_CHARS
        if len(self.text) > longest:
            raise self.error(f"has {len(self.text)} characters; at most {longest} are allowed")
        if self.kind in ("json_schema", "choice"):
            self.part()

    def error(self, message: str) -> InvalidRequest:
        """An error that names the field."""
        return InvalidRequest(f"{self.param} {message}", param=self.param)

    def part(self) -> dict[str, Any]:
        """One entry of llguidance's list of grammars."""
        if self.kind == "json_schema":
            schema = self._json()
            if isinstance(schema, bool):
                schema = {} if schema else {"enum": []}
            if not isinstance(schema, dict):
                raise self.error("must be a JSON schema: an object")
            return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}
        if self.kind == "choice":
            return {"lark_grammar": _lark_of_choices(self._choices())}
        if self.kind == "regex":
            return {"lark_grammar": f"start: /{_escape(self.text)}/"}
        return {"lark_grammar": self._lark() if self.kind == "grammar" else self.text}

    def grammar(self) -> str:
        """The whole of it for llguidance."""
        return self.text if self.kind == "composed" else json.dumps({"grammars": [self.part()]})

    def _lark(self) -> str:
        # Imported late: most requests have no constraint.
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(self.text)
        except Exception as error:
            raise self.error(f"is neither Lark nor GBNF: {shorten(str(error))}") from None

    def _choices(self) -> list[str]:
        choices = self._json()
        if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
            raise self.error("must be an array of strings")
        if not 0 < len(choices) <= MAX_CHOICES:
            raise self.error(f"has {len(choices)} strings; 1 to {MAX_CHOICES} are allowed")
        return choices

    def _json(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            raise self.error("is not valid JSON") from None


def json_constraint(schema: object, param: str) -> Constraint:
    """That of a schema given as an object. Equal objects give equal text."""
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False), param)


def settled(schema: Any) -> Any:
    """A schema whose objects have no fields but those it names, and whose whole numbers fit
    64 bits, unless it says so itself: a small model would go on inventing fields and digits."""
    if isinstance(schema, list):
        return [settled(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[word] = {name: settled(one) for name, one in value.items()}
        else:
            result[word] = value if word in _VALUES else settled(value)
    if "properties" in schema:
        result.setdefault("additionalProperties", False)
    if schema.get("type") == "integer" and not _BOUNDS & schema.keys():
        result |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    return result


def compose(lark: str, parts: Mapping[str, Constraint], param: str) -> Constraint:
    """A grammar that names ``parts`` as ``@name``."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    grammars += [{"name": name, **part.part()} for name, part in parts.items()]
    return Constraint("composed", json.dumps({"grammars": grammars}, ensure_ascii=False), param)


def shorten(message: str) -> str:
    """llguidance's complaint without the places where it quotes what it was given."""
    if "regex parse error" in message and (found := re.search(r"^error: (.*)$", message, re.M)):
        message = found[1]
    first = message.strip().partition("\n")[0]
    if first.startswith("panic") or not first:
        return "it is too complex"
    first = re.sub(r"\(at .*|\"[^\"]{40,}\"?", "…", first)
    return first[:_MAX_MESSAGE_CHARS]


def _lark_of_choices(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _escape(regex: str) -> str:
    """The expression between slashes; ``^`` at its start and ``$`` at its end always hold."""
    regex = regex.removeprefix("^")
    if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 == 1:
        regex = regex[:-1]
    return re.sub(r"(\\.)|/|\n|\r", _escape_one, f"(?:{regex})", flags=re.S)


def _escape_one(match: re.Match[str]) -> str:
    if match[1]:
        return {"\\\n": "\\n", "\\\r": "\\r"}.get(match[1], match[1])
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}[match[0]]
