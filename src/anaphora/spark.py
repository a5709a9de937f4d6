"""AI functions in Spark, computed by servers: the road to many machines.

    ai = anaphora.spark.Functions("http://server:8000/v1")
    df.select("id", ai.ai_classify("text", ["praise", "complaint"]))
    ai.register(spark)  # spark.sql("select ai_summarize(text, 20) from reviews")

Executors ask the server themselves, each of their Python workers with a client of its own, so
Anaphora has to be installed there; the API key travels in the plan. Each Arrow batch of rows is a
planned batch, equal rows of it are asked once. ``map_rows`` plans more rows at a time, sorted.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anaphora.batch.client import Client
from anaphora.errors import InvalidArgument, MissingExtra
from anaphora.functions.columns import map_rows, read_column
from anaphora.functions.macros import MACROS, python_name, read_spec
from anaphora.functions.run import answer, shorten
from anaphora.functions.shapes import Shape, with_error
from anaphora.functions.tasks import DEFAULT_MAX_WORDS, FUNCTIONS, Task, pair

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, SparkSession

Open = Callable[[], Client]
Spec = tuple[str, dict[str, Any], bool]  # a function, its arguments, whether a row's error is fatal

_FIX = "failOnError => false keeps the other rows"
_ROWS_PER_PLAN = 10_000  # of map_rows: what an executor holds at a time


class Functions:
    """The functions, computed by the server at ``url``.

    Each gives a column for ``df.select``. All take ``fail_on_error`` and ``model_parameters`` as
    well. Wrong arguments raise ``InvalidArgument`` here; a row that fails ends the Spark job with a
    ``RowFailed``, or with ``fail_on_error=False`` each value is STRUCT<result, errorMessage>.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        try:
            import pandas  # noqa: F401
            import pyarrow  # noqa: F401
            import pyspark  # noqa: F401
        except ImportError as error:
            raise MissingExtra(
                f"Spark needs {error.name}, which is not installed; pip install 'anaphora[spark]'"
            ) from None
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"url is {url!r:.60}; executors need a server's, as http://server:8000/v1"
            )
        self._open = functools.partial(_client, url, model, api_key)

    def ai_query(
        self,
        endpoint: str,
        request: Column | str,
        *,
        return_type: str | None = None,
        response_format: Any = None,
        **more: Any,
    ) -> Column:
        """Answers to prompts; a STRUCT if ``response_format`` is a JSON schema or DDL."""
        arguments = {"return_type": return_type, "response_format": response_format}
        return self._column("ai_query", request, {"endpoint": endpoint, **arguments}, **more)

    def ai_gen(self, prompt: Column | str, **more: Any) -> Column:
        """Answers to prompts."""
        return self._column("ai_gen", prompt, {}, **more)

    def ai_classify(
        self,
        content: Column | str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Column:
        """One of ``labels``; ARRAY<STRING> with ``options={"multilabel": True}``."""
        arguments = {"labels": labels, "options": options}
        return self._column("ai_classify", content, arguments, **more)

    def ai_extract(
        self,
        content: Column | str,
        labels: Sequence[str] | Mapping[str, Any],
        *,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Column:
        """A STRUCT with a field for each label, or as the JSON schema ``labels`` says."""
        return self._column("ai_extract", content, {"labels": labels, "options": options}, **more)

    def ai_summarize(
        self, content: Column | str, max_words: int = DEFAULT_MAX_WORDS, **more: Any
    ) -> Column:
        """Summaries; ``max_words`` 0 is no limit."""
        return self._column("ai_summarize", content, {"max_words": max_words}, **more)

    def ai_translate(self, content: Column | str, to_lang: str, **more: Any) -> Column:
        """Translations into en, de, fr, it, pt, hi, es or th."""
        return self._column("ai_translate", content, {"to_lang": to_lang}, **more)

    def ai_fix_grammar(self, content: Column | str, **more: Any) -> Column:
        """The texts without mistakes."""
        return self._column("ai_fix_grammar", content, {}, **more)

    def ai_mask(self, content: Column | str, labels: Sequence[str], **more: Any) -> Column:
        """The texts with ``[MASKED]`` where they hold what ``labels`` name."""
        return self._column("ai_mask", content, {"labels": labels}, **more)

    def ai_analyze_sentiment(self, content: Column | str, **more: Any) -> Column:
        """positive, negative, neutral or mixed."""
        return self._column("ai_analyze_sentiment", content, {}, **more)

    def ai_similarity(self, first: Column | str, second: Column | str, **more: Any) -> Column:
        """How alike two columns' texts are, 0 to 1; 1 for equal ones."""
        return self._column("ai_similarity", _pairs(first, second), {}, **more)

    def map_rows(
        self,
        df: DataFrame,
        name: str,
        function: str,
        content: str,
        *,
        rows_per_plan: int = _ROWS_PER_PLAN,
        fail_on_error: bool = True,
        **arguments: Any,
    ) -> DataFrame:
        """``df`` with the column ``name`` more: ``function`` on its column ``content``.

        Each partition is sorted by ``content``, so that rows which begin alike meet in the server's
        cache, and ``rows_per_plan`` rows at a time are one planned batch. ``arguments`` are those
        of the method ``function``. To spread equal beginnings over no more partitions than need be,
        call ``df.repartitionByRange(n, content)`` before.
        """
        from pyspark.sql.types import StringType, StructField, StructType

        spec, shape = _check(function, arguments, fail_on_error)
        work = functools.partial(_map_batches, spec, self._open, name, content, rows_per_plan)
        schema = StructType([*df.schema.fields, StructField(name, StringType())])
        mapped = df.sortWithinPartitions(content).mapInPandas(work, schema)
        return mapped.withColumn(name, _typed(mapped[name], shape))

    def register(self, spark: SparkSession) -> None:
        """Gives ``spark.sql`` the functions, with the arguments of the SQL of DuckDB, by name too.

        A function's type is fixed when it is registered: what is a STRUCT or an ARRAY elsewhere is
        its JSON text, for ``from_json``.
        """
        for name in MACROS:
            spark.udf.register(name, _udf(_sql_function(name, self._open)))

    def _column(
        self,
        function: str,
        content: Column | str,
        arguments: dict[str, Any],
        *,
        fail_on_error: bool = True,
        model_parameters: Mapping[str, Any] | None = None,
    ) -> Column:
        arguments = {**arguments, "model_parameters": model_parameters}
        spec, shape = _check(function, arguments, fail_on_error)
        opened = self._open

        def column(rows: pd.Series) -> pd.Series:
            return _series(_texts(spec, opened(), rows))

        return _typed(_udf(column)(content), shape).alias(function)


@functools.lru_cache(maxsize=8)
def _client(url: str, model: str | None, api_key: str | None) -> Client:
    """That of this Python worker, for as long as it lives."""
    return Client(url, model=model, api_key=api_key)


def _check(function: str, arguments: dict[str, Any], fail_on_error: bool) -> tuple[Spec, Shape]:
    """On the driver, before anything runs."""
    if function not in FUNCTIONS:
        raise InvalidArgument(f"there is no function {function!r:.40}: {', '.join(FUNCTIONS)}")
    task = FUNCTIONS[function](**arguments)
    shape = task.shape if fail_on_error else with_error(task.shape)
    return (function, arguments, fail_on_error), shape


def _typed(column: Column, shape: Shape) -> Column:
    """What workers give is text; values of other types are JSON in it, so that NULL can be one."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.pandas.types import from_arrow_type

    if shape.kind in ("string", "json"):
        return column
    kind: Any = from_arrow_type(shape.arrow())
    if shape.kind in ("object", "array"):
        return F.from_json(column, kind)
    return column.cast(kind)


def _texts(spec: Spec, client: Client, rows: pd.Series) -> list[str | None]:
    function, arguments, fail_on_error = spec
    task = FUNCTIONS[function](**arguments)
    texts = read_column(rows, task)
    values = map_rows(task, texts, client, fail_on_error=fail_on_error)
    return [_text(value) for value in values]


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _map_batches(
    spec: Spec,
    opened: Open,
    name: str,
    content: str,
    rows_per_plan: int,
    batches: Iterator[pd.DataFrame],
) -> Iterator[pd.DataFrame]:
    """One partition, on an executor: as many Arrow batches together as make a plan."""
    import pandas as pd

    held: list[pd.DataFrame] = []
    for batch in itertools.chain(batches, [None]):
        if batch is not None:
            held.append(batch)
            if sum(map(len, held)) < rows_per_plan:
                continue
        if held:
            frame = pd.concat(held, ignore_index=True)
            held.clear()
            yield frame.assign(**{name: _series(_texts(spec, opened(), frame[content]))})


def _sql_function(function: str, opened: Open) -> Callable[..., Any]:
    def called(*given: pd.Series, **named: pd.Series) -> pd.Series:
        columns = {**dict(zip(MACROS[function].names, given, strict=False)), **named}
        return _series(_sql_texts(function, columns, opened()))

    return called


def _sql_texts(function: str, columns: Mapping[str, Any], client: Client) -> list[str | None]:
    """Arguments are columns too: equal ones make one task."""
    macro = MACROS[function]
    if unknown := [name for name in columns if name not in macro.names]:
        known = ", ".join(macro.names)
        raise InvalidArgument(f"{function} has no argument {unknown[0]!r:.60}; it has {known}")
    listed = {name: _values(column) for name, column in columns.items()}
    contents = [listed.pop(name) for name in macro.rows if name in listed]
    found: list[str | None] = [None] * len(contents[0])
    asked: list[tuple[int, Task, bool, str]] = []
    for index, texts in enumerate(zip(*contents, strict=True)):
        arguments = {python_name(name): values[index] for name, values in listed.items()}
        task, is_strict = read_spec(json.dumps({"function": function, **arguments}))
        if None not in texts:
            asked.append((index, task, is_strict, pair(*texts) if len(texts) > 1 else texts[0]))
    outcomes = answer(client, [(task, row) for _, task, _, row in asked])
    for (index, _, is_strict, row), outcome in zip(asked, outcomes, strict=True):
        where = f"{function}, row {shorten(row)}"
        value = outcome.unwrap(where, _FIX) if is_strict else outcome.as_struct()
        found[index] = _text(value)
    return found


def _values(column: Any) -> list[Any]:
    """A column's values, JSON-compatible; one of structs comes as a table."""
    if type(column).__name__ == "DataFrame":
        return [_plain(row) for row in column.to_dict("records")]
    return [_plain(value) for value in column]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if hasattr(value, "tolist"):  # of NumPy
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if value != value else value  # NaN is pandas' NULL


def _pairs(first: Column | str, second: Column | str) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    one, other = (F.col(c) if isinstance(c, str) else c for c in (first, second))
    both = one.isNotNull() & other.isNotNull()
    return F.when(both, F.to_json(F.array(one, other)))


def _series(values: list[str | None]) -> pd.Series:
    import pandas as pd

    return pd.Series(values, dtype=object)


def _udf(function: Callable[..., pd.Series]) -> Any:
    """A pandas UDF that gives text. Spark reads from annotations that columns go in and out; those
    here name no class yet."""
    import pandas as pd
    from pyspark.sql.pandas import functions

    function.__annotations__ = dict.fromkeys(function.__annotations__, pd.Series)
    make: Any = functions.pandas_udf
    return make(function, "string")
