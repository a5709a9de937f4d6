"""What the server needs from a model. ``AsyncLLM`` and ``FakeLLM`` both provide it.

The protocols are narrow on purpose: the server can be tested, and embedded, without an engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from anaphora.types import (
    AdapterInfo,
    CacheAnswer,
    CacheCommand,
    CacheScope,
    CompletionDelta,
    EngineStats,
    Message,
    ModelInfo,
    OutputFormat,
    SamplingParams,
    Workload,
)


class ServedTokenizer(Protocol):
    """Text to token ids and back. Must be safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_token_chars(self) -> int:
        """No token stands for more characters."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``; control tokens written in it count only if ``parse_special``."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""


class ServedChatTemplate(Protocol):
    """Turns messages into the token ids of a prompt."""

    @property
    def output_format(self) -> OutputFormat:
        """How the model answers."""

    @property
    def reads_reasoning_effort(self) -> bool:
        """Whether the template takes it as an argument."""

    def offer(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """What to ``encode`` so that the model knows ``tools``, in its form or as text."""

    def reading(
        self,
        params: SamplingParams,
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        must_call: bool = ...,
        only_these: bool = ...,
    ) -> SamplingParams:
        """``params`` that take an answer apart which may call ``tools``, or has to."""

    def encode(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat. Raises ``InvalidRequest`` for what it cannot render."""


class ServedLLM(Protocol):
    """A running model. Whoever created it also closes it; the server never does."""

    @property
    def info(self) -> ModelInfo:
        """What is served, resolved."""

    @property
    def tokenizer(self) -> ServedTokenizer:
        """The model's tokenizer."""

    @property
    def chat_template(self) -> ServedChatTemplate | None:
        """The model's chat template, None for a base model."""

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The LoRA adapters that are loaded, by name."""

    async def load_adapter(self, name: str, path: str, *, load_inplace: bool = ...) -> AdapterInfo:
        """Load a PEFT directory under a name; ``load_inplace`` allows that it replaces another.

        Raises ``RequestError`` for the name, ``UnusableAdapter`` for the directory, and as
        ``command``.
        """

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away from new requests. Raises ``UnknownModel``, and as ``command``."""

    @property
    def is_ready(self) -> bool:
        """Whether an engine can take requests now."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        scope: CacheScope = ...,
        workload: Workload = ...,
        endpoint: str = ...,
        urgent_in: float | None = ...,
        request_id: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Stream the output of all ``params.n`` choices, interleaved.

        ``endpoint`` names the bought capacity that provisioned work uses; batch work becomes
        interactive after ``urgent_in`` seconds.
        ``scope.adapter`` is the digest of a loaded adapter, or empty. Checks its arguments when
        called, not at the first step: ``InvalidRequest``, ``ContextTooLong``, ``UnknownModel`` and
        ``EngineUnavailable`` come at once. Work begins with the first step
        of the generator, so one that was never stepped leaves nothing behind. Closing or
        cancelling it aborts the request and frees its blocks. Raises ``EngineDied`` when the
        engine is lost on the way.
        """

    async def command(self, command: CacheCommand) -> CacheAnswer:
        """Purge or pin. Raises ``RequestError``, ``EngineUnavailable`` and ``EngineDied``."""

    def stats(self) -> EngineStats:
        """The engine's latest counters; never blocks."""

    async def close(self) -> None:
        """Stop the engine; running requests end with an error."""
