"""Works batches off, as many lines at a time as fill the engine, through the server's own routes.

Whatever ends the server, a line has one result in the end: results are recorded as they come, and
what has none is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp

from anaphora.errors import StoreUnavailable, UnknownModel
from anaphora.server.batch_input import BatchInput
from anaphora.server.batch_store import Batch, BatchStore, Line, Outcome, Status
from anaphora.server.endpoints import Endpoints
from anaphora.server.envelope import log_failure
from anaphora.server.file_store import FileStore
from anaphora.server.internal import Answer, Internal, call
from anaphora.server.store import Store
from anaphora.server.tenants import Caller

logger = logging.getLogger("anaphora.batches")

_POLL_SECONDS = 0.5
_CLAIM_SECONDS = 30.0
_SWEEP_SECONDS = 60.0
_RECORD_SECONDS = 0.02  # results of so long are written together
_MAX_ATTEMPTS = 5  # of a line on which the server fails
_RETRY_SECONDS = 1.0
_MIN_MARGIN = 0.1  # of the window: what is left then is urgent
_MARGIN = 1.5  # and so is what would take so much of the time that is left
_REASONS = {
    "expired": ("batch_expired", "the batch expired before this request was completed"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was completed"),
}


class _Usage(msgspec.Struct):
    """Of any of the routes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class BatchRunner:
    """Claims open batches and runs them. ``run`` until it is cancelled."""

    def __init__(
        self,
        app: ASGIApp,
        store: Store,
        endpoints: Endpoints,
        *,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.store = store
        self.endpoints = endpoints
        self.batches = BatchStore(store)
        self.files = FileStore(store)
        self.places = asyncio.Semaphore(max_in_flight)
        self.clock = clock
        self._server = secrets.token_hex(8)
        self.states: dict[str, Status] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outcomes: list[tuple[str, Outcome, asyncio.Future[None]]] = []
        self._has_outcomes = asyncio.Event()

    async def run(self) -> None:
        """Polls the database; a failing one is tried again."""
        recording = asyncio.create_task(self._record_all())
        next_sweep = 0.0
        try:
            while True:
                try:
                    now = self.clock()
                    if self._tasks:
                        self.states = await self.store.run(
                            self.batches.renew, self._server, list(self._tasks), _CLAIM_SECONDS
                        )
                        for batch_id in set(self._tasks) - set(self.states):
                            self._tasks[batch_id].cancel()  # another server has it by now
                    if now >= next_sweep:
                        await self.store.run(self.files.sweep)
                        next_sweep = now + _SWEEP_SECONDS
                    await self._claim()
                except StoreUnavailable as error:
                    logger.warning("batches wait: %s", error)
                except Exception as error:  # other batches go on
                    log_failure("batches", error)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await self._stop(recording)

    async def _claim(self) -> None:
        found = await self.store.run(self.batches.claim, self._server, _CLAIM_SECONDS)
        for batch in found:
            if batch.id not in self._tasks:  # else our own claim ran out for a moment
                self.states[batch.id] = batch.status
                self._tasks[batch.id] = asyncio.create_task(self._guard(batch))

    async def _stop(self, recording: asyncio.Task[None]) -> None:
        claimed, tasks = list(self._tasks), list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable):
            await self.store.run(self.batches.renew, self._server, claimed, 0.0)

    async def _guard(self, batch: Batch) -> None:
        try:
            await _Run(self, batch).run()
        except Exception as error:  # its claim runs out, and it is claimed again
            log_failure(batch.id, error)
        finally:
            del self._tasks[batch.id]

    async def record(self, batch_id: str, outcome: Outcome) -> None:
        """Returns once the result is in the database."""
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcomes.append((batch_id, outcome, recorded))
        self._has_outcomes.set()
        await recorded

    async def _record_all(self) -> None:
        while True:
            await self._has_outcomes.wait()
            await asyncio.sleep(_RECORD_SECONDS)
            self._has_outcomes.clear()
            taken, self._outcomes = self._outcomes, []
            by_batch: dict[str, list[Outcome]] = {}
            for batch_id, outcome, _ in taken:
                by_batch.setdefault(batch_id, []).append(outcome)
            for batch_id, outcomes in by_batch.items():
                await self._write(batch_id, outcomes)
            for _, _, recorded in taken:
                if not recorded.done():
                    recorded.set_result(None)

    async def _write(self, batch_id: str, outcomes: list[Outcome]) -> None:
        while True:
            try:
                return await self.store.run(self.batches.record, batch_id, outcomes)
            except StoreUnavailable as error:
                logger.warning("results of %s wait: %s", batch_id, error)
            except Exception as error:  # the results of other batches go on
                log_failure(batch_id, error)
            await asyncio.sleep(_RETRY_SECONDS)


