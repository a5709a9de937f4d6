"""``anaphora batch``: rows of a file become requests, and their answers a file of the same rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from anaphora.batch.client import CHAT, PATHS, Client, Reply, fingerprint
from anaphora.batch.columns import Proposal, propose
from anaphora.batch.rows import (
    CsvWriter,
    Format,
    JsonWriter,
    ParquetWriter,
    Row,
    Table,
    Writer,
    format_of,
)
from anaphora.batch.template import PromptTemplate
from anaphora.batch.work import Entry, Result, WorkFile, discard
from anaphora.constraint_check import check_now
from anaphora.constraints import json_constraint, settled
from anaphora.errors import ConfigError, InvalidRequest, WorkFileInUse

DEFAULT_MAX_TOKENS = 256
DEFAULT_ANSWER_COLUMN = "answer"
SAMPLE_ROWS = 10_000  # of which an order of columns is proposed
_PAGE = 256
_MAX_ID_CHARS = 512
_SHOWN_CHARS = 60
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")

Report = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What is asked of the rows of a file. None is what was not given."""

    source: Path
    template: str | None = None
    response_schema: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    answer_column: str | None = None
    reorder_columns: bool = False
    usage: bool = True
    any_model: bool = False
    unordered: bool = False
    limit: int | None = None


