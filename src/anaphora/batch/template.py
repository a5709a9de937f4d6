"""A prompt for each row of a table: a Jinja template whose variables are the row's columns.

    {% block system %}Say what the review is about.{% endblock %}
    {% block user %}
    Product: {{ product }}
    Review: {{ review }}
    {% endblock %}

Without blocks all of it is the user's message.
"""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Context

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.text.sandbox import TemplateEnvironment
from anaphora.types import Message

ROLES = ("system", "user")
ROW = "row"  # all columns by name, for those whose name is no identifier
_ROW_ITEM = re.compile(r"\brow\[(['\"])(.+?)\1\]")
_BLOCK_MARK = re.compile(r"[ \t]*(\{%-?\s*(?:block\s+\w+|endblock(?:\s+\w+)?)\s*-?%\})\n?")
_COLUMN_LINE = re.compile(r"[^{}]*\{\{[^{}]*\}\}[^{}]*")  # one expression, no statement


class PromptTemplate:
    """Compiled once, rendered for each row. Raises ``ConfigError`` for one that cannot be used."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = TemplateEnvironment({})
        environment.undefined = jinja2.StrictUndefined
        environment.finalize = _finalize
        environment.filters["tojson"] = _tojson
        try:
            tree = environment.parse(source)
            self.columns = meta.find_undeclared_variables(tree)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                f"--prompt-template cannot be read: {error}; a column whose name is no plain word "
                "is {{ row['its name'] }}"
            ) from None
        self.columns -= set(environment.globals)
        self.names_columns = bool(self.columns)
        self.columns |= {match[2] for match in _ROW_ITEM.finditer(source)}
        self.columns.discard(ROW)
        self._environment = environment
        self._blocks = _blocks(tree)

    @classmethod
    def of(cls, given: str) -> PromptTemplate:
        """A template itself, or the path of a file that holds one."""
        if "{{" in given or "{%" in given:
            return cls(given)
        try:
            return cls(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"--prompt-template is {given!r}, which has no {{{{ column }}}} in it and is no "
                f"file that can be read ({why}); give a template or a path of one"
            ) from None

    def messages(self, values: Mapping[str, Any]) -> list[Message]:
        """The chat for one row. Raises ``InvalidRequest`` that names the column."""
        parts: Mapping[str, str | None] = self._blocks or {"user": None}
        rendered = {role: self._render(values, block) for role, block in parts.items()}
        found: list[Message] = [
            {"role": role, "content": rendered[role]} for role in ROLES if rendered.get(role)
        ]
        if not rendered.get("user"):
            raise InvalidRequest("the template's user part is empty for this row")
        return found

    def _render(self, values: Mapping[str, Any], block: str | None) -> str:
        try:
            variables = {ROW: values, **values}
            return self._environment.render(self._template, variables, block).strip()
        except jinja2.UndefinedError as error:
            raise InvalidRequest(
                f"the template needs what the row does not have: {error}; it has "
                f"{', '.join(map(str, values)) or 'no column'}"
            ) from None
        except InvalidRequest as error:  # raised where a value is printed, without its name
            names = [name for name in sorted(self.columns) if _is_bad(values.get(name))]
            where = f"column {' or '.join(map(repr, names))}" if names else "a value"
            raise InvalidRequest(f"{where} {error}") from None
        except Exception as error:  # whatever an expression does to a value
            raise InvalidRequest(f"the template fails on this row: {error}") from None

    @property
    def column_lines(self) -> list[dict[str, str]]:
        """Runs of neighbouring lines with one column each, which may change places: by column,
        the line."""
        return [dict(run) for _, run in self._runs()]

    def reordered(self, orders: Sequence[Sequence[str]]) -> PromptTemplate:
        """The same with each run of ``column_lines`` in another order."""
        lines = self._lines()
        for (start, run), order in zip(self._runs(), orders, strict=True):
            by_column = dict(run)
            lines[start : start + len(run)] = [by_column[column] for column in order]
        return PromptTemplate("\n".join(lines))

    def _runs(self) -> list[tuple[int, list[tuple[str, str]]]]:
        runs: list[tuple[int, list[tuple[str, str]]]] = []
        run: list[tuple[str, str]] = []
        for number, line in enumerate([*self._lines(), ""]):
            column = self._column_of(line)
            if column is not None and column not in dict(run):
                run.append((column, line))
                continue
            if len(run) > 1:
                runs.append((number - len(run), run))
            run = [] if column is None else [(column, line)]
        return runs

    def _lines(self) -> list[str]:
        """Those of the source, with the marks of blocks alone on theirs."""
        if re.search(r"\{#|\{%-?\s*raw", self.source):
            return []  # lines in there are no lines of columns
        return _BLOCK_MARK.sub(r"\n\1\n", self.source).split("\n")

    def _column_of(self, line: str) -> str | None:
        """The column of a line that holds nothing else; None for any other line."""
        if not _COLUMN_LINE.fullmatch(line):
            return None
        names = meta.find_undeclared_variables(self._environment.parse(line))
        if names == {ROW} and (item := _ROW_ITEM.search(line)) is not None:
            return item[2]
        return names.pop() if len(names) == 1 and ROW not in names else None

    def line(self, line: str, values: Mapping[str, Any]) -> str:
        """One of ``column_lines`` for a row, empty where it cannot be rendered."""
        try:
            variables = {ROW: values, **values}
            return self._environment.render(self._environment.from_string(line), variables)
        except Exception:
            return ""


def _blocks(tree: nodes.Template) -> dict[str, str]:
    """Roles whose part is a block of that name."""
    names = [block.name for block in tree.find_all(nodes.Block)]
    if not names:
        return {}
    if unknown := set(names) - set(ROLES):
        raise ConfigError(
            f"--prompt-template has the block {unknown.pop()!r}; blocks are {' and '.join(ROLES)}"
        )
    if "user" not in names:
        raise ConfigError("--prompt-template has a system block but no user block; add one")
    outside = [
        data
        for node in tree.body
        if isinstance(node, nodes.Output)
        for data in node.nodes
        if not isinstance(data, nodes.TemplateData) or data.data.strip()
    ]
    if outside:
        raise ConfigError(
            "--prompt-template has text outside its blocks, which no message would get; "
            "put it into one of them"
        )
    return {name: name for name in names}


@jinja2.pass_context  # which also keeps Jinja from calling it at compile time
def _finalize(context: Context, value: Any) -> Any:  # noqa: ARG001
    """What is printed for a value of a column."""
    if value is None:
        raise InvalidRequest("is null; write {{ … or '' }} to take it as empty")
    if isinstance(value, bytes):
        raise InvalidRequest("holds bytes; make it text first")
    if isinstance(value, list | dict):
        raise InvalidRequest("holds a list or an object; write {{ … | tojson }}")
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _is_bad(value: Any) -> bool:
    return not isinstance(
        value, str | int | float | decimal.Decimal | datetime.date | datetime.time
    )
