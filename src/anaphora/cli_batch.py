"""``anaphora batch``: many rows of a file through a model, in process or at a URL."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table

from anaphora.cli_common import (
    ApiKey,
    CacheMemory,
    DtypeOption,
    Model,
    Threads,
    Url,
    console,
    open_client,
    option,
    table,
)
from anaphora.config import EngineConfig

if TYPE_CHECKING:
    from anaphora.batch.client import Client
    from anaphora.batch.run import Batch, Output
    from anaphora.batch.work import Counts, Forecast, Result, WorkFile

batch_app = typer.Typer(
    help="Answer the rows of a file: planned, resumable, each prefix computed once.",
    no_args_is_help=True,
)

_DEFAULTS = EngineConfig()
_LINE_SECONDS = 10.0  # between progress lines where there is no terminal
_RATE_SECONDS = 30.0  # over which rates are taken
_FOLLOW_SECONDS = 1.0  # between rows that are written as they come
_INTERRUPTED = 130
_SHOWN_ERRORS = 5
_PROBE_ROWS = 16  # that measure the speed for a plan
_SALTED_ROWS = 4  # of them without any hit

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="OpenAI's batch JSONL, or rows as .jsonl, .csv or .parquet.",
        show_default=False,
    ),
]
Template = Annotated[
    str | None,
    option(
        "What to ask of each row: a Jinja template with {{ column }} in it, or a file of one. "
        "Parts are {% block system %}…{% endblock %} and {% block user %}…{% endblock %}; without "
        "blocks all is the user's message.",
        "Rows",
        "--prompt-template",
        metavar="TEXT|FILE",
    ),
]
Schema = Annotated[
    str | None,
    option("JSON schema that every answer matches, or a file of one.", "Rows", metavar="JSON|FILE"),
]
MaxTokens = Annotated[
    int | None, option("Tokens of an answer at most. [dim](256)[/dim]", "Rows", min=1)
]
Temperature = Annotated[
    float | None,
    option("0 takes the best token, and computes equal rows once. [dim](0)[/dim]", "Rows"),
]
Reorder = Annotated[
    bool,
    option(
        "Put neighbouring template lines of one column each into the order in which rows share "
        "most, see [bold]anaphora batch plan[/bold].",
        "Rows",
        "--reorder-columns",
    ),
]
Limit = Annotated[int | None, option("Only the first rows. [dim](all)[/dim]", "Rows", min=1)]
AnyModel = Annotated[
    bool, option("Answer OpenAI lines whatever model they name.", "Rows", "--any-model")
]


@batch_app.command()
def run(
    source: Source,
    output: Annotated[
        Path,
        option(
            "Where the rows go, with the answers: .jsonl, .csv or .parquet.",
            "Output",
            "--output",
            "-o",
            show_default=False,
        ),
    ],
    prompt_template: Template = None,
    response_schema: Schema = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    reorder_columns: Reorder = False,
    any_model: AnyModel = False,
    limit: Limit = None,
    answer_column: Annotated[
        str | None, option("Name of the answers' column. [dim](answer)[/dim]", "Output")
    ] = None,
    usage: Annotated[
        bool,
        option(
            "Token counts of each row. What was cached depends on the run: without them the same "
            "input gives the same bytes.",
            "Output",
            "--usage/--no-usage",
        ),
    ] = True,
    unordered: Annotated[
        bool, option("Write each row as soon as it is done.", "Output", "--unordered")
    ] = False,
    overwrite: Annotated[
        bool, option("Begin anew, whatever is there.", "Output", "--overwrite")
    ] = False,
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    concurrency: Annotated[
        int | None,
        option("Requests at a time. [dim](what the engine takes, else 64)[/dim]", "Server", min=1),
    ] = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    kv_cache_memory: CacheMemory = None,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Answer every row of a file.

    Rows run in the order in which they share prefixes, equal ones once, and are written in the
    order of the input. A run that was interrupted, even by kill -9, goes on when the same command
    is given again. A row that cannot be answered says why in its column "error".

        anaphora batch run reviews.csv -o answers.csv --prompt-template 'Summarise: {{ review }}'
    """
    from anaphora.batch.run import Batch, BatchOptions, Output, open_work

    options = BatchOptions(
        source=source,
        template=prompt_template,
        response_schema=response_schema,
        max_tokens=max_tokens,
        temperature=temperature,
        answer_column=answer_column,
        reorder_columns=reorder_columns,
        usage=usage,
        any_model=any_model,
        unordered=unordered,
        limit=limit,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    batch = Batch(options)
    out = Output(batch, output, overwrite=overwrite)
    work: WorkFile | None = None
    try:
        with open_client(
            model, url, api_key, concurrency, dtype, kv_cache_memory, threads
        ) as client:
            identity = batch.identity(client)
            work = open_work(out, identity)
            with _Show() as show:
                if not work.is_planned:
                    show.planning(batch, client, work, identity)
                show.running(batch, client, work, out)
                if not unordered:
                    show.writing(work, out)
        show.summary(work, out)
        is_all_lost = 0 < work.counts().num_rows == work.counts().num_errors
        work.delete()
    except KeyboardInterrupt:
        done = "nothing"
        if work is not None:
            counts = work.counts()
            work.close()
            done = f"{counts.num_done:,} of {counts.num_rows:,} rows"
            if counts.num_rows == 0:
                done = "nothing"
        console(stderr=True).print(
            f"interrupted: {done} done; run the same command again to go on", style="yellow"
        )
        raise typer.Exit(_INTERRUPTED) from None
    except BaseException:
        if work is not None:
            with contextlib.suppress(Exception):
                work.close()
        raise
    if is_all_lost:
        raise typer.Exit(1)


@batch_app.command()
def plan(
    source: Source,
    prompt_template: Template = None,
    response_schema: Schema = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    limit: Limit = None,
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    kv_cache_memory: CacheMemory = None,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Show what a run would compute: tokens, hit rates before and after planning, time.

    Nothing is written. Here the time comes from a few of the rows, which are computed; at --url
    nothing is sent, and sizes are those of text.
    """
    from anaphora.batch.run import Batch, BatchOptions

    options = BatchOptions(
        source=source,
        template=prompt_template,
        response_schema=response_schema,
        max_tokens=max_tokens,
        temperature=temperature,
        limit=limit,
    )
    batch = Batch(options)
    with open_client(model, url, api_key, None, dtype, kv_cache_memory, threads) as client:
        _Plan(batch, client, is_local=url is None).show()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class _Show:
    """What the user sees while a batch runs: bars on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[more]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._started = time.monotonic()
        self._said_at = self._started
        self._is_resumed = True  # until the input is read
        self._num_before = 0  # rows of a run that was interrupted
        self._tokens = dict.fromkeys(("prompt", "cached", "completion"), 0)

    def __enter__(self) -> _Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planning(
        self,
        batch: Batch,
        client: Client,
        work: WorkFile,
        identity: dict[str, str],
    ) -> None:
        """Reads the input into the work file."""
        self._is_resumed = False
        task = self._progress.add_task("planning", total=batch.table.num_bytes, more="")
        position = [0]

        def entries() -> Iterator[Any]:
            for count, entry in enumerate(batch.entries(client, position), start=1):
                yield entry
                if count % 256 == 0:
                    self._progress.update(task, completed=position[0], more=f"{count:,} rows")
                    self._say(f"planning: {count:,} rows read")

        work.fill(entries(), identity)
        self._progress.remove_task(task)

    def running(self, batch: Batch, client: Client, work: WorkFile, out: Output) -> None:
        """Computes what is left."""
        from anaphora.batch.run import work_off

        counts = work.counts()
        if self._is_resumed:
            self._num_before = counts.num_done
        task = self._progress.add_task(
            "answering", total=counts.num_rows, completed=counts.num_done, more=""
        )
        done = counts.num_done
        recent: deque[tuple[float, ...]] = deque([(time.monotonic(), done, 0, 0, 0)])
        followed_at = 0.0

        def report(copies: int, result: Result) -> None:
            nonlocal done, followed_at
            done += copies
            self._tokens["prompt"] += result.prompt_tokens
            self._tokens["cached"] += result.cached_tokens
            self._tokens["completion"] += result.completion_tokens
            now = time.monotonic()
            recent.append((now, done, *self._tokens.values()))
            while len(recent) > 2 and now - recent[0][0] > _RATE_SECONDS:
                recent.popleft()
            more = _rates(recent[0], recent[-1], counts.num_rows - done)
            so_far = f"{done:,} of {counts.num_rows:,} rows"
            self._progress.update(task, completed=done, more=f"{so_far}, {more}")
            self._say(f"{so_far}: {more}")
            if update is not None and now - followed_at > _FOLLOW_SECONDS:
                followed_at = now
                update()

        with contextlib.ExitStack() as stack:
            update = None
            if batch.options.unordered:
                update = stack.enter_context(out.following(work))
            work_off(batch, client, work, report)
        self._progress.remove_task(task)

    def writing(self, work: WorkFile, out: Output) -> None:
        """Puts the output together."""
        task = self._progress.add_task("writing", total=work.counts().num_rows, more="")
        out.write(work, lambda count: self._progress.update(task, completed=count))

    def summary(self, work: WorkFile, out: Output) -> None:
        """What came of it."""
        counts = work.counts()
        seconds = time.monotonic() - self._started
        tokens = self._tokens
        shown = table()
        shown.add_row("output", str(out.path))
        shown.add_row("rows", f"{counts.num_rows:,}")
        if self._num_before:
            shown.add_row("of them from before", f"{self._num_before:,}")
        num_copies = counts.num_rows - counts.num_requests - counts.num_unusable
        if num_copies:
            shown.add_row("of them copies", f"{num_copies:,}, answered by an equal row")
        if counts.num_errors:
            shown.add_row("with an error", f"{counts.num_errors:,}", style="yellow")
        if tokens["prompt"]:
            share = tokens["cached"] / tokens["prompt"]
            shown.add_row(
                "prompt tokens", f"{tokens['prompt']:,}, {share:.1%} of them from the cache"
            )
            shown.add_row("answer tokens", f"{tokens['completion']:,}")
        rate = (counts.num_rows - self._num_before) / seconds
        shown.add_row("time", f"{_duration(seconds)}, {rate:,.1f} rows/s")
        self._console.print(shown)
        for error, count in work.errors(_SHOWN_ERRORS):
            self._console.print(f"{count:,} × {error}", style="yellow", markup=False)

    def _say(self, line: str) -> None:
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at > _LINE_SECONDS:
            self._said_at = now
            self._console.print(line, markup=False, highlight=False)


class _Plan:
    """What a run is expected to compute."""

    def __init__(self, batch: Batch, client: Client, *, is_local: bool) -> None:
        self._batch = batch
        self._client = client
        self._is_local = is_local
        info = client.info
        self._block_size = 16 if info is None else info.block_size
        self._num_blocks = None if info is None else info.num_cache_tokens // info.block_size

    def show(self) -> None:
        """Prints it."""
        proposals = self._batch.propose()
        with tempfile.TemporaryDirectory(prefix="anaphora-plan-") as folder:
            with contextlib.closing(self._fill(self._batch, Path(folder, "plan"))) as work:
                counts = work.counts()
                columns = {
                    "input order": self._forecast(work, is_planned=False),
                    "planned": self._forecast(work, is_planned=True),
                }
                speed = _Speed.measure(self._client, work) if self._is_local else None
                errors = work.errors(_SHOWN_ERRORS)
            if proposals:
                other = self._batch.with_order(proposals)
                with contextlib.closing(self._fill(other, Path(folder, "reordered"))) as work:
                    columns["--reorder-columns"] = self._forecast(work, is_planned=True)
        out = console()
        out.print(self._table(counts, columns, speed))
        for proposal in proposals:
            out.print(f"column order proposed: {', '.join(proposal.column_order)}", markup=False)
        for error, count in errors:
            out.print(f"{count:,} × {error}", style="yellow", markup=False)
        if not self._is_local:
            out.print(
                "At a URL tokens are estimated from text, without what the server's chat template "
                "adds, and no time is estimated.",
                style="dim",
            )

    def _fill(self, batch: Batch, path: Path) -> WorkFile:
        from anaphora.batch.work import WorkFile

        work = WorkFile(path)
        with _Show() as show:
            show.planning(batch, self._client, work, {})
        return work

    def _forecast(self, work: WorkFile, *, is_planned: bool) -> Forecast:
        return work.forecast(
            is_planned=is_planned,
            block_size=self._block_size,
            num_cache_blocks=self._num_blocks,
        )

    def _table(self, counts: Counts, columns: dict[str, Forecast], speed: _Speed | None) -> Table:
        about = "" if self._is_local else "about "
        shown = Table(title=f"{self._batch.options.source}", title_justify="left")
        shown.add_column("", style="bold")
        for name in columns:
            shown.add_column(name, justify="right")
        rows: dict[str, Callable[[Forecast], str]] = {
            "requests": lambda f: f"{f.num_requests:,}",
            "prompt tokens": lambda f: f"{about}{f.num_tokens:,}",
            "unique": lambda f: f"{about}{f.num_unique_tokens:,}",
            "expected to be computed": lambda f: f"{about}{f.num_computed_tokens:,}",
            "expected hit rate": lambda f: f"{f.hit_rate:.1%}",
        }
        if speed is not None:
            rows["expected time"] = lambda f: _duration(speed.seconds(f))
        for name, value in rows.items():
            shown.add_row(name, *[value(forecast) for forecast in columns.values()])
        notes = [f"{counts.num_rows:,} rows"]
        if counts.num_unusable:
            notes.append(f"{counts.num_unusable:,} that cannot be used")
        if self._num_blocks is not None:
            whose = "a" if self._is_local else "the server's"
            notes.append(f"{whose} cache of {self._num_blocks * self._block_size:,} tokens")
        if speed is not None:
            notes.append(
                f"measured: {speed.prefill:,.0f} tokens/s of prompts, "
                f"{speed.answer_tokens:,.0f} tokens an answer"
            )
        shown.caption = "; ".join(notes)
        shown.caption_justify = "left"
        return shown


@dataclasses.dataclass(frozen=True)
class _Speed:
    """What the machine did with a few rows."""

    prefill: float  # computed prompt tokens a second
    answer_tokens: float  # of a row
    answer_seconds: float  # of a row, beside those of its prompt

    @classmethod
    def measure(cls, client: Client, work: WorkFile) -> _Speed | None:
        """None if no row could be answered."""
        from anaphora.batch.client import CHAT

        rows = work.sample(_PROBE_ROWS)
        salted = [
            {**body, "max_tokens": 1, "cache_salt": secrets.token_hex(8)}
            for path, body in rows
            if path == CHAT
        ][:_SALTED_ROWS]
        if not salted:
            return None
        client.complete(salted[:1])  # what is only slow the first time
        started = time.perf_counter()
        replies = client.complete(
            [{**body, "cache_salt": secrets.token_hex(8)} for body in salted], is_planned=False
        )
        seconds = time.perf_counter() - started
        num_tokens = sum(reply.usage()[0] for reply in replies)
        if not num_tokens:
            return None
        prefill = num_tokens / seconds
        started = time.perf_counter()
        replies = client.complete([body for path, body in rows if path == CHAT])
        seconds = time.perf_counter() - started
        usage = [reply.usage() for reply in replies]
        computed = sum(prompt - cached for prompt, cached, _ in usage)
        return cls(
            prefill=prefill,
            answer_tokens=sum(completion for _, _, completion in usage) / len(usage),
            answer_seconds=max(0.0, seconds - computed / prefill) / len(usage),
        )

    def seconds(self, forecast: Forecast) -> float:
        """Of a run."""
        return (
            forecast.num_computed_tokens / self.prefill
            + forecast.num_requests * self.answer_seconds
        )


def _rates(first: tuple[float, ...], last: tuple[float, ...], num_left: int) -> str:
    seconds = max(last[0] - first[0], 1e-3)
    rows, prompt, cached, completion = (b - a for a, b in zip(first[1:], last[1:], strict=True))
    rate = rows / seconds
    parts = [
        f"{rate:,.1f} rows/s",
        f"{(prompt + completion) / seconds:,.0f} tokens/s",
        f"{cached / max(prompt, 1):.0%} cached",
    ]
    if rate > 0:
        parts.append(f"{_duration(num_left / rate)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
