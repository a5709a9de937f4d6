"""Types of values: read from a JSON schema or from DDL, written for Arrow and DuckDB."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from anaphora.constraints import MAX_INTEGER
from anaphora.errors import InvalidArgument

Kind = Literal["string", "integer", "number", "float", "boolean", "array", "object", "json"]

MAX_FIELDS = 256
MAX_LEVELS = 12
MAX_ENUM_VALUES = 500
_DDL_TYPES = {
    **dict.fromkeys(("STRING", "VARCHAR", "TEXT"), "string"),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE"), "number"),
    **dict.fromkeys(("BOOLEAN", "BOOL"), "boolean"),
}
_INTEGER_BITS = {"TINYINT": 8, "SMALLINT": 16, "INT": 32, "INTEGER": 32, "BIGINT": 64, "LONG": 64}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "float": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_DUCKDB_TYPES = {
    "string": "VARCHAR",
    "json": "VARCHAR",
    "integer": "BIGINT",
    "number": "DOUBLE",
    "float": "FLOAT",
    "boolean": "BOOLEAN",
}
_MAX_INTEGER = 2**63


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type of a value. ``json`` is anything, kept as its JSON text."""

    kind: Kind
    is_nullable: bool = False
    items: Shape | None = None
    fields: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    required: frozenset[str] = frozenset()
    choices: tuple[Any, ...] | None = None

    def fit(self, value: Any, where: str = "the answer") -> Any:
        """``value`` as this type: absent fields None, the rest in the type's order.

        Raises ``ValueError`` that says what does not fit.
        """
        if value is None and (self.is_nullable or self.kind == "json"):
            return None
        if self.kind == "json":
            if isinstance(value, str):
                return value
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        is_of_type = isinstance(value, _PYTHON_TYPES[self.kind])
        if not is_of_type or isinstance(value, bool) != (self.kind == "boolean"):
            raise ValueError(f"{where} is {_describe(value)}; {self.kind} was asked for")
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{where} is {value!r:.60}, none of the values asked for")
        if self.kind == "integer" and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise ValueError(f"{where} is {value}, which has no room in 64 bits")
        if self.items is not None:
            return [self.items.fit(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if self.kind == "object":
            return dict(self._fit_fields(value, where))
        return _finite(value, where) if self.kind in ("number", "float") else value

    def _fit_fields(self, value: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        for name, shape in self.fields.items():
            if name in value:
                yield name, shape.fit(value[name], f"{where}.{name}")
            elif name in self.required:
                raise ValueError(f"{where} has no field {name!r}")
            else:
                yield name, None

    def arrow(self) -> Any:
        """The ``pyarrow.DataType``."""
        import pyarrow as pa

        if self.items is not None:
            return pa.list_(self.items.arrow())
        if self.kind == "object":
            return pa.struct([(name, shape.arrow()) for name, shape in self.fields.items()])
        simple = {"integer": pa.int64(), "number": pa.float64(), "float": pa.float32()}
        return simple.get(self.kind, pa.bool_() if self.kind == "boolean" else pa.string())

    def duckdb(self) -> Any:
        """What DuckDB's ``from_json`` calls a structure, before it is JSON text."""
        if self.items is not None:
            return [self.items.duckdb()]
        if self.kind == "object":
            return {name: shape.duckdb() for name, shape in self.fields.items()}
        return _DUCKDB_TYPES[self.kind]


TEXT = Shape("string")


def with_error(shape: Shape) -> Shape:
    """STRUCT<result, errorMessage>."""
    result = dataclasses.replace(shape, is_nullable=True)
    return Shape("object", fields={"result": result, "errorMessage": Shape("string", True)})


def shape_of(schema: Any, argument: str) -> Shape:
    """That of a JSON schema's values. Where a schema leaves the type open it is ``json``.

    Raises ``InvalidArgument`` for what is no schema or is too large for a table.
    """
    return _Reader(schema, argument).read(schema, 1, frozenset())


class _Reader:
    def __init__(self, root: Any, argument: str) -> None:
        self._root = root
        self._argument = argument
        self._num_fields = 0

    def read(self, schema: Any, level: int, refs: frozenset[str]) -> Shape:
        """The shape of one schema of the whole, ``level`` objects or arrays deep."""
        if level > MAX_LEVELS:
            raise self._error(f"has more than {MAX_LEVELS} levels")
        if isinstance(schema, bool):
            return Shape("json", is_nullable=True)
        if not isinstance(schema, dict):
            raise self._error(f"has {_describe(schema)} where a JSON schema has to be")
        if isinstance(ref := schema.get("$ref"), str):
            if ref in refs:  # a tree of any depth
                return Shape("json", is_nullable=True)
            return self.read(self._resolve(ref), level, refs | {ref})
        for word in ("anyOf", "oneOf"):
            if isinstance(ways := schema.get(word), list):
                return self._of_ways(ways, level, refs)
        return self._of_type(schema, level, refs)

    def _of_ways(self, ways: list[Any], level: int, refs: frozenset[str]) -> Shape:
        typed = [way for way in ways if way != {"type": "null"}]
        if len(typed) != 1:
            return Shape("json", is_nullable=True)
        shape = self.read(typed[0], level, refs)
        return dataclasses.replace(shape, is_nullable=shape.is_nullable or len(ways) > 1)

    def _of_type(self, schema: dict[str, Any], level: int, refs: frozenset[str]) -> Shape:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None and not isinstance(choices, list):
            raise self._error(f"has an enum that is {_describe(choices)}; give an array")
        if choices is not None and len(choices) > MAX_ENUM_VALUES:
            raise self._error(f"has an enum of {len(choices)} values; {MAX_ENUM_VALUES} at most")
        kinds = schema.get("type")
        if kinds is None and choices and all(isinstance(one, str) for one in choices):
            kinds = "string"
        kinds = [kinds] if isinstance(kinds, str) else [] if kinds is None else kinds
        if not _is_texts(kinds):
            raise self._error(f"has the type {kinds!r:.40}; give a name, or an array of names")
        typed = [kind for kind in kinds if kind != "null"]
        is_nullable = len(typed) < len(kinds)
        if len(typed) != 1:
            return Shape("json", is_nullable=True)
        [kind] = typed
        if kind == "array" and "items" in schema:
            items = self.read(schema["items"], level + 1, refs)
            return Shape("array", is_nullable, items)
        if kind == "object" and schema.get("properties"):
            return self._of_object(schema, is_nullable, level, refs)
        if kind in ("array", "object"):
            return Shape("json", is_nullable)
        if kind not in _PYTHON_TYPES:
            raise self._error(f"has the type {kind!r:.40}, which JSON schema does not know")
        return Shape(kind, is_nullable, choices=None if choices is None else tuple(choices))

    def _of_object(
        self, schema: dict[str, Any], is_nullable: bool, level: int, refs: frozenset[str]
    ) -> Shape:
        properties = schema["properties"]
        if not isinstance(properties, dict):
            raise self._error("has properties that are no object")
        self._num_fields += len(properties)
        if self._num_fields > MAX_FIELDS:
            raise self._error(f"has more than {MAX_FIELDS} fields")
        check_field_names(list(properties), self._argument)
        fields = {name: self.read(one, level + 1, refs) for name, one in properties.items()}
        required = schema.get("required", [])
        if not _is_texts(required):
            raise self._error(f"has required {required!r:.40}; give an array of names")
        return Shape("object", is_nullable, fields=fields, required=frozenset(required))

    def _resolve(self, ref: str) -> Any:
        found = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        if found is None or not ref.startswith("#"):
            raise self._error(f"refers to {ref!r:.60}, which it does not have")
        return found

    def _error(self, message: str) -> InvalidArgument:
        return InvalidArgument(f"{self._argument} {message}")


def check_field_names(names: list[str], argument: str) -> None:
    """Names of a STRUCT's fields: SQL does not tell upper and lower case apart."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other is not name:
            raise InvalidArgument(
                f"{argument} has {other!r} and {name!r}; a STRUCT's fields must differ in more "
                "than upper and lower case"
            )


def parse_ddl(text: str, argument: str) -> dict[str, Any]:
    """The JSON schema of a type: ``STRUCT<name: STRING, tags: ARRAY<STRING>>``, ``INT``, …

    Raises ``InvalidArgument`` that names the part which cannot be read.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"{argument} is {text!r:.60}; give a type as text, as 'INT'")
    parser = _Ddl(text, argument)
    schema = parser.type(1)
    parser.end()
    return schema


class _Ddl:
    def __init__(self, text: str, argument: str) -> None:
        self._text = text
        self._words: list[str] = re.findall(r"`[^`]+`|\w+|\S", text)
        self._argument = argument
        self._at = 0

    def type(self, level: int) -> dict[str, Any]:
        """The type that begins here, ``level`` types deep."""
        if level > MAX_LEVELS:
            raise self._error(f"has more than {MAX_LEVELS} levels")
        word = self._next()
        match word.upper():
            case "ARRAY":
                self._take("<")
                items = self.type(level + 1)
                self._take(">")
                return {"type": "array", "items": items}
            case "STRUCT":
                return self._struct(level)
            case name if name in _INTEGER_BITS:
                bound = min(2 ** (_INTEGER_BITS[name] - 1) - 1, MAX_INTEGER)
                return {"type": "integer", "minimum": -bound, "maximum": bound}
            case name if name in _DDL_TYPES:
                return {"type": _DDL_TYPES[name]}
        raise self._error(
            f"has {word!r:.40} where a type has to be; use STRING, BIGINT, DOUBLE, BOOLEAN, "
            "ARRAY<…> or STRUCT<name: …>"
        )

    def end(self) -> None:
        if self._at < len(self._words):
            raise self._error(f"goes on after its end with {self._words[self._at]!r:.40}")

    def _struct(self, level: int) -> dict[str, Any]:
        self._take("<")
        fields: dict[str, Any] = {}
        while True:
            name = self._next().strip("`")
            if self._peek() == ":":
                self._take(":")
            fields[name] = self.type(level + 1)
            word = self._next()
            if word == ">":
                break
            if word != ",":
                raise self._error(f"has {word!r:.40} where ',' or '>' has to be")
        return {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self) -> str:
        if self._at == len(self._words):
            raise self._error("ends too early")
        self._at += 1
        return self._words[self._at - 1]

    def _take(self, wanted: str) -> None:
        if (word := self._next()) != wanted:
            raise self._error(f"has {word!r:.40} where {wanted!r} has to be")

    def _error(self, message: str) -> InvalidArgument:
        return InvalidArgument(f"{self._argument} is {self._text!r:.80}, which {message}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _finite(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where} is a number that a DOUBLE cannot hold")
    return number


def _describe(value: Any) -> str:
    names: dict[type, str] = {
        dict: "an object",
        list: "an array",
        str: "text",
        bool: "a boolean",
        int: "a number",
    }
    return "null" if value is None else names.get(type(value), str(type(value).__name__))