class Batch:
    """The requests of one file. Raises ``ConfigError`` for what cannot be meant."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        if options.temperature is not None and not 0 <= options.temperature <= 2:
            raise ConfigError(f"--temperature is {options.temperature}; it must be from 0 to 2")
        self.table = Table(options.source, is_table=options.template is not None)
        self.answer_column = options.answer_column or DEFAULT_ANSWER_COLUMN
        self._template: PromptTemplate | None = None
        self._schema: dict[str, Any] | None = None
        if self.table.format == "openai":
            self._refuse_for_openai()
        elif options.template is None:
            some = self.table.columns[0] if self.table.columns else "column"
            raise ConfigError(
                f"{options.source} holds rows; say what to ask of each with --prompt-template, "
                f"for example 'Summarise: {{{{ {some} }}}}'"
            )
        else:
            self._template = PromptTemplate.of(options.template)
            self._schema = _schema_of(options.response_schema)
            self._check_columns()
        self._stat = options.source.stat()
        if options.reorder_columns:
            self._template = self._reorder()

    @property
    def added(self) -> dict[str, str]:
        """Columns of the output that the input has not, and their types."""
        usage = dict.fromkeys(_USAGE, "int64") if self.options.usage else {}
        names = {self.answer_column: "string", "error": "string", "finish_reason": "string"}
        return {**names, **usage}

    def identity(self, client: Client) -> dict[str, str]:
        """What a run has to have in common with the one that it goes on with."""
        digest = hashlib.sha256()
        with self.options.source.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        fields = dataclasses.asdict(self.options)
        del fields["source"]
        if self._template is not None:
            fields["template"] = self._template.source
        fields["response_schema"] = self._schema
        named = {f"--{name.replace('_', '-')}": json.dumps(v) for name, v in fields.items()}
        named["--prompt-template"] = named.pop("--template")
        model = client.model if client.info is None else f"{client.model}, {client.info.dtype}"
        return {**named, "the input": digest.hexdigest(), "the model": model}

    def rows(self, position: list[int] | None = None) -> Iterator[Row]:
        """All rows of the input, or the first ones."""
        return itertools.islice(self.table.rows(position), self.options.limit)

    def check_unchanged(self) -> None:
        """Raises ``ConfigError`` if the input is not the file it was."""
        before, now = self._stat, self.options.source.stat()
        if (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise ConfigError(
                f"{self.options.source} has changed while it was worked on; begin anew with "
                "--overwrite"
            )

    def entries(self, client: Client, position: list[int]) -> Iterator[Entry]:
        """The rows as requests with their places in the prefix tree."""
        rows = self.rows(position)
        while page := list(itertools.islice(rows, _PAGE)):
            entries = [self._entry(row, client) for row in page]
            usable = [entry for entry in entries if entry.body is not None]
            places = client.keys((entry.path, entry.body or {}) for entry in usable)
            placed = {id(e): place for e, place in zip(usable, places, strict=True)}
            for entry in entries:
                place, num_tokens = placed.get(id(entry), (b"", 0))
                yield dataclasses.replace(entry, place=place, num_tokens=num_tokens)

    def result_of(self, reply: Reply) -> Result:
        """What is kept of a reply."""
        prompt, cached, completion = reply.usage()
        result = Result(
            error=reply.error,
            status=reply.status,
            request_id=reply.request_id,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
        )
        if self.table.format == "openai":
            result.body = reply.body
        elif reply.error is None:
            result.answer = reply.text
            result.finish_reason = reply.finish_reason
            if self._schema is not None:
                self._parse(result)
        return result

    def _parse(self, result: Result) -> None:
        """JSON instead of its text."""
        try:
            result.answer = json.loads(result.answer, parse_float=_finite)
        except (ValueError, RecursionError):
            start, result.answer = str(result.answer)[:_SHOWN_CHARS], None
            result.error = (
                f"the answer is not JSON, the server does not know response_format: {start!r}…"
            )
            if result.finish_reason == "length":
                result.error = (
                    f"the answer was cut off after {result.completion_tokens} tokens, before its "
                    f"JSON was complete; raise --max-tokens: {start!r}…"
                )

    def columns_of(self, result: Result) -> dict[str, Any]:
        """A result as columns of the output."""
        found = {
            self.answer_column: result.answer,
            "error": result.error,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "completion_tokens": result.completion_tokens,
        }
        return {name: found[name] for name in self.added}

    def _entry(self, row: Row, client: Client) -> Entry:
        kept = row.values if self.options.unordered and self.table.format != "openai" else None
        if row.error is not None:
            return Entry(error=row.error, kept=kept)
        if self._template is None:
            return self._openai_entry(row.values, client)
        if taken := next((name for name in self.added if name in row.values), None):
            return Entry(error=self._taken(taken), kept=kept)
        try:
            messages = self._template.messages(row.values)
        except InvalidRequest as error:
            return Entry(error=str(error), kept=kept)
        body: dict[str, Any] = {"messages": messages}
        body["max_tokens"] = self.options.max_tokens or DEFAULT_MAX_TOKENS
        body["temperature"] = self.options.temperature or 0.0
        if self._schema is not None:
            schema = {"name": "answer", "schema": self._schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Entry(path=CHAT, body=body, same=_same(CHAT, body), kept=kept)

    def _openai_entry(self, line: Mapping[str, Any], client: Client) -> Entry:
        custom_id, body, path = line.get("custom_id"), line.get("body"), line.get("url", CHAT)
        if not (isinstance(custom_id, str) and 1 <= len(custom_id) <= _MAX_ID_CHARS):
            return Entry(error=f"custom_id must be a string of 1 to {_MAX_ID_CHARS} characters")
        fault = None
        if line.get("method", "POST") != "POST":
            fault = f"method is {line['method']!r}; it must be POST"
        elif path not in PATHS:
            fault = f"url is {path!r:.100}; it must be {' or '.join(PATHS)}"
        elif not isinstance(body, dict):
            fault = "body must be an object"
        elif body.get("stream"):
            fault = "body.stream has no meaning in a batch; leave it out"
        elif body.get("model") is not None and not isinstance(body["model"], str):
            fault = "body.model must be a string"
        if fault is not None:
            return Entry(custom_id=custom_id, error=fault)
        assert isinstance(body, dict)
        if self.options.any_model:
            body = {**body, "model": client.model}
        return Entry(custom_id=custom_id, path=path, body=body, same=_same(path, body))

    def _refuse_for_openai(self) -> None:
        given = {
            "--response-schema": self.options.response_schema,
            "--max-tokens": self.options.max_tokens,
            "--temperature": self.options.temperature,
            "--answer-column": self.options.answer_column,
            "--reorder-columns": self.options.reorder_columns or None,
            "--no-usage": None if self.options.usage else True,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is given, but the lines of {self.options.source} are whole requests, "
                    "which say that themselves; leave it out"
                )

    def _check_columns(self) -> None:
        assert self._template is not None
        if self.options.any_model:
            raise ConfigError("--any-model is for lines that name a model; leave it out")
        if not self._template.names_columns:
            raise ConfigError(
                "--prompt-template has no {{ column }}, so all rows would ask the same"
            )
        columns = self.table.columns
        if columns is None:
            return  # each row has its own
        for name in sorted(self._template.columns):
            if name not in columns:
                raise ConfigError(
                    f"--prompt-template needs the column {name!r}; {self.options.source} has "
                    f"{', '.join(columns)}"
                )
        for name in self.added:
            if name in columns:
                raise ConfigError(self._taken(name))

    def _taken(self, name: str) -> str:
        fix = "choose another --answer-column" if name == self.answer_column else "rename it"
        return f"the input has a column {name!r}, which the output would add; {fix}"

    def _reorder(self) -> PromptTemplate:
        """The template with its lines of columns in the order proposed for the data."""
        assert self._template is not None
        proposals = self.propose()
        if not proposals:
            raise ConfigError(
                "--reorder-columns finds nothing to reorder: the template has no two lines that "
                "follow each other with one {{ column }} each"
            )
        return self._template.reordered([proposal.column_order for proposal in proposals])

    def propose(self) -> list[Proposal]:
        """For each run of lines with columns in the template, their best order."""
        if self._template is None:
            return []
        sample = [row.values for row in itertools.islice(self.rows(), SAMPLE_ROWS)]
        return [
            propose(
                {
                    column: [self._template.line(line, values) for values in sample]
                    for column, line in lines.items()
                }
            )
            for lines in self._template.column_lines
        ]

    def with_order(self, proposals: list[Proposal]) -> Batch:
        """The same with other orders of columns."""
        assert self._template is not None
        template = self._template.reordered([proposal.column_order for proposal in proposals])
        return Batch(dataclasses.replace(self.options, template=template.source))


class Output:
    """Where results go: in the input's order at the end, or each as soon as it is there."""

    def __init__(self, batch: Batch, path: Path, *, overwrite: bool) -> None:
        """Raises ``ConfigError`` for a path that is taken, or cannot hold such rows."""
        options = batch.options
        self._batch = batch
        self.path = path
        self.work_path = path.with_name(path.name + ".work")
        self._format: Format = format_of(path, "--output")
        if batch.table.format == "openai":
            if self._format != "jsonl":
                raise ConfigError(
                    f"--output is {str(path)!r}, but answers to whole requests are JSONL"
                )
            self._format = "openai"
        elif self._format == "parquet" and batch.table.format != "parquet":
            raise ConfigError("--output can be Parquet only if the input is; choose .jsonl or .csv")
        elif self._format == "csv" and batch.table.columns is None:
            raise ConfigError("--output can be CSV only if the input has a header; choose .jsonl")
        if options.unordered and self._format == "parquet":
            raise ConfigError("--unordered is for files that grow by lines, not Parquet")
        if options.unordered and batch.table.format == "parquet":
            raise ConfigError("--unordered is for input that is text, not Parquet")
        self.part_path = path.with_name(path.name + ".part")
        self.is_anew = overwrite
        if path.exists() and os.path.samefile(path, options.source):
            raise ConfigError("--output is the input itself; choose another")
        for taken in (path, self.work_path, self.part_path):
            if taken.exists() and not taken.is_file():
                raise ConfigError(f"{taken} is no regular file; choose another --output")
        if not overwrite and path.exists() and not self.work_path.exists():
            raise ConfigError(
                f"{path} exists, and no run of it was interrupted; use --overwrite, or another "
                "--output"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"--output is in {path.parent}, which is no directory; create it")

    def write(self, work: WorkFile, report: Report) -> None:
        """The whole file, in its place at once."""
        self._batch.check_unchanged()
        writer = self._writer(self.part_path)
        try:
            if self._format == "openai":
                for count, (custom_id, result) in enumerate(work.results(), start=1):
                    writer.write(*_openai_line(custom_id, result))
                    report(count)
            else:
                rows = zip(self._batch.rows(), work.results(), strict=True)
                for count, (row, (_, result)) in enumerate(rows, start=1):
                    writer.write(row, self._batch.columns_of(result))
                    report(count)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ConfigError(
                f"{work.path} does not hold the rows of the input; begin anew with --overwrite"
            ) from None
        finally:
            writer.close()
        self.part_path.replace(self.path)

    @contextlib.contextmanager
    def following(self, work: WorkFile) -> Iterator[Callable[[], None]]:
        """For --unordered: writes what is done by now, and the function what has come since."""
        writer = self._writer(self.path)
        assert isinstance(writer, JsonWriter | CsvWriter)
        mark = 0

        def update() -> None:
            nonlocal mark
            for done, custom_id, kept, result in work.finished(mark):
                mark = done
                if self._format == "openai":
                    writer.write(*_openai_line(custom_id, result))
                else:
                    writer.write(Row(kept or {}), self._batch.columns_of(result))
            writer.flush()

        with contextlib.closing(writer):
            update()
            yield update
            update()

    def _writer(self, path: Path) -> Writer:
        path.unlink(missing_ok=True)  # it may be a link to somebody else's file
        if self._format == "csv":
            return CsvWriter(path, self._batch.table.columns or [], list(self._batch.added))
        if self._format == "parquet":
            return ParquetWriter(path, self._batch.options.source, self._batch.added)
        return JsonWriter(path)


