"""What every route needs: the model, its names, its limits and its counters."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.types import ASGIApp

from anaphora.config import Weights
from anaphora.errors import (
    ContextTooLong,
    EngineError,
    Forbidden,
    InvalidRequest,
    NotKept,
    StoreUnavailable,
)
from anaphora.server.batch_runner import BatchRunner
from anaphora.server.endpoints import Endpoint, Endpoints
from anaphora.server.envelope import log_failure
from anaphora.server.gate import Drain
from anaphora.server.generation import Generation
from anaphora.server.internal import internal_of
from anaphora.server.limits import Limiter
from anaphora.server.meter import Asked, Meter
from anaphora.server.metrics import Metrics
from anaphora.server.registry import LimitTerms, Registry, stored_keys
from anaphora.server.response_store import ResponseStore
from anaphora.server.schemas import (
    AnyBody,
    B,
    ChatMessage,
    Prompt,
    SamplingBody,
    TemplateBody,
    check_token_id,
)
from anaphora.server.served import ServedChatTemplate, ServedLLM
from anaphora.server.store import Store
from anaphora.server.tenants import KnownKey, Tenants
from anaphora.server.transport import BodyReader
from anaphora.server.unknown import note_unknown
from anaphora.server.usage import UsageLog
from anaphora.types import CacheScope, PurgeCache, SamplingParams, Workload, are_token_ids

logger = logging.getLogger("anaphora.server")

_REFRESH_SECONDS = 1.0
MAX_CHOICES_PER_REQUEST = 2048  # prompts times n
# Encoding more characters on the event loop would hold up everybody's streams.
_MAX_INLINE_LENGTH = 4096

T = TypeVar("T")


class ScopedBody(Protocol):
    """A body that says who may share what it computes."""

    def scope(self, tenant: str) -> CacheScope:
        """The scope of its tenant's request, without an adapter."""


