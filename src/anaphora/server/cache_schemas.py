"""Bodies of the cache's own routes. Their fields are ours, so an unknown one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict, Field, SkipValidation, model_validator

from anaphora.errors import InvalidRequest
from anaphora.server.schemas import (
    MAX_CACHE_KEY_CHARS,
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    ChatMessage,
    TemplateBody,
)
from anaphora.types import CacheScope

DEFAULT_PIN_SECONDS = 3600.0
MAX_PIN_SECONDS = 30 * 86400.0
_MAX_NAME_CHARS = 128

_OF_PROMPT = frozenset({"prompt", "add_special_tokens"})
_OF_MESSAGES = frozenset(
    {
        *("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        *("tools", "tool_choice", "reasoning_effort"),
    }
)
_OF_PREFIX = _OF_PROMPT | _OF_MESSAGES | {"cache_salt", "prompt_cache_key"}


class PrefixBody(TemplateBody):
    """The beginning of prompts: a ``prompt`` or ``messages``, rendered as the routes that run them.

    What a chat adds for the answer is left out unless asked for.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    # checked by hand as in completions: a union of lists gives unreadable errors
    prompt: SkipValidation[str | list[int] | None] = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_CACHE_KEY_CHARS)

    @property
    def adds_generation_prompt(self) -> bool:
        """Only if the client says so: what follows the prefix is not part of it."""
        return self.add_generation_prompt is not None and super().adds_generation_prompt

    def scope(self, tenant: str) -> CacheScope:
        """Where the prefix is cached."""
        return CacheScope(
            tenant=tenant,
            cache_salt=self.cache_salt or "",
            prompt_cache_key=self.prompt_cache_key or "",
        )

    def _given(self) -> set[str]:
        return {name for name in self.model_fields_set if getattr(self, name) is not None}

    def _check_prefix(self) -> None:
        given = self._given()
        if ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        for other in sorted(given & (_OF_PROMPT if "messages" in given else _OF_MESSAGES)):
            kind = "messages" if "messages" in given else "a prompt"
            raise InvalidRequest(f"{other} has no meaning for {kind}; leave it out", param=other)


class PinRequest(PrefixBody):
    """The body of ``POST /cache/pins``."""

    model: str
    ttl_seconds: float = Field(DEFAULT_PIN_SECONDS, ge=1, le=MAX_PIN_SECONDS, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> PinRequest:
        self._check_prefix()
        return self


PurgeKind = Literal["all", "tenant", "adapter", "prefix"]
# What may be given beside each kind; anything else would promise another purge than is done.
_FIELDS_OF: Mapping[PurgeKind, frozenset[str]] = {
    "all": frozenset(),
    "tenant": frozenset({"tenant"}),
    "adapter": frozenset({"tenant", "adapter"}),
    "prefix": frozenset({"tenant"}) | _OF_PREFIX,
}


class PurgeRequest(PrefixBody):
    """The body of ``POST /cache/purge``."""

    kind: PurgeKind = Field(alias="scope")
    model: str | None = None
    tenant: str | None = Field(None, min_length=1, max_length=_MAX_NAME_CHARS)
    adapter: str | None = Field(None, min_length=1, max_length=_MAX_NAME_CHARS)

    @model_validator(mode="after")
    def _check(self) -> PurgeRequest:
        for other in sorted(self._given() - {"kind", "model"} - _FIELDS_OF[self.kind]):
            raise InvalidRequest(
                f'{other} is given, but scope is "{self.kind}", which does not depend on it; '
                f"leave {other} out or choose another scope",
                param=other,
            )
        if self.kind == "prefix":
            self._check_prefix()
        if self.kind == "adapter" and self.adapter is None:
            raise InvalidRequest('adapter is missing; scope "adapter" needs it', param="adapter")
        return self
