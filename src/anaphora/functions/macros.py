"""The functions as SQL knows them: parameters, and the JSON in which a call reaches Python.

A call is a *spec*, a function with its arguments as JSON, and a row's text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from anaphora.errors import InvalidArgument
from anaphora.functions.arguments import read_boolean
from anaphora.functions.shapes import with_error
from anaphora.functions.tasks import FUNCTIONS, Task

_RUNNING = "failOnError := true, modelParameters := NULL"
# Arguments that need not be known when a query is bound, with some that are valid.
_OF_ROWS: dict[str, dict[str, Any]] = {
    "ai_classify": {"labels": ["a", "b"]},
    "ai_mask": {"labels": ["a"]},
    "ai_translate": {"to_lang": "en"},
}
_PYTHON_NAMES = {
    "returnType": "return_type",
    "failOnError": "fail_on_error",
    "modelParameters": "model_parameters",
    "responseFormat": "response_format",
}


@dataclasses.dataclass(frozen=True)
class Macro:
    """``parameters`` as DuckDB declares them; ``rows`` are those that are columns of text."""

    parameters: str
    rows: tuple[str, ...] = ("content",)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in order."""
        return [one.partition(" := ")[0] for one in self.parameters.split(", ")]

    def row(self) -> str:
        """SQL for the row's text: JSON if it is of several columns, NULL if one of them is."""
        if len(self.rows) == 1:
            return f"({self.rows[0]})::VARCHAR"
        are_there = " AND ".join(f"{name} IS NOT NULL" for name in self.rows)
        texts = ", ".join(f"{name}::VARCHAR" for name in self.rows)
        return f"(CASE WHEN {are_there} THEN to_json([{texts}]) END)::VARCHAR"

    def spec(self, function: str, *, is_bound: bool) -> str:
        """SQL for the spec; ``is_bound``: as far as it decides the type."""
        left_out = (*self.rows, *(_OF_ROWS.get(function, ()) if is_bound else ()))
        names = {python_name(name): name for name in self.names if name not in left_out}
        pairs = ", ".join(f"'{python}': {name}" for python, name in names.items())
        return f"to_json({{'function': '{function}', {pairs}}})::VARCHAR"


MACROS = {
    "ai_query": Macro(
        f"endpoint, request, returnType := NULL, {_RUNNING}, responseFormat := NULL", ("request",)
    ),
    "ai_gen": Macro(f"prompt, {_RUNNING}", ("prompt",)),
    "ai_classify": Macro(f"content, labels, options := NULL, {_RUNNING}"),
    "ai_extract": Macro(f"content, labels, options := NULL, {_RUNNING}"),
    "ai_summarize": Macro(f"content, max_words := 50, {_RUNNING}"),
    "ai_translate": Macro(f"content, to_lang, {_RUNNING}"),
    "ai_fix_grammar": Macro(f"content, {_RUNNING}"),
    "ai_mask": Macro(f"content, labels, {_RUNNING}"),
    "ai_analyze_sentiment": Macro(f"content, {_RUNNING}"),
    "ai_similarity": Macro(f"expr1, expr2, {_RUNNING}", ("expr1", "expr2")),
}


def python_name(name: str) -> str:
    """A parameter's name in Python's style."""
    return _PYTHON_NAMES.get(name, name)


@functools.lru_cache(maxsize=4096)
def read_spec(spec: str) -> tuple[Task, bool]:
    """The task, and whether a row's error is the query's. Raises ``InvalidArgument``."""
    arguments = json.loads(spec)
    function = arguments.pop("function")
    given = arguments.pop("fail_on_error", True)
    is_strict = read_boolean(given, f"{function}'s failOnError")
    return FUNCTIONS[function](**arguments), is_strict


@functools.lru_cache(maxsize=4096)
def row_fault(spec: str) -> str | None:
    """What is wrong with a row's own arguments, where that is the row's error; None if nothing is.

    Raises ``InvalidArgument`` where it is the query's.
    """
    try:
        read_spec(spec)
    except InvalidArgument as error:
        if _read_bound(json.loads(spec))[1]:
            raise
        return str(error)
    return None


def _read_bound(arguments: dict[str, Any]) -> tuple[Task, bool]:
    valid = _OF_ROWS.get(arguments["function"], {})
    return read_spec(json.dumps({**arguments, **valid}))


@functools.lru_cache(maxsize=4096)
def structure(spec: str) -> str:
    """The type of a bound call's values, for DuckDB's ``from_json``. Raises ``InvalidArgument``."""
    task, is_strict = _read_bound(json.loads(spec))
    shape = task.shape if is_strict else with_error(task.shape)
    return json.dumps(shape.duckdb())