def open_work(output: Output, identity: Mapping[str, str]) -> WorkFile:
    """The work file of an output, perhaps of a run that was interrupted.

    Raises ``ConfigError`` if that was another batch.
    """
    if output.is_anew and output.work_path.is_symlink():
        output.work_path.unlink()
    try:
        work = WorkFile(output.work_path)
    except WorkFileInUse:
        raise
    except ConfigError:
        if not output.is_anew:
            raise
        discard(output.work_path)
        work = WorkFile(output.work_path)
    if output.is_anew:
        work.clear()
    if work.is_planned:
        different = [name for name, value in identity.items() if work.get(name) != value]
        if different:
            work.close()
            raise ConfigError(
                f"{output.work_path} is of an interrupted run, since which {different[0]} has "
                "changed; run it as it was, or begin anew with --overwrite"
            )
    return work


def work_off(
    batch: Batch, client: Client, work: WorkFile, report: Callable[[int, Result], None]
) -> None:
    """Computes what has no result. ``report`` gets each result and the number of its copies."""
    for number, reply in client.run(work.pending()):
        result = batch.result_of(reply)
        work.record(number, result)
        report(work.copies(number), result)
    work.commit()


def _openai_line(custom_id: str | None, result: Result) -> tuple[Row, dict[str, Any]]:
    response, error = None, None
    if result.body is not None:
        response = {
            "status_code": result.status,
            "request_id": result.request_id,
            "body": result.body,
        }
    else:
        error = {"code": "invalid_request", "message": result.error}
    named = f"{result.request_id} {custom_id}".encode()  # a copy has a name of its own
    identity = hashlib.blake2b(named, digest_size=16).hexdigest()
    line = {"id": f"batch_req_{identity}", "custom_id": custom_id}
    return Row(line), {"response": response, "error": error}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number that can be kept")
    return number


def _same(path: str, body: Mapping[str, Any]) -> bytes | None:
    found = fingerprint(path, body)
    return None if found is None else hashlib.blake2b(found, digest_size=16).digest()


def _schema_of(given: str | None) -> dict[str, Any] | None:
    """A JSON schema, or the path of a file that holds one."""
    if given is None:
        return None
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise ConfigError(
                f"--response-schema is {given!r}, which is neither a JSON object nor a file that "
                "can be read"
            ) from None
    try:
        schema = settled(json.loads(text))
        check_now(json_constraint(schema, "--response-schema"))
    except ValueError as error:
        raise ConfigError(f"--response-schema is not JSON: {error}") from None
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None
    return dict(schema)
