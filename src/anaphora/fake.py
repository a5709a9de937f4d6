"""A model that is not one: ``FakeLLM`` answers from a script, so tests need no weights.

It keeps ``AsyncLLM``'s contract, from call-time checks to aborts, cached-token counts, purges and
pins. Constraints are checked as there, but answers are taken as they are scripted. A token is a
byte; the ids above are control tokens. Nothing here is random.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import hashlib
import itertools
import math
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from anaphora import constraint_check
from anaphora.adapter_names import AdapterNames
from anaphora.errors import EngineDied, EngineUnavailable, RequestError
from anaphora.fake_cache import TIER, FakeCache
from anaphora.text import harmony
from anaphora.text.chat import ChatTemplate
from anaphora.text.formats import output_reader
from anaphora.text.output import Output
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType, Vocabulary
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
    ModelInfo,
    OutputFormat,
    PurgeCache,
    SamplingParams,
    TierCounters,
    TokenLogprob,
    Workload,
)

_SPECIAL_TOKENS = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|end_of_text|>")
BOS, IM_START, IM_END, EOS = range(256, 260)
_CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Control tokens and templates of models that call tools. They show what is rendered, no more.
_FORMATS: dict[OutputFormat, tuple[tuple[str, ...], str]] = {
    "text": ((), _CHAT_TEMPLATE),
    "harmony": (
        tuple(f"<|{name}|>" for name in harmony.MARKS),
        """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}
