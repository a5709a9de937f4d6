"""The serving face: an engine in its own process, watched and replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from anaphora import errors
from anaphora.config import EngineConfig
from anaphora.engine.process import (
    Abort,
    Add,
    Configure,
    Failed,
    Ready,
    Shutdown,
    StepOutputs,
    decode_up,
    encode,
)
from anaphora.errors import EngineDied, EngineError, EngineUnavailable
from anaphora.llm import RequestOutputs, TextSide
from anaphora.loaders.sources import resolve
from anaphora.text.chat import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import (
    CacheScope,
    CompletionDelta,
    EngineRequest,
    EngineStats,
    ModelInfo,
    SamplingParams,
    SequenceOutput,
)

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5.0
_MAX_RESTART_DELAY = 30.0
_GAUGES = ("num_running", "num_waiting", "num_total_blocks", "num_used_blocks", "num_cached_blocks")


@dataclasses.dataclass(eq=False)
class _Child:
    """One engine process and its socket."""

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    folder: Path
    info: ModelInfo | None = None

    def discard(self) -> None:
        """Closes what the process leaves behind."""
        self.socket.close(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


class AsyncLLM:
    """A model served from its own process. Use from one event loop: ``start``, then ``generate``.

    When the engine process dies, its running requests end with ``EngineDied``, new ones get
    ``EngineUnavailable``, and a fresh engine with an empty cache is started.
    """

    def __init__(self, config: EngineConfig) -> None:
        resolved = resolve(config.model)
        self._config = dataclasses.replace(config, model=str(resolved.path))
        self._text = TextSide(resolved.path)
        self._child: _Child | None = None
        self._info: ModelInfo | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[SequenceOutput | EngineError]] = {}
        self._stats = EngineStats()
        self._finished_stats = EngineStats()  # counters of the engines that died

    async def start(self) -> None:
        """Starts the engine and loads the model. Raises ``ModelError`` and ``ConfigError``."""
        child = await self._spawn()
        self._info = child.info
        self._supervisor = asyncio.create_task(self._supervise(child))

    async def close(self) -> None:
        """Stops the engine; running requests end with ``EngineUnavailable``."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        child, self._child = self._child, None
        self._fail_requests(EngineUnavailable, "the server is shutting down")
        if child is None:
            return
        with contextlib.suppress(zmq.ZMQError):
            await child.socket.send(encode(Shutdown()))
        try:
            await asyncio.wait_for(child.process.wait(), _SHUTDOWN_SECONDS)
        except TimeoutError:
            child.process.kill()
            await child.process.wait()
        child.discard()

    @property
    def info(self) -> ModelInfo:
        """What is served, resolved; after ``start``."""
        assert self._info is not None, "start() the AsyncLLM first"
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, None for a base model."""
        return self._text.chat_template

    @property
    def is_ready(self) -> bool:
        """Whether an engine can take requests now."""
        return self._child is not None

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, None while there is no engine."""
        return None if self._child is None else self._child.process.pid

    def stats(self) -> EngineStats:
        """Counters since the start, over all engines, and gauges of the last step."""
        return self._stats

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        scope: CacheScope | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Streams the output of all ``params.n`` choices, interleaved.

        Checks at once: ``RequestError``, ``EngineUnavailable``. Work begins with the first step of
        the generator; closing it aborts the request. ``EngineDied`` comes on the way.
        """
        request = EngineRequest(
            request_id=f"{request_id or 'request'}-{uuid.uuid4().hex}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            scope=scope or CacheScope(),
        )
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        self._live_child()
        return self._stream(request)

    def _live_child(self) -> _Child:
        if self._child is None:
            raise EngineUnavailable("the engine is starting; try again in a moment")
        return self._child

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        child = self._live_child()
        queue: asyncio.Queue[SequenceOutput | EngineError] = asyncio.Queue()
        outputs = RequestOutputs(self._text.tokenizer, request.params)
        self._queues[request.request_id] = queue
        try:
            await child.socket.send(encode(Add(request)))
            while not outputs.is_finished:
                output = await queue.get()
                if isinstance(output, EngineError):
                    raise output
                delta = outputs.add(output)
                if delta is None:
                    continue
                if isinstance(delta.stop_reason, str):
                    await self._abort(child, request.request_id, delta.index)
                yield delta
        finally:
            del self._queues[request.request_id]
            if not outputs.is_finished:
                await asyncio.shield(self._abort(child, request.request_id))

    async def _abort(self, child: _Child, request_id: str, index: int | None = None) -> None:
        if child is self._child:
            with contextlib.suppress(zmq.ZMQError):
                await child.socket.send(encode(Abort(request_id, index)))

    async def _spawn(self) -> _Child:
        """A process with its model loaded."""
        folder = Path(tempfile.mkdtemp(prefix="anaphora-"))  # for this user alone
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)  # requests are bounded by the server, outputs by max_tokens
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "anaphora.engine.process",
            address,
            stdin=asyncio.subprocess.DEVNULL,
        )
        child = _Child(process, socket, folder)
        try:
            await socket.send(encode(Configure(self._config)))
            message = decode_up(await _first(socket.recv(), process))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            child.discard()
            raise
        if isinstance(message, Failed):
            await process.wait()
            child.discard()
            raise getattr(errors, message.error)(message.message)
        assert isinstance(message, Ready)
        child.info = message.info
        self._child = child
        return child

    async def _supervise(self, child: _Child) -> None:
        """Hands outputs to their requests; replaces the engine whenever it dies."""
        delay = 0.0
        while True:
            started = asyncio.get_running_loop().time()
            receive = asyncio.create_task(self._receive(child))
            try:
                await child.process.wait()
            finally:
                receive.cancel()
            logger.error(
                "the engine process ended with status %s; starting a fresh one",
                child.process.returncode,
            )
            self._child = None
            child.discard()
            self._keep_counters()
            self._fail_requests(EngineDied, "the engine died while it worked on this request")
            if asyncio.get_running_loop().time() - started > _MAX_RESTART_DELAY:
                delay = 0.0  # it had been well
            while self._child is None:
                await asyncio.sleep(delay)
                delay = min(max(2 * delay, 0.5), _MAX_RESTART_DELAY)
                try:
                    child = await self._spawn()
                except (errors.AnaphoraError, OSError):
                    logger.exception("no fresh engine; next try in %.1f s", delay)

    async def _receive(self, child: _Child) -> None:
        while True:
            message = decode_up(await child.socket.recv())
            assert isinstance(message, StepOutputs)
            self._stats = _sum_counters(self._finished_stats, message.stats)
            for output in message.outputs:
                queue = self._queues.get(output.request_id)
                if queue is not None:  # else its client has gone
                    queue.put_nowait(output)

    def _keep_counters(self) -> None:
        gone = dict.fromkeys(_GAUGES, 0)
        restarts = self._stats.num_engine_restarts + 1
        stats = {**_as_dict(self._stats), **gone, "num_engine_restarts": restarts}
        self._stats = self._finished_stats = EngineStats(**stats)

    def _fail_requests(self, error: type[EngineError], message: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error(message))


async def _first(receive: Awaitable[bytes], process: asyncio.subprocess.Process) -> bytes:
    """The first message of a process, or ``EngineUnavailable`` if it ends before."""
    message = asyncio.ensure_future(receive)
    end = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        try:  # it may have said why just before its end
            return await asyncio.wait_for(message, 0.2)
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine process ended with status {process.returncode} before it was ready"
            ) from None
    finally:
        message.cancel()
        end.cancel()


def _as_dict(stats: EngineStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in EngineStats.__struct_fields__}


def _sum_counters(finished: EngineStats, current: EngineStats) -> EngineStats:
    """``current``'s gauges, and counters that go on where ``finished`` ended."""
    totals = _as_dict(current)
    for name, value in _as_dict(finished).items():
        if name not in _GAUGES:
            totals[name] += value
    return EngineStats(**totals)
