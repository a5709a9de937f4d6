"""An ``LLM`` behind ``AsyncLLM``'s face: its engine steps on a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NamedTuple

from anaphora import constraint_check
from anaphora.engine.engine import Engine
from anaphora.errors import EngineDied, EngineUnavailable, RequestError
from anaphora.llm import LLM, RequestOutputs
from anaphora.text.chat import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import (
    AdapterInfo,
    CacheAnswer,
    CacheCommand,
    CacheScope,
    CompletionDelta,
    EngineRequest,
    EngineStats,
    ModelInfo,
    SamplingParams,
    SequenceOutput,
    Workload,
)


class _Add(NamedTuple):
    request: EngineRequest
    deliver: Callable[[SequenceOutput | Exception], None]


class _Abort(NamedTuple):
    request_id: str
    choice: int | None  # None: all of them


class ThreadLLM:
    """Lets an event loop use an ``LLM``, which stays its owner's: ``close`` only ends the thread.

    While requests run here, the ``LLM``'s own callers wait for their turn.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._running: dict[str, Callable[[SequenceOutput | Exception], None]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._is_closed = False

    @property
    def model_name(self) -> str:
        """The model as its owner called it."""
        return self._llm.model_name

    @property
    def info(self) -> ModelInfo:
        """What is served, resolved."""
        return self._llm.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, None for a base model."""
        return self._llm.chat_template

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that are loaded, by name."""
        return self._llm.adapters

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return not self._is_closed

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        return self._llm.stats()

    async def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False
    ) -> AdapterInfo:
        """As ``LLM.load_adapter``."""
        return await asyncio.to_thread(
            self._llm.load_adapter, name, path, load_inplace=load_inplace
        )

    async def unload_adapter(self, name: str) -> None:
        """As ``LLM.unload_adapter``."""
        await asyncio.to_thread(self._llm.unload_adapter, name)

    async def command(self, command: CacheCommand) -> CacheAnswer:
        """As ``LLM.command``."""
        return await asyncio.to_thread(self._llm.command, command)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        scope: CacheScope | None = None,
        workload: Workload = "interactive",
        endpoint: str = "",
        urgent_in: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """As ``AsyncLLM.generate``."""
        request = EngineRequest(
            request_id=f"{request_id or 'request'}-{uuid.uuid4().hex}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            scope=scope or CacheScope(),
            workload=workload,
            endpoint=endpoint,
            urgent_in=urgent_in,
        )
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        if self._is_closed:
            raise EngineUnavailable("this batch client has been closed; open another")
        return self._stream(request)

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        if request.params.constraint is not None:
            await constraint_check.check(request.params.constraint)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[SequenceOutput | Exception] = asyncio.Queue()

        def deliver(output: SequenceOutput | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, output)

        outputs = RequestOutputs(self.tokenizer, request.params)
        self._inbox.put(_Add(request, deliver))
        try:
            while not outputs.is_finished:
                output = await arrived.get()
                if isinstance(output, Exception):
                    raise output
                delta = outputs.add(output)
                if delta is None:
                    continue
                if isinstance(delta.stop_reason, str):
                    self._inbox.put(_Abort(request.request_id, delta.index))
                yield delta
        finally:
            # also of one that has ended: the thread forgets whom to deliver to
            self._inbox.put(_Abort(request.request_id, None))

    async def close(self) -> None:
        """Ends the thread; running requests end with ``EngineUnavailable``."""
        self._is_closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            with self._llm.turn() as engine:
                if not self._work(engine, message):
                    return

    def _work(self, engine: Engine, message: _Add | _Abort) -> bool:
        """Steps until nothing is left to do; False if it is time to end."""
        self._take(engine, message)
        try:
            while engine.has_work:
                while not self._inbox.empty():
                    if (more := self._inbox.get()) is None:
                        self._fail(engine, EngineUnavailable("the batch client is being closed"))
                        return False
                    self._take(engine, more)
                for output in engine.step():
                    if (deliver := self._running.get(output.request_id)) is not None:
                        deliver(output)
        except Exception as error:
            self._fail(engine, EngineDied(f"the engine failed: {error!r}"))
        return True

    def _take(self, engine: Engine, message: _Add | _Abort) -> None:
        if isinstance(message, _Abort):
            engine.abort(message.request_id, message.choice)
            if message.choice is None:
                self._running.pop(message.request_id, None)
            return
        try:
            self._llm.prepare(message.request.params)
            engine.add(message.request)
        except RequestError as error:
            message.deliver(error)
        else:
            self._running[message.request.request_id] = message.deliver

    def _fail(self, engine: Engine, error: Exception) -> None:
        for request_id, deliver in self._running.items():
            engine.abort(request_id)
            deliver(error)
        self._running.clear()
