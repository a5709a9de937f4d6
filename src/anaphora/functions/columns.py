"""AI functions on columns of Arrow, pandas and polars, and on lists.

Each takes a column of text and gives one of the same kind and length. NULL stays NULL and costs
nothing; an empty text is a value. A row that fails raises ``RowFailed``, which names it; with
``fail_on_error=False`` each value is STRUCT<result, errorMessage> instead. All rows of a call are
one planned batch: equal ones are computed once, those that begin alike meet in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Required, TypedDict, TypeVar, Unpack

from anaphora.batch.client import Client
from anaphora.errors import InvalidArgument
from anaphora.functions import tasks
from anaphora.functions.run import OnDone, answer
from anaphora.functions.shapes import Shape, with_error
from anaphora.functions.tasks import DEFAULT_MAX_WORDS, Task

Column = TypeVar("Column")

_FIX = "fail_on_error=False keeps the other rows"


class Running(TypedDict, total=False):
    """``on_done`` is called with each row's reply, as ``Usage.add``."""

    client: Required[Client]
    fail_on_error: bool
    on_done: OnDone | None


def ai_query(
    endpoint: str,
    request: Column,
    *,
    return_type: str | None = None,
    response_format: Any = None,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """Answers to prompts; a STRUCT if ``response_format`` is a JSON schema or DDL."""
    task = tasks.ai_query(
        endpoint,
        return_type=return_type,
        response_format=response_format,
        model_parameters=model_parameters,
    )
    return _map(task, request, **running)


def ai_gen(
    prompt: Column,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """Answers to prompts."""
    return _map(tasks.ai_gen(model_parameters=model_parameters), prompt, **running)


def ai_classify(
    content: Column,
    labels: Sequence[str] | dict[str, str],
    *,
    options: dict[str, Any] | None = None,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """One of ``labels`` for each row; lists of them with ``options={"multilabel": True}``."""
    task = tasks.ai_classify(labels, options=options, model_parameters=model_parameters)
    return _map(task, content, **running)


def ai_extract(
    content: Column,
    labels: Sequence[str] | dict[str, Any],
    *,
    options: dict[str, Any] | None = None,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """STRUCTs with a field for each label, or as the JSON schema ``labels`` says."""
    task = tasks.ai_extract(labels, options=options, model_parameters=model_parameters)
    return _map(task, content, **running)


def ai_summarize(
    content: Column,
    max_words: int = DEFAULT_MAX_WORDS,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """Summaries; ``max_words`` 0 is no limit."""
    task = tasks.ai_summarize(max_words, model_parameters=model_parameters)
    return _map(task, content, **running)


def ai_translate(
    content: Column,
    to_lang: str,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """Translations into en, de, fr, it, pt, hi, es or th."""
    task = tasks.ai_translate(to_lang, model_parameters=model_parameters)
    return _map(task, content, **running)


def ai_fix_grammar(
    content: Column,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """The texts without mistakes."""
    return _map(tasks.ai_fix_grammar(model_parameters=model_parameters), content, **running)


def ai_mask(
    content: Column,
    labels: Sequence[str],
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """The texts with ``[MASKED]`` where they hold what ``labels`` name."""
    return _map(tasks.ai_mask(labels, model_parameters=model_parameters), content, **running)


def ai_analyze_sentiment(
    content: Column,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """positive, negative, neutral or mixed."""
    return _map(tasks.ai_analyze_sentiment(model_parameters=model_parameters), content, **running)


def ai_similarity(
    first: Column,
    second: Any,
    *,
    model_parameters: dict[str, Any] | None = None,
    **running: Unpack[Running],
) -> Column:
    """How alike two columns' texts are, 0 to 1; 1 for equal ones. ``second`` may be one text."""
    task = tasks.ai_similarity(model_parameters=model_parameters)
    firsts = read_column(first, task)
    seconds = [second] * len(firsts) if isinstance(second, str) else read_column(second, task)
    if len(firsts) != len(seconds):
        raise InvalidArgument(
            f"ai_similarity's columns have {len(firsts)} and {len(seconds)} rows; "
            "they must be of one length"
        )
    rows = [
        None if a is None or b is None else tasks.pair(a, b)
        for a, b in zip(firsts, seconds, strict=True)
    ]
    return _map(task, first, rows, **running)


def _map(
    task: Task,
    column: Column,
    rows: Sequence[str | None] | None = None,
    /,
    *,
    client: Client | None = None,
    fail_on_error: bool = True,
    on_done: OnDone | None = None,
    **unknown: Any,
) -> Column:
    if unknown:
        raise InvalidArgument(
            f"{task.function} has no argument {next(iter(unknown))!r}; beside its own it has "
            "client, fail_on_error, on_done and model_parameters"
        )
    if not isinstance(client, Client):
        given = "missing" if client is None else type(client).__name__
        raise InvalidArgument(f"{task.function}'s client is {given}; give an anaphora.Client")
    texts = read_column(column, task) if rows is None else rows
    values = map_rows(task, texts, client, fail_on_error=fail_on_error, on_done=on_done)
    shape = task.shape if fail_on_error else with_error(task.shape)
    return _like(column, values, shape)


def map_rows(
    task: Task,
    rows: Sequence[str | None],
    client: Client,
    *,
    fail_on_error: bool,
    on_done: OnDone | None = None,
) -> list[Any]:
    """Values of a column's rows. Raises ``RowFailed`` for the first that failed."""
    present = [index for index, row in enumerate(rows) if row is not None]
    outcomes = answer(client, [(task, rows[index] or "") for index in present], on_done)
    values: list[Any] = [None] * len(rows)
    for index, outcome in zip(present, outcomes, strict=True):
        if fail_on_error:
            values[index] = outcome.unwrap(f"{task.function}, row {index}", _FIX)
        else:
            values[index] = outcome.as_struct()
    return values


def read_column(column: Any, task: Task) -> list[str | None]:
    """A column's texts; None for NULL. Raises ``InvalidArgument`` that names a row of another
    type."""
    kind = _kind(column)
    values: list[str | None]
    if kind == "pandas":
        values = column.astype(object).where(column.notna(), None).tolist()
    elif kind == "list":
        values = list(column)
    elif kind is not None:
        values = column.to_pylist() if kind == "pyarrow" else column.to_list()
    else:
        raise InvalidArgument(
            f"{task.function}'s column is {type(column).__name__}; give an Arrow array, a pandas "
            "or polars Series, or a list"
        )
    for index, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(
                f"{task.function}, row {index}: the value is {type(value).__name__}; it must be "
                "text or NULL"
            )
    return values


def _like(column: Column, values: list[Any], shape: Shape) -> Column:
    """``values`` as a column of the same kind."""
    result: Any
    given: Any = column
    match _kind(column):
        case "pyarrow":
            import pyarrow as pa

            result = pa.array(values, shape.arrow())
            if isinstance(given, pa.ChunkedArray):
                result = pa.chunked_array([result])
        case "polars":
            import polars
            import pyarrow as pa

            result = polars.Series(given.name, polars.from_arrow(pa.array(values, shape.arrow())))
        case "pandas":
            result = type(given)(
                values, index=given.index, name=given.name, dtype=_pandas_dtype(given, shape)
            )
        case _:
            result = type(given)(values)
    return result  # type: ignore[no-any-return]


def _pandas_dtype(column: Any, shape: Shape) -> Any:
    if type(column.dtype).__name__ == "ArrowDtype":
        return type(column.dtype)(shape.arrow())
    if shape.kind == "string" and type(column.dtype).__name__ != "CategoricalDtype":
        return column.dtype  # object, or one of pandas' own for text
    return {"float": "float32", "number": "float64"}.get(shape.kind, object)


def _kind(column: Any) -> str | None:
    """Whose column it is, without importing any of them."""
    if isinstance(column, list | tuple):
        return "list"
    module, name = type(column).__module__.partition(".")[0], type(column).__name__
    if module in ("pandas", "polars"):
        return module if name == "Series" else None
    return "pyarrow" if module == "pyarrow" and name.endswith("Array") else None
