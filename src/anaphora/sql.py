"""AI functions in DuckDB.

    registration = anaphora.sql.register(con, "http://127.0.0.1:8000/v1")
    con.sql("select ai_classify(text, ['good', 'bad']) from reviews")

One function of Python's stands behind all: it takes a function with its arguments as JSON, and the
row's text, and gives the value as JSON. Macros give it names and arguments; the type follows from
the arguments when a query is bound. DuckDB hands over up to 2,048 rows at a time, and these are one
planned batch. ``Registration.sql`` makes one of a whole column.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from anaphora.batch.client import Client, Reply, Target
from anaphora.errors import AnaphoraError, InvalidArgument, MissingExtra
from anaphora.functions.macros import MACROS, read_spec, row_fault, structure
from anaphora.functions.run import Outcome, answer, check_endpoint, shorten
from anaphora.functions.usage import Usage

if TYPE_CHECKING:
    import duckdb

_VARIABLE = "anaphora_run"  # of a connection: which run its query belongs to
_MEMO_ROWS = 2**16
_MAX_PASSES = 64
_MAX_CALLS = 8  # of one function in a query; if there are more, their arguments are a column's
_NO_CONSTANT = 'The "structure" argument in function "from_json" must be a constant'
_CONSTANTS = (
    "an AI function has a column or a subquery where a constant has to be: all arguments decide "
    "the type but its texts, to_lang, and the labels of ai_classify and ai_mask; write the value"
)
_FIX = "failOnError => false keeps the other rows"
# Which rows are looked at is then known only while the query runs, or differs from run to run.
_ONCE = re.compile(
    r'"name": "(?:STREAMING_)?(?:LIMIT|LIMIT_PERCENT|\w*SAMPLE|REC\w*CTE\w*'
    r'|\w*(?:INSERT|UPDATE|DELETE|MERGE_INTO|COPY)\w*)"'
)
_ONCE_IN_TEXT = re.compile(r"\b(?:table)?sample\b|/dev/(?:stdin|fd)", re.IGNORECASE)
_numbers = itertools.count(1)

Key = tuple[str, str]  # a function with its arguments, and a row


def register(
    con: duckdb.DuckDBPyConnection,
    target: Target | Client,
    *,
    model: str | None = None,
    api_key: str | None = None,
    on_done: Callable[[Reply], None] | None = None,
) -> Registration:
    """Gives ``con`` the AI functions, computed by ``target``: a URL, an ``LLM``, a model's name, or
    a ``Client``. The functions are this connection's alone and last as long as it.

    ``on_done`` is called with each reply. Raises as ``Client``, and ``MissingExtra``.
    """
    check_extra()
    is_ours = not isinstance(target, Client)
    client = target if isinstance(target, Client) else Client(target, model=model, api_key=api_key)
    try:
        return Registration(con, client, is_ours=is_ours, on_done=on_done)
    except BaseException:
        if is_ours:
            client.close()
        raise


def check_extra() -> None:
    """Raises ``MissingExtra`` if DuckDB or pyarrow is not installed."""
    try:
        import duckdb  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"SQL needs {error.name}, which is not installed; pip install 'anaphora[sql]'"
        ) from None


class Registration:
    """The AI functions of one connection. ``usage`` counts what they cost."""

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        client: Client,
        *,
        is_ours: bool,
        on_done: Callable[[Reply], None] | None,
    ) -> None:
        self.client = client
        self.usage = Usage("different row")
        self.num_rows_asked = 0  # those of usage, and those that are being computed
        self._con = con
        self._is_ours = is_ours
        self._on_done = on_done
        self._memo = _Memo()
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()  # of sql: a connection is for one thread at a time
        self._is_interrupted = False
        self._scans_all_frames: bool | None = None  # the setting to restore
        number = next(_numbers)
        self._answers, self._types = f"anaphora_ai_{number}", f"anaphora_type_{number}"
        self._create()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what was started; the functions stay and fail."""
        self._restore()
        if self._is_ours:
            self.client.close()

    def _create(self) -> None:
        options: dict[str, Any] = {"type": "arrow", "null_handling": "special"}
        text = "VARCHAR"
        con = self._con
        con.create_function(self._answers, self._answer, [text, text, text], text, **options)
        con.create_function(self._types, self._structures, [text], text, **options)
        run = f"getvariable('{_VARIABLE}')::VARCHAR"
        for name, macro in MACROS.items():
            called = f"{run}, {macro.spec(name, is_bound=False)}, {macro.row()}"
            con.execute(
                f"CREATE OR REPLACE TEMP MACRO {name}({macro.parameters}) AS from_json("
                f"{self._answers}({called}), {self._types}({macro.spec(name, is_bound=True)}))"
            )

    def sql(
        self, query: str, params: Mapping[str, Any] | list[Any] | None = None
    ) -> duckdb.DuckDBPyRelation:
        """The query's result, all of it, with each column as one planned batch.

        The query runs first to see which rows the functions are asked for, and again with their
        values, as often as functions stand on others'. One that holds LIMIT, a sample, a
        recursive CTE or one that writes, reads standard input, calls ``random()`` and the like,
        asks at a temperature above 0, is in a transaction (which an error would end) or is no
        single SELECT, runs once, with a batch for each vector of rows. The rows are held by DuckDB,
        so that each column keeps its type. Raises DuckDB's errors, ``RowFailed`` and
        ``InvalidArgument``.
        """
        with self._lock, self._interruptible(), self._running() as run:
            run.is_gathering = self._is_repeatable(query, params, run)
            for _ in range(_MAX_PASSES if run.is_gathering else 0):
                run.begin()
                result = self._gather(query, params, run)
                if run.is_changing:
                    break
                if run.wanted:
                    self._compute(run)
                elif result is not None:
                    return result
                else:
                    break
            run.is_gathering = False
            return self._execute(query, params, run)

    @contextlib.contextmanager
    def _running(self) -> Iterator[_Run]:
        run, name = _Run(), f"{next(_numbers)}"
        con = self._con
        self._restore()
        setting = con.execute("SELECT current_setting('python_scan_all_frames')").fetchone()
        self._scans_all_frames = bool(setting and setting[0])
        con.execute(f"SET VARIABLE {_VARIABLE} = '{name}'")
        con.execute("SET python_scan_all_frames = true")  # the caller's tables, from in here
        self._runs[name] = run
        try:
            yield run
        finally:
            del self._runs[name]
            self._restore()

    def _restore(self) -> None:
        """The connection's settings as they were; the next time, while a failed transaction is
        still open."""
        if self._scans_all_frames is None:
            return
        with contextlib.suppress(Exception):
            self._con.execute(f"RESET VARIABLE {_VARIABLE}")
            self._con.execute(f"SET python_scan_all_frames = {self._scans_all_frames}")
            self._scans_all_frames = None

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Has Ctrl-C end the query at the next reply, also one in a thread of DuckDB's; pressed
        again it does so anywhere."""
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or before is not signal.default_int_handler:
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._is_interrupted:
                signal.default_int_handler(number, frame)
            self._is_interrupted = True
            self._con.interrupt()

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        except Exception:
            if not self._is_interrupted:
                raise
        finally:
            signal.signal(signal.SIGINT, before)
            was_interrupted, self._is_interrupted = self._is_interrupted, False
        if was_interrupted:
            raise KeyboardInterrupt

    def _is_repeatable(self, query: str, params: Any, run: _Run) -> bool:
        import duckdb

        statements = self._con.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            return False
        if _ONCE_IN_TEXT.search(query) or self._is_in_transaction():
            return False
        plan = self._explain(query, params, run)
        return plan is not None and not (_ONCE.search(plan) or self._volatile.search(plan))

    def _explain(self, query: str, params: Any, run: _Run) -> str | None:
        run.is_gathering = True  # constant rows are asked for while it is planned
        try:
            plan = self._con.sql(f"EXPLAIN (FORMAT JSON) {query}", params=params).fetchall()
        except Exception:
            if run.error is not None:
                raise run.error from None
            return None  # the query itself says better what is wrong with it
        return "\n".join(text for _, text in plan)

    def _gather(self, query: str, params: Any, run: _Run) -> duckdb.DuckDBPyRelation | None:
        """None if DuckDB raised an error: values that are NULL meanwhile may be why."""
        import duckdb

        try:
            return self._execute(query, params, run)
        except duckdb.InterruptException:
            raise
        except duckdb.Error:
            return None

    @functools.cached_property
    def _volatile(self) -> re.Pattern[str]:
        found = self._con.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE'"
        ).fetchall()
        names = "|".join(re.escape(name) for (name,) in found if name != "error")
        return re.compile(rf"\b(?:{names})\(")

    def _is_in_transaction(self) -> bool:
        numbers = [self._con.execute("SELECT txid_current()").fetchall() for _ in range(2)]
        return numbers[0] == numbers[1]

    def _execute(self, query: str, params: Any, run: _Run) -> duckdb.DuckDBPyRelation:
        try:
            relation = self._con.sql(query, params=params)
            if relation is not None:
                return relation.materialize()
        except Exception as error:
            if _NO_CONSTANT in str(error) and "from_json" not in query:
                raise InvalidArgument(_CONSTANTS) from None
            raise run.error or error from None
        raise InvalidArgument("the query is empty; give a statement")

    def _compute(self, run: _Run) -> None:
        """The rows of that call which was made first: in a query that chooses by a value, it is
        the one that others wait for."""
        first = next(iter(run.wanted))[0]
        function = read_spec(first)[0].function
        calls = {spec for spec, _ in run.wanted if read_spec(spec)[0].function == function}
        if len(calls) <= _MAX_CALLS:
            calls = {first}
        keys = [key for key in run.wanted if key[0] in calls]
        run.outcomes.update(zip(keys, self._ask(keys), strict=True))

    def _ask(self, keys: list[Key]) -> list[Outcome]:
        """One planned batch."""
        rows = [(read_spec(spec)[0], row) for spec, row in keys]
        self.num_rows_asked += len(rows)
        outcomes = answer(self.client, rows, self._count)
        for key, (task, _), outcome in zip(keys, rows, outcomes, strict=True):
            if outcome.error is None and task.is_repeatable:
                self._memo.put(key, outcome)
        return outcomes

    def _count(self, reply: Reply) -> None:
        if self._is_interrupted:
            raise InterruptedError("interrupted")
        self.usage.add(reply)
        if self._on_done is not None:
            self._on_done(reply)

    def _answer(self, runs: Any, specs: Any, rows: Any) -> Any:
        """What DuckDB calls, from any of its threads, for each vector of rows."""
        import pyarrow as pa

        # Of one call all specs are equal: they are held once, however long its instructions are.
        equal = specs.unique().to_pylist()
        listed = equal * len(specs) if len(equal) == 1 else specs.to_pylist()
        keys: list[Key | None] = [
            None if row is None else (spec, row)
            for spec, row in zip(listed, rows.to_pylist(), strict=True)
        ]
        name = runs.to_pylist()[0] if len(runs) else None
        run = self._runs.get(name or "") or _Run()
        try:
            return pa.array(self._values(keys, run), pa.string())
        except AnaphoraError as error:
            run.error = error
            raise

    def _structures(self, specs: Any) -> Any:
        """The types of values, called when a query is bound."""
        import pyarrow as pa

        try:
            return pa.array([structure(spec) for spec in specs.to_pylist()], pa.string())
        except AnaphoraError as error:
            for run in self._runs.values():  # at most one
                run.error = error
            raise

    def _values(self, keys: list[Key | None], run: _Run) -> list[str | None]:
        found: dict[int, Outcome] = {}
        missing: dict[int, Key] = {}
        for index, key in enumerate(keys):
            if key is None:
                continue
            if (fault := row_fault(key[0])) is not None:
                found[index] = Outcome(error=fault)
                continue
            task, _ = read_spec(key[0])
            check_endpoint(task, self.client)
            known = run.outcomes.get(key)
            if known is None and task.is_repeatable:
                known = self._memo.get(key)
            if known is None:
                missing[index] = key
                run.has_chance |= not task.is_repeatable
            else:
                found[index] = known
        run.num_found += len(found)
        if run.is_gathering:
            run.wanted.update(dict.fromkeys(missing.values()))
        elif missing:
            # Where chance decides each row is asked, else each different one.
            places = {
                index: key if read_spec(key[0])[0].is_repeatable else index
                for index, key in missing.items()
            }
            wanted = {places[index]: key for index, key in missing.items()}
            outcomes = dict(zip(wanted, self._ask(list(wanted.values())), strict=True))
            found.update((index, outcomes[place]) for index, place in places.items())
        return [self._write(key, found.get(index)) for index, key in enumerate(keys)]

    def _write(self, key: Key | None, outcome: Outcome | None) -> str | None:
        if key is None or outcome is None:
            return None
        if row_fault(key[0]) is None and read_spec(key[0])[1]:
            task, _ = read_spec(key[0])
            value = outcome.unwrap(f"{task.function}, row {shorten(key[1])}", _FIX)
        else:
            value = outcome.as_struct()
        return json.dumps(value, ensure_ascii=False)


class _Run:
    """One call of ``Registration.sql``. Gathering, what is not known is noted and NULL."""

    def __init__(self) -> None:
        self.is_gathering = False
        self.outcomes: dict[Key, Outcome] = {}
        self.error: AnaphoraError | None = None
        self.begin()

    def begin(self) -> None:
        """Another pass."""
        self.wanted: dict[Key, None] = {}
        self.num_found = 0
        self.has_chance = False

    @property
    def is_changing(self) -> bool:
        """Whether rows differ from pass to pass, or values from call to call."""
        return self.has_chance or bool(self.outcomes and not self.num_found)


class _Memo:
    """Values of equal rows, the latest used ones."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[Key, Outcome] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Outcome | None:
        """None if it is not known."""
        with self._lock:
            if (outcome := self._outcomes.get(key)) is not None:
                self._outcomes.move_to_end(key)
            return outcome

    def put(self, key: Key, outcome: Outcome) -> None:
        """Forgets the one not used for longest, if there are too many."""
        with self._lock:
            self._outcomes[key] = outcome
            if len(self._outcomes) > _MEMO_ROWS:
                self._outcomes.popitem(last=False)
