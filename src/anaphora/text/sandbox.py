"""The Jinja environment for chat templates: as transformers sets it up, and bounded.

A template comes with a checkpoint and is as trustworthy as its source. Jinja's sandbox keeps it
from reaching Python; the limits here keep it from eating the server's memory and time.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 2**24
MAX_WORK_CHARS = 2**27  # of all strings that a rendering builds on its way
MAX_STEPS = 200_000  # loop rounds, macro calls and numbers in ranges
_MAX_NUMBER_BITS = 2**12
_MAX_INDENT = 64
_ITEM_COST = 64  # characters copied in the time in which a filter handles one item
_MAX_DIGITS = 400
_MAX_DATE_FORMAT = 256
_MAX_ITEMS = 1_000_000  # of a list, or of nested data that is printed

# Jinja's other filters are of no use in a prompt, and some turn a number into megabytes.
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
    *("float", "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort"),
    *("striptags", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)


@dataclasses.dataclass
class Budget:
    """What one rendering may still do. Exceeding it raises ``SecurityError``."""

    steps: int = MAX_STEPS
    chars: int = MAX_WORK_CHARS

    def spend_steps(self, count: int) -> None:
        """Account for ``count`` rounds."""
        self.steps -= count
        if self.steps < 0:
            raise SecurityError(f"the template runs for more than {MAX_STEPS} steps")

    def spend_chars(self, count: int) -> None:
        """Account for a string of ``count`` characters, before it is built where possible."""
        self.chars -= count
        if count > MAX_OUTPUT_CHARS or self.chars < 0:
            raise SecurityError(f"the template builds more than {MAX_OUTPUT_CHARS} characters")


_BUDGET: contextvars.ContextVar[Budget] = contextvars.ContextVar("chat_template_budget")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, globals_: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
            optimized=False,  # folding constants would run filters at compile time, unbounded
        )
        self.filters = {name: _charged(self.filters[name]) for name in _FILTERS}
        self.filters |= {
            "tojson": _tojson,
            "join": _join_filter,
            "replace": _replace,
            "indent": _indent,
            "format": lambda value, *args: _percent(str(value), args),
            "string": lambda value: _concat([value]),
            "sum": _sum,
            "concat": _concat,
            "int": _int,
            "charged": _charge,
        }
        self.globals = {
            "namespace": self.globals["namespace"],
            "dict": dict,
            "range": _range,
            "raise_exception": _raise_exception,
            **globals_,
        }

    def render(
        self, template: jinja2.Template, variables: Mapping[str, Any], block: str | None = None
    ) -> str:
        """The output, or that of one block of it. Raises whatever the template provokes,
        ``SecurityError`` at a limit.
        """
        token = _BUDGET.set(Budget())
        try:
            parts: list[str] = []
            num_chars = 0
            pieces = template.generate(dict(variables))
            if block is not None:
                pieces = template.blocks[block](template.new_context(dict(variables)))
            for part in pieces:
                num_chars += len(part)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"the output exceeds {MAX_OUTPUT_CHARS} characters")
                parts.append(part)
            return "".join(parts)
        finally:
            _BUDGET.reset(token)

    def step(self) -> bool:
        """Called by the instrumented template in every loop round and macro; always true."""
        _BUDGET.get().spend_steps(1)
        return True

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        instrumented = _Instrument().visit(tree)
        assert isinstance(instrumented, nodes.Template)
        return instrumented

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result is bounded in size."""
        if operator == "%" and isinstance(left, str):
            return _percent(left, right)
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and right > 0:
                _check_bits(left.bit_length() * right)
        elif isinstance(left, str) and isinstance(right, str):
            _BUDGET.get().spend_chars(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _check_items(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls, with the methods of strings that can amplify bounded."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            return _call_str_method(owner, obj, args, kwargs)
        if isinstance(owner, int | float | bytes):
            raise SecurityError("methods of numbers and bytes are not for chat templates")
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` without widths, which would print any number of spaces."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\{[^}]*:", value.__self__):
            raise SecurityError("format specifications are not for chat templates")
        return wrapped


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; for serving it is plain."""

    tags = {"generation"}  # noqa: RUF012  the base class wants a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Counts loop rounds and macro calls, and routes ``~`` through a bounded filter.

    The counter is an attribute of the environment, which a template can neither name nor replace.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  named by the library
        self.generic_visit(node)
        node.body.insert(0, _count_step(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_step(node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _count_step(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _count_step(node.lineno))
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # copies; compiled to plain Python
            node.node = nodes.Filter(node.node, "charged", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "concat", [], [], None, None, lineno=node.lineno)


def _step(lineno: int) -> nodes.Call:
    attribute = nodes.EnvironmentAttribute("step", lineno=lineno)
    return nodes.Call(attribute, [], [], None, None, lineno=lineno)


def _count_step(lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_step(lineno), lineno=lineno)


@jinja2.pass_context  # which also keeps Jinja from calling it at compile time
def _finalize(context: Context, value: Any) -> Any:  # noqa: ARG001
    _spend_printing(value)
    return value


def _spend_printing(value: Any) -> None:
    """Account for ``str(value)``. Shared sublists print once for each mention, so walk them all."""
    num_chars = num_items = 0
    stack = [value]
    while stack:
        item = stack.pop()
        num_items += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
        if num_items > _MAX_ITEMS:
            _check_items(num_items)
    _BUDGET.get().spend_chars(num_chars + num_items)


def _check_items(count: int) -> None:
    if count > _MAX_ITEMS:
        raise SecurityError(f"the template builds a list of more than {_MAX_ITEMS} items")
    _BUDGET.get().spend_chars(count)


def _charge(value: Any) -> Any:
    """Account for a pass over ``value``, or for a copy of it."""
    if isinstance(value, str):
        _BUDGET.get().spend_chars(len(value))
    elif isinstance(value, list | tuple | dict):
        _BUDGET.get().spend_chars(_ITEM_COST * len(value))
    return value


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that accounts for what it reads and what it makes."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context or environment

    @functools.wraps(function)  # with Jinja's marks on it
    def charged(*args: Any, **kwargs: Any) -> Any:
        for value in args[first : first + 1]:
            _charge(value)
        return _charge(function(*args, **kwargs))

    return charged


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise SecurityError(f"int is given {len(value)} characters; at most {_MAX_DIGITS}")
    return jinja2.filters.do_int(value, default, base)


def strftime(day: datetime.date) -> Callable[[str], str]:
    """``strftime_now`` for templates, always that of ``day``, for formats of a sane length."""

    def strftime_now(format: str) -> str:  # noqa: A002  transformers' name
        if len(format) > _MAX_DATE_FORMAT:
            raise SecurityError(f"a date format has {len(format)} characters")
        return day.strftime(format)

    return strftime_now


def _check_bits(count: int) -> None:
    if count > _MAX_NUMBER_BITS:
        raise SecurityError(f"the template computes a number of {count} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and count > 0:
            if isinstance(value, str):
                _BUDGET.get().spend_chars(len(value) * count)
            elif isinstance(value, list | tuple):
                _check_items(len(value) * count)


def _call_str_method(
    owner: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = method.__name__
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "encode", "translate"):
        raise SecurityError(f"str.{name} is not for chat templates")
    if name == "join" and len(args) == 1:
        return _join(args[0], owner, strict=True)
    if name == "replace" and len(args) >= 2:
        return _replace(owner, *args)
    result = method(*args, **kwargs)
    if isinstance(result, str):
        _BUDGET.get().spend_chars(len(result))
    elif isinstance(result, list | tuple):
        _check_items(len(result))
    return result


def _concat(items: Iterable[Any]) -> str:
    parts = list(items)
    _spend_printing(parts)
    return "".join([str(part) for part in parts])


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    items: Iterable[Any] = value
    if attribute is not None:
        getter = jinja2.filters.make_attrgetter(environment, attribute)
        items = map(getter, value)
    return _join(items, d)


def _join(items: Iterable[Any], separator: Any = "", *, strict: bool = False) -> str:
    parts = list(items)
    separator = str(separator)
    _check_items(len(parts))
    _spend_printing(parts)
    _BUDGET.get().spend_chars(len(separator) * len(parts))
    text: str = separator.join(parts if strict else [str(part) for part in parts])
    return text


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    num_found = text.count(old)
    _BUDGET.get().spend_chars(len(text) + num_found * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = " " * width if isinstance(width, int) and width <= _MAX_INDENT else width
    text = str(value)
    if not isinstance(prefix, str) or len(prefix) > _MAX_INDENT:
        raise SecurityError(f"indent is {width!r}; at most {_MAX_INDENT} are allowed")
    lines = text.splitlines() or [""]
    _BUDGET.get().spend_chars(len(text) + len(prefix) * len(lines))
    if text.endswith(("\n", "\r")):
        lines.append("")
    rest = [prefix + line if line or blank else line for line in lines[1:]]
    return "\n".join([(prefix if first else "") + lines[0], *rest])


def _percent(template: str, values: Any) -> str:
    if re.search(r"%[^%a-zA-Z]*[*\d]", template):
        raise SecurityError("widths in % formats are not for chat templates")
    _spend_printing(list(values) if isinstance(values, tuple) else [values])
    text: str = template % values
    return text


def _sum(value: Iterable[Any], attribute: str | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("sum is for numbers")
    return sum((item[attribute] for item in value) if attribute else value, start)


def _range(*args: int) -> range:
    numbers = range(*args)
    _BUDGET.get().spend_steps(len(numbers))
    return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    if indent is not None and not 0 <= int(indent) <= _MAX_INDENT:
        raise SecurityError(f"tojson's indent is {indent}; at most {_MAX_INDENT} are allowed")
    _spend_printing(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))