class Service:
    """Shared by the routes of one app."""

    def __init__(
        self,
        llm: ServedLLM,
        endpoints: Endpoints,
        *,
        tenants: Tenants,
        limiter: Limiter,
        metrics: Metrics,
        store: Store | None,
        weights: Weights,
        bodies: BodyReader,
        created: int,
        strict: bool = False,
    ) -> None:
        self.llm = llm
        self.endpoints = endpoints
        self.tenants = tenants
        self.limiter = limiter
        self.metrics = metrics
        self.weights = weights
        self.created = created
        self.drain = Drain()
        self.usage_log = None if store is None else UsageLog(store)
        self._store = store
        self._revision = -1  # of the database, as last read
        # Names and since when: a name can be given to somebody else.
        self._stored_tenants: frozenset[tuple[str, float]] = frozenset()
        self._reason = ""  # why they could not be read the last time
        self.limiter.update(endpoints.limits())
        if self.usage_log is not None:
            metrics.watch(self.usage_log)
        self.strict = strict
        self.responses = ResponseStore()
        self._bodies = bodies

    @property
    def store(self) -> Store:
        """Raises ``NotKept`` if the server has no database."""
        if self._store is None:
            raise NotKept("this server keeps no database; its operator can give it one")
        return self._store

    async def run(self, app: ASGIApp) -> None:
        """Takes over what changes in the database and works batches off, until it is cancelled.

        ``app`` is the whole server: a batch's line takes the same way as a client's request.
        """
        if self._store is None:
            return
        batches = BatchRunner(
            app, self._store, self.endpoints, max_in_flight=2 * self.llm.info.max_num_seqs
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(batches.run())
            group.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self.take_over()
            await asyncio.sleep(_REFRESH_SECONDS)

    async def take_over(self) -> None:
        """``refresh``, again in a second if it fails; whatever fails, the server goes on."""
        reason = ""
        try:
            await self.refresh()
        except (StoreUnavailable, EngineError) as error:
            reason = str(error)
        except Exception as error:
            log_failure("of taking over tenants and limits", error)
        if reason and reason != self._reason:
            logger.warning("tenants and limits stay as they are: %s", reason)
        self._reason = reason

    async def refresh(self) -> None:
        """Keys and limits as the database has them now. Raises ``StoreUnavailable``."""
        revision = await self.store.run(self.store.revision)
        if revision == self._revision:
            return
        keys, limits, tenants = await self.store.run(_read_registry, Registry(self.store))
        self.tenants.update(keys)
        self.limiter.update({**self.endpoints.limits(), **limits})
        for tenant, _ in self._stored_tenants - tenants:
            self.responses.forget(tenant)
            await self.llm.command(PurgeCache(tenant=tenant))
        self._stored_tenants = tenants
        self._revision = revision

    def close(self) -> None:
        """Writes what is left to write."""
        if self.usage_log is not None:
            self.usage_log.close()

    async def read(self, request: Request, schema: type[B], *, strict: bool | None = None) -> B:
        """The checked body of ``request``. Unknown fields are refused if ``strict``."""
        body = await self._bodies.read(request, schema)
        note_unknown(request, body, strict=self.strict if strict is None else strict)
        return body

    async def read_fields(self, request: Request) -> dict[str, Any]:
        """The body of ``request``, which can be of several kinds."""
        return dict((await self._bodies.read(request, AnyBody)).model_extra or {})

    async def translate(self, request: Request, work: Callable[[], T], more: int = 0) -> T:
        """Result of ``work`` on the body of ``request``, off the event loop if that is large.

        ``more``: bytes that ``work`` takes beside the body.
        """
        # without a length the body came in chunks
        length = int(request.headers.get("content-length", _MAX_INLINE_LENGTH + 1))
        return await _off_loop(work, length + more)

    def check_admin(self, request: Request) -> None:
        """Raise ``Forbidden`` unless the key may do what concerns other tenants."""
        if not self.tenants.is_admin(request.state.tenant):
            raise Forbidden(
                "this key may only act on its own tenant; "
                + (
                    "this takes an admin key"
                    if self.tenants.has_admin_key
                    else "the operator makes an admin key: --admin-key, or "
                    "'anaphora keys create --admin'"
                )
            )

    def endpoint(self, request: Request, name: str) -> Endpoint:
        """What a request names as its model. Raises ``UnknownModel``."""
        return self.endpoints.get(name, request.state.tenant)

    def scope(self, request: Request, body: ScopedBody, endpoint: Endpoint | None) -> CacheScope:
        """Who may share what a request computes or means, with its adapter as it is now."""
        adapter = "" if endpoint is None else self.endpoints.digest(endpoint)
        return msgspec.structs.replace(body.scope(request.state.tenant), adapter=adapter)

    def fingerprint(self, endpoint: Endpoint) -> str:
        """Changes when the same seed may give another answer."""
        info, adapter = self.llm.info, self.llm.adapters.get(endpoint.adapter or "")
        parts = [info.name, info.architecture, str(info.num_parameters), info.dtype]
        parts += [info.kv_cache_dtype, *([adapter.digest] if adapter else [])]
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    async def encode_chat(self, messages: Sequence[ChatMessage], body: TemplateBody) -> list[int]:
        """Token ids of a chat. Raises ``InvalidRequest``."""
        template = self.chat_template
        plain = [message.as_message(f"messages[{i}]") for i, message in enumerate(messages)]
        adds_generation_prompt = body.adds_generation_prompt
        tools = body.offered_tools()
        kwargs = body.template_kwargs(reads_reasoning_effort=template.reads_reasoning_effort)

        def encode() -> list[int]:
            offered, template_tools = template.offer(plain, tools or None)
            return template.encode(
                offered,
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                tools=template_tools,
                template_kwargs=kwargs,
            )

        num_chars = sum(len(message["content"] or "") for message in plain)
        self._check_length(num_chars, "messages")
        extras = sum(len(str(value)) for message in plain for value in message.values())
        return await _off_loop(encode, extras + len(str(kwargs)) + len(str(tools)))

    def sampling_params(self, body: SamplingBody) -> SamplingParams:
        """Those of ``body``, its words as tokens. Raises ``InvalidRequest``."""
        params = body.sampling_params(self.llm.info.vocab_size)
        if not body.bad_words:
            return params
        # As vLLM: at the beginning of a word and after a space.
        spellings = [
            tuple(self.llm.tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for word in body.bad_words
            for space in ("", " ")
        ]
        runs = tuple(dict.fromkeys(run for run in spellings if run))
        return msgspec.structs.replace(params, bad_token_ids=runs)

    def reading(self, body: TemplateBody, params: SamplingParams) -> SamplingParams:
        """``params`` that take the answer to ``body`` apart, and hold it to a call it asks for.

        Raises ``InvalidRequest`` for tools and their choice.
        """
        chosen = body.chosen_tools()
        if not body.continue_final_message:
            return self.chat_template.reading(
                params, chosen.tools, must_call=chosen.must_call, only_these=chosen.is_subset
            )
        if chosen.must_call:
            raise InvalidRequest(
                "tool_choice asks for a call, but continue_final_message for text; send one",
                param="tool_choice",
            )
        return params  # the answer goes on inside the text

    @property
    def chat_template(self) -> ServedChatTemplate:
        """The model's chat template. Raises ``InvalidRequest`` if it has none."""
        if self.llm.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self.llm.chat_template

    def _check_length(self, num_chars: int, field: str) -> None:
        """Refuse what cannot fit, before the work of encoding it."""
        longest = self.llm.info.max_model_len * self.llm.tokenizer.max_token_chars
        if num_chars > longest:
            raise ContextTooLong(
                f"{field} has {num_chars} characters, but the context holds "
                f"{self.llm.info.max_model_len} tokens, which are at most {longest} characters; "
                "shorten it",
                param=field,
            )

    async def encode_prompts(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of raw prompts, in which control tokens count: they are all the client's own.

        Raises ``InvalidRequest`` for a token id that does not exist.
        """

        def encode_all() -> list[list[int]]:
            return [self._encode_prompt(prompt, add_special_tokens) for prompt in prompts]

        return await _off_loop(encode_all, sum(map(len, prompts)))

    def _encode_prompt(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            return self.llm.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, parse_special=True
            )
        if len(prompt) > self.llm.info.max_model_len:
            raise ContextTooLong(
                f"prompt has {len(prompt)} token ids, but the context holds "
                f"{self.llm.info.max_model_len} tokens; shorten it",
                param="prompt",
            )
        vocab_size = self.llm.info.vocab_size
        if not are_token_ids(prompt, vocab_size):
            for token_id in prompt:
                check_token_id("prompt", token_id, vocab_size)
        return prompt

    def generation(
        self,
        request: Request,
        endpoint: Endpoint,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        scope: CacheScope,
        workload: Workload,
        field: str,
    ) -> Generation:
        """Check ``prompts`` and make them ready to run; ``field`` names where they came from.

        ``workload`` is what the client asks for, which can only lower the endpoint's.
        """
        params = _bounded(params, endpoint)
        num_choices = len(prompts) * params.n
        if num_choices > MAX_CHOICES_PER_REQUEST:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n are {num_choices} answers; "
                f"at most {MAX_CHOICES_PER_REQUEST} are allowed at once",
                param=field,
            )
        internal = internal_of(request.scope)
        asked = Asked(
            request_id=request.state.request_id,
            caller=request.state.caller,
            endpoint=endpoint,
            workload="batch" if internal else endpoint.workload_of(workload),
            adapter=scope.adapter,
            is_line=internal is not None,
            num_input_tokens=sum(map(len, prompts)),
            num_output_tokens=sum(self._max_output(prompt, params) for prompt in prompts),
        )
        meter = Meter(
            asked,
            limiter=self.limiter,
            metrics=self.metrics,
            usage_log=self.usage_log,
            weights=self.weights,
        )
        request.state.meter = meter
        return Generation(
            self.llm,
            prompts,
            params,
            scope=scope,
            meter=meter,
            metrics=self.metrics,
            field=field,
            urgent_in=None if internal is None else internal.urgent_in,
        )

    def _max_output(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens that a prompt's choices can have at most."""
        longest = max(0, self.llm.info.max_model_len - len(prompt))
        asked = longest if params.max_tokens is None else params.max_tokens
        return params.n * min(asked, longest)


def _bounded(params: SamplingParams, endpoint: Endpoint) -> SamplingParams:
    """With the endpoint's bound of an answer. Raises ``InvalidRequest`` beyond it."""
    most = endpoint.max_output_tokens
    if most is None or (params.max_tokens is not None and params.max_tokens <= most):
        return params
    if params.max_tokens is not None:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}; this endpoint gives at most {most}",
            param="max_tokens",
        )
    return msgspec.structs.replace(params, max_tokens=max(most, params.min_tokens))


def _read_registry(
    registry: Registry,
) -> tuple[list[KnownKey], dict[tuple[str, str], LimitTerms], frozenset[tuple[str, float]]]:
    return (
        stored_keys(registry),
        registry.limits(),
        frozenset((row["name"], row["created_at"]) for row in registry.tenants()),
    )


async def _off_loop(work: Callable[[], T], length: int) -> T:
    return work() if length <= _MAX_INLINE_LENGTH else await asyncio.to_thread(work)


def now() -> int:
    """Seconds since 1970, as ``created`` shows them."""
    return int(time.time())
