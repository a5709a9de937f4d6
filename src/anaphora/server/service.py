"""What every route needs: the model, its names, its limits and its counters."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request

from anaphora.errors import ContextTooLong, Forbidden, InvalidRequest, UnknownModel
from anaphora.server.generation import Generation
from anaphora.server.metrics import Metrics
from anaphora.server.response_store import ResponseStore
from anaphora.server.schemas import (
    AnyBody,
    B,
    ChatMessage,
    Prompt,
    TemplateBody,
    check_token_id,
)
from anaphora.server.served import ServedChatTemplate, ServedLLM
from anaphora.server.tenants import Tenants
from anaphora.server.transport import BodyReader
from anaphora.server.unknown import note_unknown
from anaphora.types import CacheScope, SamplingParams, Workload, are_token_ids

MAX_CHOICES_PER_REQUEST = 2048  # prompts times n
# Encoding more characters on the event loop would hold up everybody's streams.
_MAX_INLINE_LENGTH = 4096
_MAX_SHOWN_NAME_CHARS = 100

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
        model_names: Sequence[str],
        *,
        tenants: Tenants,
        metrics: Metrics,
        bodies: BodyReader,
        created: int,
        strict: bool = False,
    ) -> None:
        self.llm = llm
        self.model_names = tuple(model_names)
        self.tenants = tenants
        self.metrics = metrics
        self.created = created
        self.strict = strict
        self.responses = ResponseStore()
        self._bodies = bodies

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
                    "use the admin key"
                    if self.tenants.has_admin_key
                    else "the operator starts the server with --admin-key to have one for this"
                )
            )

    def check_model(self, name: str) -> str:
        """The digest of the adapter of that name, empty for the model itself.

        Raise ``UnknownModel`` unless ``name`` is served here.
        """
        if name in self.model_names:
            return ""
        adapter = self.llm.adapters.get(name)
        if adapter is None:
            raise UnknownModel(
                f"model is {name[:_MAX_SHOWN_NAME_CHARS]!r}, which is not served here; "
                f"use {' or '.join([*self.model_names, *self.llm.adapters])}",
                param="model",
            )
        return adapter.digest

    def scope(self, request: Request, body: ScopedBody, model: str | None) -> CacheScope:
        """Who may share what a request computes or means, with its adapter as it is now."""
        adapter = "" if model is None else self.check_model(model)
        return msgspec.structs.replace(body.scope(request.state.tenant), adapter=adapter)

    def fingerprint(self, model: str) -> str:
        """Changes when the same seed may give another answer."""
        info, adapter = self.llm.info, self.llm.adapters.get(model)
        parts = [info.name, info.architecture, str(info.num_parameters), info.dtype]
        parts += [info.kv_cache_dtype, *([adapter.digest] if adapter else [])]
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    async def encode_chat(self, messages: Sequence[ChatMessage], body: TemplateBody) -> list[int]:
        """Token ids of a chat. Raises ``InvalidRequest``."""
        template = self.chat_template
        plain = [
            message.as_message(f"messages[{i}]", template.output_format)
            for i, message in enumerate(messages)
        ]
        adds_generation_prompt = body.adds_generation_prompt
        tools = body.offered_tools(template.output_format)
        kwargs = body.template_kwargs(reads_reasoning_effort=template.reads_reasoning_effort)

        def encode() -> list[int]:
            return template.encode(
                plain,
                add_generation_prompt=adds_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                tools=tools or None,
                template_kwargs=kwargs,
            )

        num_chars = sum(len(message["content"] or "") for message in plain)
        self._check_length(num_chars, "messages")
        extras = sum(len(str(value)) for message in plain for value in message.values())
        return await _off_loop(encode, extras + len(str(kwargs)) + len(str(tools)))

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
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        scope: CacheScope,
        workload: Workload,
        field: str,
    ) -> Generation:
        """Check ``prompts`` and make them ready to run; ``field`` names where they came from."""
        num_choices = len(prompts) * params.n
        if num_choices > MAX_CHOICES_PER_REQUEST:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n are {num_choices} answers; "
                f"at most {MAX_CHOICES_PER_REQUEST} are allowed at once",
                param=field,
            )
        return Generation(
            self.llm,
            prompts,
            params,
            scope=scope,
            workload=workload,
            request_id=request.state.request_id,
            metrics=self.metrics,
            field=field,
        )


async def _off_loop(work: Callable[[], T], length: int) -> T:
    return work() if length <= _MAX_INLINE_LENGTH else await asyncio.to_thread(work)


def now() -> int:
    """Seconds since 1970, as ``created`` shows them."""
    return int(time.time())
