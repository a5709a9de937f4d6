"""The blocking face: a model in this process.

>>> llm = LLM("smollm2")
>>> print(llm.chat([{"role": "user", "content": "Hello"}]).text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from anaphora.adapter_names import AdapterNames
from anaphora.config import DEFAULT_MODEL, EngineConfig
from anaphora.constraint_check import check_now
from anaphora.engine.engine import Engine
from anaphora.errors import ConfigError, EngineError, InvalidRequest
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.sources import resolve
from anaphora.text.chat import ChatTemplate
from anaphora.text.formats import output_reader
from anaphora.text.output import Output
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import (
    AdapterInfo,
    CacheAnswer,
    CacheCommand,
    CacheReport,
    CacheScope,
    CompletionDelta,
    EngineRequest,
    EngineStats,
    FinishReason,
    LoadAdapter,
    Message,
    ModelInfo,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
    TokenTable,
    UnloadAdapter,
    Workload,
)

Prompt = str | list[int]

DEFAULT_PARAMS = SamplingParams(max_tokens=256)  # without a bound it could be the whole context


@dataclasses.dataclass
class ToolCall:
    """A function that an answer calls. ``arguments`` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclasses.dataclass
class Completion:
    """One finished choice."""

    index: int = 0
    text: str = ""
    reasoning: str = ""  # in chats of models that mark it
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)  # as reasoning
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # from the second
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt: their computation was skipped
    cache_report: CacheReport | None = None  # of the prompt; the first choice has it
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, delta: CompletionDelta) -> None:
        """Adds what a step gave."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                self.tool_calls.append(ToolCall(call.name))
            self.tool_calls[call.index].arguments += call.arguments
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.cache_report = self.cache_report or delta.cache_report
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class TextSide:
    """What turns a checkpoint's text into token ids and back; loads no weights."""

    def __init__(self, path: Path, *, date: datetime.date | None = None) -> None:
        """``date`` is for chat templates that print one; None is today."""
        with open_checkpoint(path) as checkpoint:
            self.tokenizer: Tokenizer = checkpoint.tokenizer
            source = checkpoint.chat_template
        self.chat_template = (
            None if source is None else ChatTemplate(source, self.tokenizer, date=date)
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that is text or already ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list):
            raise InvalidRequest(
                f"a prompt is a {type(prompt).__name__}; give a text or a list of token ids",
                param="prompts",
            )
        return prompt

    def token_table(self) -> TokenTable:
        """What the engine needs for constraints; some 0.2 s for 262,000 tokens."""
        tokenizer = self.tokenizer
        return TokenTable(
            token_bytes=[tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
            control_ids=sorted(tokenizer.control_tokens.values()),
        )

    def encode_public(self, prefixes: Iterable[str], block_size: int) -> list[list[int]]:
        """Token ids of what begins a chat with each of these system prompts.

        Without a chat template they are taken as they are. Raises ``ConfigError`` for one that does
        not fill a block, of which nothing could be shared.
        """
        encoded = [self._encode_system(prefix) for prefix in prefixes]
        for number, token_ids in enumerate(encoded, start=1):
            if len(token_ids) < block_size:
                raise ConfigError(
                    f"--public-prefix number {number} has {len(token_ids)} tokens and does not "
                    f"fill a block of {block_size}, so that nothing of it can be shared; leave it "
                    "out"
                )
        return encoded

    def _encode_system(self, text: str) -> list[int]:
        if self.chat_template is None:
            return self.tokenizer.encode(text)
        message: Message = {"role": "system", "content": text}
        return self.chat_template.encode([message], add_generation_prompt=False)


class RequestOutputs:
    """Turns one request's tokens into text, choice by choice, and finds stop strings."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._readers = {index: output_reader(tokenizer, params) for index in range(params.n)}

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._readers

    def add(self, output: SequenceOutput) -> CompletionDelta | None:
        """The text of a step's output; None if its choice ended earlier at a stop string.

        A delta with ``finish_reason`` "stop" and a string as ``stop_reason`` ends a choice that
        the engine does not know to have ended: the caller aborts it there.
        """
        reader = self._readers.get(output.index)
        if reader is None:
            return None
        if output.error is not None:
            if output.error_param is not None:
                raise InvalidRequest(output.error, param=output.error_param)
            raise EngineError(f"the model failed on this request: {output.error}")
        token_ids = () if output.token_id is None else (output.token_id,)
        read = Output() if output.token_id is None else reader.add(output.token_id)
        text, reasoning, tool_calls = read.text, read.reasoning, read.tool_calls
        finish_reason, stop_reason = output.finish_reason, reader.stop_reason
        if stop_reason is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            rest = reader.flush()
            text, reasoning = text + rest.text, reasoning + rest.reasoning
            tool_calls += rest.tool_calls
            stop_reason = reader.stop_reason
        if finish_reason is not None:
            del self._readers[output.index]
        return CompletionDelta(
            index=output.index,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            part=read.part,
            token_ids=token_ids,
            num_cached_tokens=output.num_cached_tokens,
            cache_report=output.cache_report,
            prompt_logprobs=tuple(output.prompt_logprobs),
            logprobs=() if output.logprob is None else (output.logprob,),
            finish_reason=finish_reason,
            stop_reason=output.stop_token_id if stop_reason is None else stop_reason,
        )


class LLM:
    """A model, its cache and its tokenizer in this process. Blocking; threads take turns."""

    def __init__(self, model: str | EngineConfig = DEFAULT_MODEL, **options: Any) -> None:
        """``options`` are fields of ``EngineConfig``. Raises ``ConfigError``, ``ModelError``."""
        config = EngineConfig.of(model, options)
        resolved = resolve(config.model)
        self.model_name = resolved.name  # as the caller called it
        self._text = TextSide(resolved.path, date=config.template_date)
        config = dataclasses.replace(config, model=str(resolved.path))
        public = self._text.encode_public(config.public_prefix, config.block_size)
        self._engine = Engine(config, public)
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._names = AdapterNames(config.num_adapters)
        for name, path in config.adapters:
            self.load_adapter(name, path)

    @property
    def info(self) -> ModelInfo:
        """What is served, resolved."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, None for a base model."""
        return self._text.chat_template

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        scope: CacheScope | None = None,
        workload: Workload = "interactive",
        adapter: str | None = None,
    ) -> list[Completion]:
        """Completions of one text or of several prompts, batched, in the prompts' order.

        A prompt is a text or a list of token ids; the ``n`` choices of one stand side by side.
        ``adapter`` names a loaded one.
        Raises ``RequestError``, and ``EngineError`` if the model fails on one of them.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
            raise InvalidRequest(
                f"prompts is a {type(prompts).__name__}; give a text or a list of prompts",
                param="prompts",
            )
        encoded = [self._text.encode(prompt) for prompt in prompts]
        return self._run(encoded, params, scope or CacheScope(), workload, adapter)

    def chat(
        self,
        messages: list[Message],
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        tools: list[dict[str, Any]] | None = None,
        must_call: bool = False,
        scope: CacheScope | None = None,
        workload: Workload = "interactive",
        adapter: str | None = None,
    ) -> Completion:
        """The answer to a conversation; with n > 1 use ``generate``.

        ``tools`` are functions in OpenAI's shape. With ``must_call`` the answer is a call of one of
        them, with arguments that match its parameters.
        """
        _check_params(params)
        if params.n != 1:
            raise InvalidRequest(f"n is {params.n}; chat() gives one answer", param="n")
        template = self._text.chat_template
        if template is None:
            raise InvalidRequest("this model has no chat template; use generate()")
        if must_call and not tools:
            raise InvalidRequest(
                "must_call is set but there are no tools; give some", param="tools"
            )
        params = template.reading(params, tools, must_call=must_call)
        messages, tools = template.offer(messages, tools)
        token_ids = template.encode(messages, tools=tools)
        return self._run([token_ids], params, scope or CacheScope(), workload, adapter)[0]

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        return self._engine.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives weights and cache back; the object is of no use afterwards."""
        self._engine.close()
        del self._engine

    def command(self, command: CacheCommand) -> CacheAnswer:
        """Purges or pins. Raises ``RequestError``."""
        with self._lock:
            return self._engine.command(command)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that are loaded, by name."""
        return self._names.infos

    def load_adapter(self, name: str, path: str, *, load_inplace: bool = False) -> AdapterInfo:
        """Loads the PEFT adapter in the directory ``path``; ``load_inplace`` may replace another.

        Raises ``InvalidRequest`` for the name, and ``UnusableAdapter``.
        """
        with self._lock:
            self._names.check_new(name, load_inplace=load_inplace)
            info = self._engine.command(LoadAdapter(path=path)).adapter
            assert info is not None
            self._forget(self._names.set(name, info))
        return info

    def unload_adapter(self, name: str) -> None:
        """What it computed is forgotten and erased. Raises ``UnknownModel``."""
        with self._lock:
            self._forget(self._names.remove(name))

    def _forget(self, digest: str | None) -> None:
        if digest is not None:
            self._engine.command(UnloadAdapter(digest=digest))

    @contextlib.contextmanager
    def turn(self) -> Iterator[Engine]:
        """The engine for the one thread that is inside; the others wait."""
        with self._lock:
            yield self._engine

    def prepare(self, params: SamplingParams) -> None:
        """Within a turn: tells the engine what a constraint needs to know of tokens."""
        if params.constraint is not None and self._engine.grammars.needs_table:
            self._engine.grammars.table = self._text.token_table()

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        scope: CacheScope,
        workload: Workload,
        adapter: str | None,
    ) -> list[Completion]:
        _check_params(params)
        if params.constraint is not None:
            check_now(params.constraint)
        with self._lock:
            self.prepare(params)
            scope = self._names.scope(scope, adapter)
            return self._run_locked(prompts, params, scope, workload)

    def _run_locked(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        scope: CacheScope,
        workload: Workload,
    ) -> list[Completion]:
        ids = [f"local-{next(self._request_ids)}" for _ in prompts]
        results = {
            (request_id, index): Completion(index=index, num_prompt_tokens=len(prompt))
            for request_id, prompt in zip(ids, prompts, strict=True)
            for index in range(params.n)
        }
        outputs = {request_id: RequestOutputs(self._text.tokenizer, params) for request_id in ids}
        try:
            for request_id, prompt in zip(ids, prompts, strict=True):
                self._engine.add(
                    EngineRequest(
                        request_id=request_id,
                        prompt_token_ids=prompt,
                        params=params,
                        scope=scope,
                        workload=workload,
                    )
                )
            for key, delta in self._steps(outputs):
                results[key].extend(delta)
        finally:
            for request_id in ids:
                self._engine.abort(request_id)
        return list(results.values())

    def _steps(
        self, outputs: dict[str, RequestOutputs]
    ) -> Iterator[tuple[tuple[str, int], CompletionDelta]]:
        while self._engine.has_work:
            for output in self._engine.step():
                delta = outputs[output.request_id].add(output)
                if delta is None:
                    continue
                if isinstance(delta.stop_reason, str):
                    self._engine.abort(output.request_id, output.index)
                yield (output.request_id, output.index), delta


def _check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params is a {type(params).__name__}; give one SamplingParams for all prompts",
            param="params",
        )