class _Run:
    """One batch, from wherever it stands to its end."""

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        now, wall = runner.clock(), time.time()
        # The end by a clock that nobody sets; where it stands follows from the wall's once.
        self._deadline = now + batch.expires_at - wall
        self._window = batch.expires_at - batch.created_at
        self._started = now
        self._num_done = 0
        self._num_left = 0

    async def run(self) -> None:
        batch, runner = self._batch, self._runner
        if batch.status == "validating" and not await self._validate():
            return
        progress = (await self._runner.store.run(runner.batches.progress, [batch.id]))[batch.id]
        batch = self._batch = await self._runner.store.run(
            runner.batches.get, batch.tenant, batch.id
        )
        self._num_left = batch.total - progress.completed - progress.failed
        await self._run_lines()
        status: Status = "completed"
        if self._num_left > 0:
            status = "cancelled" if self._is_cancelled else "expired"
        elif self._is_cancelled:
            status = "cancelled"
        rest = None if status == "completed" else (lambda line: _undone(batch, line, status))
        await self._runner.store.run(runner.batches.finish, batch, status, rest)

    @property
    def _is_cancelled(self) -> bool:
        return self._runner.states.get(self._batch.id) == "cancelling"

    @property
    def _seconds_left(self) -> float:
        return self._deadline - self._runner.clock()

    async def _validate(self) -> bool:
        batch, runner = self._batch, self._runner
        found = await self._runner.store.run(
            BatchInput, runner.files, batch.input_file_id, batch.endpoint
        )
        if not found.errors:
            try:
                runner.endpoints.get(found.model, batch.tenant)
            except UnknownModel as error:
                unknown = {"code": "model_not_found", "message": str(error)}
                found.errors.append({**unknown, "param": "body.model", "line": 1})
        if found.errors:
            await self._runner.store.run(runner.batches.fail, batch.id, found.errors)
            return False
        lines: list[dict[str, Any]] = await self._runner.store.run(list, found.lines)
        await self._runner.store.run(
            runner.batches.begin, batch.id, found.model, lines, found.num_lines
        )
        return True

    async def _run_lines(self) -> None:
        position = -1
        async with asyncio.TaskGroup() as group:
            while not self._must_end:
                page = await self._runner.store.run(
                    self._runner.batches.pending, self._batch.id, position
                )
                if not page:
                    break
                for position, line in page:  # noqa: B007  the last one is kept
                    await self._runner.places.acquire()
                    if self._must_end:
                        self._runner.places.release()
                        break
                    try:
                        body = await self._read_body(line)
                    except BaseException:
                        self._runner.places.release()
                        raise
                    # in order: requests that begin alike reach the engine side by side
                    group.create_task(self._run_line(line, body))

    @property
    def _must_end(self) -> bool:
        return self._is_cancelled or self._seconds_left <= 0

    async def _read_body(self, line: Line) -> bytes:
        read, file_id = self._runner.files.read_range, self._batch.input_file_id
        content = await self._runner.store.run(read, file_id, line.start, line.length)
        return msgspec.json.encode(msgspec.json.decode(content)["body"])

    async def _run_line(self, line: Line, body: bytes) -> None:
        try:
            outcome = await self._answer(line, body)
            if outcome is not None:
                await self._runner.record(self._batch.id, outcome)
                self._num_done += 1
                self._num_left -= 1
        finally:
            self._runner.places.release()

    async def _answer(self, line: Line, body: bytes) -> Outcome | None:
        """The line's outcome; None if the batch ends before there is one."""
        batch, runner = self._batch, self._runner
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            internal = Internal(Caller(batch.tenant, batch.key_id), self._urgent_in())
            answer = await call(runner.app, batch.endpoint, body, internal)
            while answer.status in (429, 503) and not self._must_end:
                await asyncio.sleep(float(answer.headers.get("retry-after", _RETRY_SECONDS)))
                answer = await call(runner.app, batch.endpoint, body, internal)
            if self._must_end and answer.status != 200:
                return None
            if answer.status < 500 or attempt == _MAX_ATTEMPTS:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        return _outcome(line, answer)

    def _urgent_in(self) -> float:
        """Seconds until the rest would not be done in time, at the pace so far."""
        elapsed = self._runner.clock() - self._started
        pace = self._num_done / elapsed if elapsed > 0 else 0.0
        needed = self._num_left / pace * _MARGIN if pace else 0.0
        return max(0.0, self._seconds_left - max(needed, self._window * _MIN_MARGIN))


def _outcome(line: Line, answer: Answer) -> Outcome:
    request_id = answer.headers.get("x-request-id", "")
    response = {
        "status_code": answer.status,
        "request_id": request_id,
        "body": msgspec.Raw(answer.body),
    }
    row = {
        "id": f"batch_req_{request_id or secrets.token_hex(16)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }
    usage = _Usage()
    if answer.status == 200:
        usage = msgspec.json.decode(answer.body, type=_Body).usage or usage
    prompt = usage.prompt_tokens_details or usage.input_tokens_details or {}
    completion = usage.completion_tokens_details or usage.output_tokens_details or {}
    return Outcome(
        line=line.line,
        result=msgspec.json.encode(row).decode(),
        is_error=answer.status != 200,
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=prompt.get("cached_tokens", 0),
        output_tokens=usage.completion_tokens or usage.output_tokens,
        reasoning_tokens=completion.get("reasoning_tokens", 0),
    )


def _undone(batch: Batch, line: Line, status: Status) -> Outcome:
    code, message = _REASONS[status]
    row = {
        "id": f"batch_req_{batch.id.removeprefix('batch_')}_{line.line}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Outcome(line=line.line, result=json.dumps(row), is_error=True)
