"""The serving face: an engine in its own process, watched and replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from anaphora import constraint_check, errors
from anaphora.adapter_names import AdapterNames
from anaphora.config import DEFAULT_MODEL, EngineConfig
from anaphora.engine.process import (
    Abort,
    Add,
    Answer,
    Command,
    Configure,
    Down,
    Failed,
    Ready,
    Shutdown,
    StepOutputs,
    Up,
    decode_up,
    encode,
)
from anaphora.errors import EngineDied, EngineError, EngineUnavailable
from anaphora.llm import RequestOutputs, TextSide
from anaphora.loaders.sources import resolve
from anaphora.text.chat import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import (
    AdapterInfo,
    CacheAnswer,
    CacheCommand,
    CacheScope,
    CompletionDelta,
    EngineAnswer,
    EngineCommand,
    EngineRequest,
    EngineStats,
    LoadAdapter,
    ModelInfo,
    SamplingParams,
    SequenceOutput,
    UnloadAdapter,
    Workload,
    add_stats,
)

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5.0
_MAX_RESTART_DELAY = 30.0


@dataclasses.dataclass(eq=False)
class _Child:
    """One engine process and its socket."""

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    folder: Path
    has_tokens: bool = False  # what constraints need to know of them

    async def send(self, message: Down) -> None:
        """Sends without ever waiting; ``EngineUnavailable`` if nobody is there."""
        try:
            await self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:  # its process has just ended, and perhaps nobody has noticed yet
            raise EngineUnavailable("the engine has ended; try again in a moment") from None

    async def end(self, *, grace: float = 0.0) -> None:
        """Waits ``grace`` seconds for the process to end, then kills it; leaves nothing behind."""
        try:
            async with asyncio.timeout(grace):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        finally:
            _discard(self.socket, self.folder)


def _discard(socket: zmq.asyncio.Socket, folder: Path) -> None:
    socket.close(linger=0)
    shutil.rmtree(folder, ignore_errors=True)


class AsyncLLM:
    """A model served from its own process. Use from one event loop: ``start``, then ``generate``.

    When the engine process dies, its running requests end with ``EngineDied``, new ones get
    ``EngineUnavailable``, and a fresh engine with an empty cache is started.
    """

    def __init__(self, model: str | EngineConfig = DEFAULT_MODEL, **options: Any) -> None:
        """``options`` are fields of ``EngineConfig``. Raises ``ConfigError``, ``ModelError``."""
        config = EngineConfig.of(model, options)
        resolved = resolve(config.model)
        self._config = dataclasses.replace(config, model=str(resolved.path))
        self.model_name = resolved.name  # as the operator called it
        self._text = TextSide(resolved.path, date=config.template_date)
        self._public_prefixes = self._text.encode_public(config.public_prefix, config.block_size)
        self._child: _Child | None = None
        self._info: ModelInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[SequenceOutput | EngineError]] = {}
        self._commands: dict[int, asyncio.Future[Answer]] = {}
        self._command_ids = itertools.count()
        self._names = AdapterNames(config.num_adapters)
        self._adapter_lock = asyncio.Lock()  # names change one at a time
        self._current_stats = EngineStats()  # of the engine that runs
        self._finished_stats = EngineStats()  # counters of the engines that died

    async def start(self) -> None:
        """Starts the engine and loads the model. Raises ``ModelError`` and ``ConfigError``."""
        self._loop = asyncio.get_running_loop()
        child = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(child))

    async def close(self) -> None:
        """Stops the engine; running requests end with ``EngineUnavailable``."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        child, self._child = self._child, None
        self._fail_requests(EngineUnavailable, "the server is shutting down")
        if child is not None:
            with contextlib.suppress(EngineUnavailable):
                await child.send(Shutdown())
            await child.end(grace=_SHUTDOWN_SECONDS)

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
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that are loaded, by name."""
        return self._names.infos

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
        return add_stats(self._finished_stats, self._current_stats)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        scope: CacheScope | None = None,
        workload: Workload = "interactive",
        adapter: str | None = None,
        endpoint: str = "",
        urgent_in: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Streams the output of all ``params.n`` choices, interleaved.

        ``adapter`` names a loaded one; its digest in ``scope`` does the same. Checks at once:
        ``RequestError``, ``EngineUnavailable``. Work begins with the first step of the generator,
        a constraint's check too; closing it aborts the request. ``EngineDied`` comes on the way.
        """
        request = EngineRequest(
            request_id=f"{request_id or 'request'}-{uuid.uuid4().hex}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            scope=self._names.scope(scope or CacheScope(), adapter),
            workload=workload,
            endpoint=endpoint,
            urgent_in=urgent_in,
        )
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        self._names.check_loaded(request.scope)
        self._live_child()
        return self._stream(request)

    async def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False
    ) -> AdapterInfo:
        """Loads the PEFT adapter in the directory ``path``; ``load_inplace`` may replace another.

        Requests that run go on with the weights they began with. Raises ``InvalidRequest`` for the
        name, ``UnusableAdapter``, ``EngineUnavailable``, ``EngineDied``.
        """
        return await asyncio.shield(self._load_adapter(name, path, load_inplace))

    async def _load_adapter(self, name: str, path: str, load_inplace: bool) -> AdapterInfo:
        # Shielded: who stops waiting must not leave an adapter without a name in the engine.
        async with self._adapter_lock:
            self._names.check_new(name, load_inplace=load_inplace)
            info = (await self._send(LoadAdapter(path=path))).adapter
            assert info is not None
            await self._forget(self._names.set(name, info))
        return info

    async def unload_adapter(self, name: str) -> None:
        """New requests are refused at once; what it computed is forgotten and erased.

        Raises ``UnknownModel``, ``EngineUnavailable``, ``EngineDied``.
        """
        await asyncio.shield(self._unload_adapter(name))

    async def _unload_adapter(self, name: str) -> None:
        async with self._adapter_lock:
            await self._forget(self._names.remove(name))

    async def _forget(self, digest: str | None) -> None:
        if digest is not None:
            await self._send(UnloadAdapter(digest=digest))

    async def command(self, command: CacheCommand) -> CacheAnswer:
        """Purges or pins. Raises ``RequestError``, ``EngineUnavailable``, ``EngineDied``."""
        return await self._send(command)

    async def _send(self, command: EngineCommand) -> EngineAnswer:
        child = self._live_child()
        command_id = next(self._command_ids)
        waiting = asyncio.get_running_loop().create_future()
        self._commands[command_id] = waiting
        try:
            await child.send(Command(command_id, command))
            answer: Answer = await waiting
        finally:
            self._commands.pop(command_id, None)
        return _unwrap(answer)

    def _live_child(self) -> _Child:
        if self._child is None:
            raise EngineUnavailable("the engine is starting; try again in a moment")
        return self._child

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an AsyncLLM belongs to the event loop that started it")
        child = self._live_child()
        if request.params.constraint is not None:
            await constraint_check.check(request.params.constraint)
            child = await self._child_with_tokens()
        self._names.check_loaded(request.scope)  # it may have been unloaded since
        queue: asyncio.Queue[SequenceOutput | EngineError] = asyncio.Queue()
        outputs = RequestOutputs(self._text.tokenizer, request.params)
        self._queues[request.request_id] = queue
        try:
            await child.send(Add(request))
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

    async def _child_with_tokens(self) -> _Child:
        """The engine, which knows by now what its tokens stand for, as constraints need it."""
        child = self._live_child()
        if not child.has_tokens:
            table = await asyncio.to_thread(self._text.token_table)
            child = self._live_child()  # perhaps a fresh one
            if not child.has_tokens:
                child.has_tokens = True
                await child.send(table)
        return child

    async def _abort(self, child: _Child, request_id: str, index: int | None = None) -> None:
        if child is self._child:
            with contextlib.suppress(EngineUnavailable):
                await child.send(Abort(request_id, index))

    async def _spawn(self) -> _Child:
        """A process with its model and adapters loaded; it is the current one from now on."""
        folder = Path(tempfile.mkdtemp(prefix="anaphora-"))  # for this user alone
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        address = f"ipc://{folder}/engine"
        try:
            socket.set_hwm(0)  # requests are bounded by the server, outputs by max_tokens
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise errors.ConfigError(
                    f"the temporary directory {folder.parent} cannot hold a socket "
                    f"({os.strerror(error.errno or 0)}); set TMPDIR to one with a short path"
                ) from None
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "anaphora.engine.process", address, str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            _discard(socket, folder)
            raise
        child = _Child(process, socket, folder)
        try:
            self._info = await self._configure(child)
        except BaseException:
            await asyncio.shield(child.end())
            raise
        self._child = child
        return child

    async def _configure(self, child: _Child) -> ModelInfo:
        """Sends the configuration; what the engine made of it, or why it could not."""

        async def exchange() -> Up:
            await child.socket.send(
                encode(Configure(self._config, self._public_prefixes))
            )  # waits for its connection
            shutil.rmtree(child.folder, ignore_errors=True)  # done with: kill -9 leaves nothing
            ready = decode_up(await child.socket.recv())
            if isinstance(ready, Ready):
                await self._load_all(child)
            return ready

        message = asyncio.create_task(exchange())
        end = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait([message, end], return_when=asyncio.FIRST_COMPLETED)
            if not message.done():  # it may have said why just before its end
                await asyncio.wait([message], timeout=0.2)
            if not message.done():
                raise EngineUnavailable(
                    f"the engine process ended with status {child.process.returncode} before it "
                    "was ready; its own messages are above"
                )
            answer = message.result()
        finally:
            message.cancel()
            end.cancel()
        if isinstance(answer, Failed):
            raise getattr(errors, answer.error)(answer.message)
        assert isinstance(answer, Ready)
        return answer.info

    async def _load_all(self, child: _Child) -> None:
        """Loads the adapters before the engine takes requests.

        At the start one that cannot be loaded is an error; at a restart it is given up.
        """
        is_restart = self._info is not None
        known = [(name, info.path) for name, info in self._names.infos.items()]
        for name, path in known if is_restart else self._config.adapters:
            command = Command(next(self._command_ids), LoadAdapter(path=path))
            await child.socket.send(encode(command))
            while not isinstance(answer := decode_up(await child.socket.recv()), Answer):
                pass  # the counters of an idle engine
            try:
                info = _unwrap(answer).adapter
            except errors.ModelError as error:
                if not is_restart:
                    raise type(error)(f"--lora-modules {name}: {error}") from None
                logger.error("adapter %s is not loaded again: %s", name, error)
                self._names.remove(name)
                continue
            assert info is not None
            before = self._names.infos.get(name, info)
            if before.digest != info.digest:
                logger.warning("adapter %s has changed on disk; it is served as it is now", name)
            self._names.set(name, info)

    async def _supervise(self, child: _Child) -> None:
        """Hands outputs to their requests; replaces the engine whenever it is lost."""
        delay = 0.0
        while True:
            started = time.monotonic()
            await self._serve_until_lost(child)
            self._child = None
            await child.end()
            logger.error(
                "the engine process ended with status %s; starting a fresh one",
                child.process.returncode,
            )
            self._keep_counters()
            self._fail_requests(EngineDied, "the engine died while it worked on this request")
            if time.monotonic() - started > _MAX_RESTART_DELAY:
                delay = 0.0  # it had been well
            while self._child is None:
                await asyncio.sleep(delay)
                delay = min(max(2 * delay, 0.5), _MAX_RESTART_DELAY)
                try:
                    async with self._adapter_lock:
                        child = await self._spawn()
                except Exception:
                    logger.exception("no fresh engine; next try in %.1f s", delay)

    async def _serve_until_lost(self, child: _Child) -> None:
        """Returns when the process has ended, or when its messages cannot be read any more."""
        receive = asyncio.create_task(self._receive(child))
        end = asyncio.create_task(child.process.wait())
        try:
            await asyncio.wait([receive, end], return_when=asyncio.FIRST_COMPLETED)
            if receive.done() and not receive.cancelled():
                logger.error("the engine's messages are broken", exc_info=receive.exception())
        finally:
            receive.cancel()
            end.cancel()

    async def _receive(self, child: _Child) -> None:
        while True:
            message = decode_up(await child.socket.recv())
            assert isinstance(message, StepOutputs | Answer)
            self._current_stats = message.stats
            if isinstance(message, Answer):
                waiting = self._commands.pop(message.command_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                continue
            for output in message.outputs:
                queue = self._queues.get(output.request_id)
                if queue is not None:  # else its client has gone
                    queue.put_nowait(output)

    def _keep_counters(self) -> None:
        self._finished_stats = self.stats()
        self._finished_stats.num_engine_restarts += 1
        self._current_stats = EngineStats()

    def _fail_requests(self, error: type[EngineError], message: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error(message))
        for waiting in self._commands.values():
            if not waiting.done():
                waiting.set_exception(error(message))
        self._commands.clear()


def _unwrap(answer: Answer) -> EngineAnswer:
    if answer.error is not None:
        raise getattr(errors, answer.error)(answer.message)
    return answer.answer