Date: {{ strftime_now('%Y-%m-%d') }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary
    {%- elif message.tool_calls %}
        {%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
        {{- message.thinking }}<|end|>{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' }}
        {{- (call.arguments if call.arguments is string else call.arguments | tojson) }}
        {{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final
    {%- else %}<|start|>{{ message.role }}{% endif %}
    {%- if not message.tool_calls %}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    ),
    "llama3": (
        ("<|python_tag|>", "<|eot_id|>"),
        """{{ bos_token }}{% if tools %}{{ tools | tojson }}<|eot_id|>{% endif %}
{%- for message in messages -%}
[{{ message.role }}]{% if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}""",
    ),
}
_HARMONY_ENDS = ("<|return|>", "<|call|>")
_FILLER = ord(".")  # what a fake says when it must go on after its answer
_MAX_ECHO_CHARS = 200


def byte_tokenizer(more_tokens: Sequence[str] = ()) -> Tokenizer:
    """A real tokenizer whose token i below 256 is byte i, then control tokens: four and more."""
    control = (*_SPECIAL_TOKENS, *more_tokens)
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(256)  # byte-level BPE spells the other bytes with characters from here
    spelling = [chr(byte if byte in printable else next(spare)) for byte in range(256)]
    vocabulary = Vocabulary(
        tokens=(*spelling, *control),
        types=(TokenType.NORMAL,) * 256 + (TokenType.CONTROL,) * len(control),
        merges=(),
        pre_tokenizer="gpt-2",
        bos_token_id=BOS,
        eos_token_id=EOS,
        add_bos=True,
    )
    return Tokenizer.from_vocabulary(vocabulary)


@dataclasses.dataclass(frozen=True)
class _Script:
    answer: list[int] | None  # None: the default answer
    error: Exception | None = None


class FakeLLM:
    """Stands in for ``AsyncLLM``: ``enqueue`` the answers, or let it echo what it was asked.

    ``requests`` and ``aborted`` record what happened. ``token_delay`` is slept before each token.
    With another ``output_format`` it is a model that calls tools, see ``enqueue``.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        max_model_len: int = 4096,
        block_size: int = 16,
        token_delay: float = 0.0,
        enable_prefix_caching: bool = True,
        output_format: OutputFormat = "text",
        max_loras: int = 4,
        chat_date: datetime.date | None = None,
    ) -> None:
        control, template = _FORMATS[output_format]
        self.tokenizer = byte_tokenizer(control)
        self.info = _fake_info(
            name,
            max_model_len,
            block_size,
            enable_prefix_caching,
            self.tokenizer.vocab_size,
            max_loras,
        )
        self.chat_template: ChatTemplate | None = ChatTemplate(
            template, self.tokenizer, date=chat_date
        )
        self.token_delay = token_delay
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self._scripts: deque[_Script] = deque()
        self._tier = TierCounters(num_blocks=self.info.num_blocks)
        self._stats = EngineStats(num_total_blocks=self.info.num_blocks, tiers={TIER: self._tier})
        self._cache = FakeCache(block_size, is_enabled=enable_prefix_caching)
        self._unavailable: EngineUnavailable | None = None
        self._num_deaths = 0
        self._names = AdapterNames(max_loras)

    def enqueue(
        self,
        answer: str | Exception,
        *,
        then: Exception | None = None,
        parse_special: bool = False,
    ) -> None:
        """Answer the next unscripted request with ``answer``; raise ``then`` after its last token.

        With ``parse_special`` the literals of control tokens in ``answer`` are these tokens, as in
        ``<|channel|>final<|message|>Hello<|return|>``. A ``RequestError`` or ``EngineUnavailable``
        is raised when ``generate`` is called, as the real one does; any other exception at the
        first token.
        """
        if isinstance(answer, Exception):
            self._scripts.append(_Script(answer=[], error=answer))
        else:
            ids = self.tokenizer.encode(
                answer, add_special_tokens=False, parse_special=parse_special
            )
            self._scripts.append(_Script(answer=ids, error=then))

    def die(self) -> None:
        """Lose the engine: running requests raise ``EngineDied``, new ones are refused."""
        self._num_deaths += 1
        self.refuse("the engine process died and a fresh one is starting")

    def refuse(self, reason: str, *, retry_after: float = 2.0) -> None:
        """Refuse new requests with ``EngineUnavailable`` until ``recover`` is called."""
        self._unavailable = EngineUnavailable(
            f"{reason}; try again in {retry_after:g} seconds", retry_after=retry_after
        )

    def recover(self) -> None:
        """Take requests again, with an empty cache if the engine had died."""
        self._unavailable = None
        if self._num_deaths > self._stats.num_engine_restarts:
            self._stats.num_engine_restarts = self._num_deaths
            self._cache.clear()

    @property
    def is_ready(self) -> bool:
        """Whether ``generate`` would take a request."""
        return self._unavailable is None

    def stats(self) -> EngineStats:
        """Counters as the engine keeps them."""
        num_cached = self._cache.num_blocks
        self._stats.num_cached_blocks = self._tier.num_cached_blocks = num_cached
        self._stats.num_pinned_blocks = self._cache.num_pinned_blocks
        return self._stats

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Refuse further requests."""
        self.refuse("the model is closed")

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        scope: CacheScope = CacheScope(),  # noqa: B008  frozen
        workload: Workload = "interactive",
        endpoint: str = "",
        urgent_in: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """As ``AsyncLLM.generate``: checks now, works when the generator is stepped."""
        if self._unavailable is not None:
            raise self._unavailable
        request = EngineRequest(
            request_id=request_id or f"fake-{len(self.requests)}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            scope=scope,
            workload=workload,
            endpoint=endpoint,
            urgent_in=urgent_in,
        )
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        self._names.check_loaded(scope)
        script = self._scripts.popleft() if self._scripts else _Script(answer=None)
        if isinstance(script.error, RequestError | EngineUnavailable) and not script.answer:
            raise script.error
        self.requests.append(request)
        return self._run(request, script)

    async def _run(
        self, request: EngineRequest, script: _Script
    ) -> AsyncGenerator[CompletionDelta, None]:
        if request.params.constraint is not None:
            await constraint_check.check(request.params.constraint)
        num_deaths = self._num_deaths
        self._stats.num_running += 1
        report = self._cache.look_up(
            request.scope,
            request.prompt_token_ids,
            is_scored=request.params.prompt_logprobs is not None,
        )
        self._count(request, report)
        self._cache.remember(request.scope, request.prompt_token_ids)
        choices = [self._choice(i, request, script, report) for i in range(request.params.n)]
        try:
            while running := [choice for choice in choices if not choice.finish_reason]:
                for choice in running:
                    await asyncio.sleep(self.token_delay)
                    if self._num_deaths != num_deaths:
                        raise EngineDied("the engine process died while it worked on this request")
                    if script.error is not None and choice.is_exhausted:
                        raise script.error
                    self._stats.num_computed_tokens += 1
                    yield choice.step()
        except (GeneratorExit, asyncio.CancelledError):
            if not all(choice.finish_reason for choice in choices):
                self.aborted.append(request.request_id)
            raise
        finally:
            self._stats.num_running -= 1
            for choice in choices:
                self._cache.remember(request.scope, (*request.prompt_token_ids, *choice.token_ids))

    def _choice(
        self, index: int, request: EngineRequest, script: _Script, report: CacheReport
    ) -> _Choice:
        answer = script.answer
        if answer is None:
            answer = list(self._echo(request.prompt_token_ids).encode())
        return _Choice(
            index=index,
            answer=[*answer, EOS],
            tokenizer=self.tokenizer,
            params=request.params,
            max_tokens=min(
                self.info.max_model_len
                if request.params.max_tokens is None
                else request.params.max_tokens,
                self.info.max_model_len - len(request.prompt_token_ids),
            ),
            cache_report=report,
            prompt=request.prompt_token_ids,
        )

    def _echo(self, prompt: Sequence[int]) -> str:
        """The default answer: what the last user said, or the whole prompt outside a chat."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        _, is_chat, turn = text.rpartition("<|im_start|>user\n")
        said = turn.partition("<|im_end|>")[0] if is_chat else self.tokenizer.decode(prompt)
        return "You said: " + said[-_MAX_ECHO_CHARS:]

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """As ``AsyncLLM.adapters``."""
        return self._names.infos

    async def load_adapter(
        self, name: str, path: str, *, load_inplace: bool = False
    ) -> AdapterInfo:
        """As ``AsyncLLM.load_adapter``, but nothing is read: an adapter is its path."""
        self._names.check_new(name, load_inplace=load_inplace)
        digest = hashlib.sha256(path.encode()).hexdigest()
        info = AdapterInfo(path=path, digest=digest, rank=1, num_bytes=0)
        await self._forget(self._names.set(name, info))
        return info

    async def unload_adapter(self, name: str) -> None:
        """As ``AsyncLLM.unload_adapter``."""
        await self._forget(self._names.remove(name))

    async def _forget(self, digest: str | None) -> None:
        if digest is not None:
            await self.command(PurgeCache(adapter=digest))

    async def command(self, command: CacheCommand) -> CacheAnswer:
        """As ``AsyncLLM.command``, but without a quota of pins."""
        if self._unavailable is not None:
            raise self._unavailable
        return self._cache.command(command)

    def _count(self, request: EngineRequest, report: CacheReport) -> None:
        stats, num_hits = self._stats, report.hits[TIER]
        num_prompt = num_hits + report.num_missed_tokens
        stats.num_computed_tokens += report.num_missed_tokens
        if self.info.enable_prefix_caching:
            stats.prefix_cache_queries += num_prompt
            stats.prefix_cache_hits += num_hits
            self._tier.hit_tokens += num_hits
        for counts, name, num_tokens in (
            (stats.workload_queries, request.workload, num_prompt),
            (stats.workload_hits, request.workload, num_hits),
            (stats.tenant_queries, request.scope.tenant, num_prompt),
            (stats.tenant_hits, request.scope.tenant, num_hits),
            (stats.missed_tokens, report.miss_reason or "", report.num_missed_tokens),
        ):
            counts[name] = counts.get(name, 0) + num_tokens


class _Choice:
    """One answer on its way out, a token per ``step``."""

    def __init__(
        self,
        *,
        index: int,
        answer: Sequence[int],
        tokenizer: Tokenizer,
        params: SamplingParams,
        max_tokens: int,
        cache_report: CacheReport,
        prompt: Sequence[int],
    ) -> None:
        self.index = index
        self._prompt = prompt
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._answer = deque(answer)
        self._vocab_size = tokenizer.vocab_size
        self._reader = output_reader(tokenizer, params)
        self._eos_token_ids = {EOS}
        if params.output_format == "harmony":
            self._eos_token_ids |= {tokenizer.control_tokens[text] for text in _HARMONY_ENDS}
        self._params = params
        self._max_tokens = max_tokens
        self._cache_report = cache_report

    @property
    def is_exhausted(self) -> bool:
        """Whether only the end of the answer is left."""
        return len(self._answer) <= 1

    def step(self) -> CompletionDelta:
        """Produce the next token and what it adds to the text."""
        if self._max_tokens == 0:
            self.finish_reason = "length"
            return CompletionDelta(
                index=self.index,
                text="",
                token_ids=(),
                num_cached_tokens=self._cache_report.hits[TIER],
                cache_report=self._cache_report if self.index == 0 else None,
                prompt_logprobs=self._score_prompt(),
                finish_reason=self.finish_reason,
            )
        token_id = self._next_token()
        is_first = self.index == 0 and not self.token_ids
        prompt_logprobs = () if self.token_ids else self._score_prompt()
        self.token_ids.append(token_id)
        read = self._reader.add(token_id)
        self._check_finish(token_id)
        rest = self._reader.flush() if self.finish_reason else Output()
        return CompletionDelta(
            index=self.index,
            text=read.text + rest.text,
            reasoning=read.reasoning + rest.reasoning,
            tool_calls=read.tool_calls + rest.tool_calls,
            part=read.part,
            token_ids=(token_id,),
            num_cached_tokens=self._cache_report.hits[TIER],
            cache_report=self._cache_report if is_first else None,
            prompt_logprobs=prompt_logprobs,
            logprobs=self._logprobs(token_id, self._params.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _next_token(self) -> int:
        is_early = self._params.ignore_eos or len(self.token_ids) < self._params.min_tokens
        if self._answer and self._answer[0] == EOS and is_early:
            return _FILLER
        return self._answer.popleft()

    def _check_finish(self, token_id: int) -> None:
        is_early = len(self.token_ids) < self._params.min_tokens
        if self._reader.stop_reason is not None:
            self.finish_reason, self._stop_reason = "stop", self._reader.stop_reason
        elif token_id in self._params.stop_token_ids and not is_early:
            self.finish_reason, self._stop_reason = "stop", token_id
        elif token_id in self._eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_tokens:
            self.finish_reason = "length"

    def _score_prompt(self) -> tuple[TokenLogprob, ...]:
        num_top = self._params.prompt_logprobs
        return tuple(one for i in self._prompt[1:] for one in self._logprobs(i, num_top))

    def _logprobs(self, token_id: int, num_top: int | None) -> tuple[TokenLogprob, ...]:
        if num_top is None:
            return ()
        best = -1 / (3 + token_id % 7)  # not a short decimal, so that rounding would show
        top = tuple(
            ((token_id + k) % self._vocab_size, best - math.log1p(k)) for k in range(num_top)
        )
        return (TokenLogprob(token_id=token_id, logprob=best, top=top),)


def _fake_info(
    name: str,
    max_model_len: int,
    block_size: int,
    enable_prefix_caching: bool,
    vocab_size: int,
    max_loras: int,
) -> ModelInfo:
    return ModelInfo(
        name=name,
        architecture="fake",
        num_parameters=0,
        num_multiplied_weights=0,
        num_head_weights=0,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=block_size,
        num_blocks=1024,
        weight_bytes=0,
        step_weight_bytes=0,
        kv_cache_bytes=0,
        tier_bytes={TIER: 0},
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=enable_prefix_caching,
        threads=1,
        kernels="none",
        max_loras=max_loras,
    )
