"""Request bodies. Types are strict: ``"5"`` is no number and ``true`` no integer.

Three kinds of fields: those declared here, which work; those in ``fields.UNSUPPORTED``, which would
change the meaning of a request and are refused; and all others, which are accepted without effect
because clients send many.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import describe, translate, unsupported
from anaphora.server.fields import BATCH_TIERS, ServiceTier, refuse_unsupported
from anaphora.server.structured import read_constraint
from anaphora.server.tools import ToolChoice, check_calls, check_tools, choose_tools
from anaphora.types import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    CacheScope,
    Message,
    SamplingParams,
    Workload,
)

MAX_CACHE_SALT_CHARS = 128
MAX_CACHE_KEY_CHARS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's bound for /v1/completions
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions, not for chat
REASONING_EFFORTS = ("low", "medium", "high")
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
_INT32 = 2**31 - 1
_MAX_KEPT_NAMES, _MAX_KEPT_NAME_CHARS = 64, 128  # of unknown fields

Prompt = str | list[int]


def as_list(value: Any) -> Any:
    """A string as a list of one."""
    if not isinstance(value, str | list | None):
        raise PydanticCustomError("union", "must be a string or an array of strings")
    return [value] if isinstance(value, str) else value


def as_parts(value: Any) -> Any:
    """A string as a list of one part of text."""
    if not isinstance(value, str | list | None):
        raise PydanticCustomError("union", "must be a string or an array of text parts")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(strict=True, extra="allow")

    _forgotten: tuple[str, ...] = PrivateAttr(())

    @property
    def extra_names(self) -> Collection[str]:
        """Names of the fields that are not declared."""
        return self._forgotten or (self.model_extra or {}).keys()

    def forget_extra(self) -> None:
        """Keep a few names alone: unknown fields can be large, and bodies live for long."""
        extra = self.model_extra or {}
        self._forgotten = tuple(name[:_MAX_KEPT_NAME_CHARS] for name in extra)[:_MAX_KEPT_NAMES]
        extra.clear()


class AnyBody(Body):
    """An object."""


B = TypeVar("B", bound=Body)


def parse(schema: type[B], content: bytes) -> B:
    """The body in ``content``. Raises ``InvalidRequest`` that names the field."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        raise translate(error) from None


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """The fields that decide how tokens are chosen and who shares the cache."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_INT32)
    min_tokens: int | None = Field(None, ge=0, le=_INT32)
    temperature: float | None = None
    top_k: int | None = Field(None, ge=-1, le=_INT32)  # -1 and 0: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    stop: Annotated[list[str], BeforeValidator(as_list)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]] | None = (
        Field(None, max_length=MAX_BAD_WORDS)
    )
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_INT32)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    # Checked by hand: they hold schemas.
    response_format: SkipValidation[Any] = None
    structured_outputs: SkipValidation[Any] = None
    guided_json: SkipValidation[Any] = None
    guided_regex: SkipValidation[Any] = None
    guided_choice: SkipValidation[Any] = None
    guided_grammar: SkipValidation[Any] = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_CACHE_KEY_CHARS)
    cache_diagnostics: bool | None = None
    service_tier: ServiceTier | None = None

    @model_validator(mode="after")
    def _check(self) -> SamplingBody:
        refuse_unsupported(self.model_extra or {})
        self.forget_extra()
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest(
                    "stream_options is set but stream is not true; set stream or leave it out",
                    param="stream_options",
                )
            if self.stream_options.continuous_usage_stats:
                raise unsupported("stream_options.continuous_usage_stats", "leave it out")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0; send how many tokens to keep, or -1 for all that fit",
                param="truncate_prompt_tokens",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs come with whole answers only; leave stream out",
                param="prompt_logprobs",
            )
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of totals."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def workload(self) -> Workload:
        """The kind of work: a client may only lower its own."""
        return "batch" if self.service_tier in BATCH_TIERS else "interactive"

    def truncate(self, prompt: list[int], max_model_len: int) -> list[int]:
        """Of ``prompt`` the last, or first, ``truncate_prompt_tokens``."""
        longest = self.truncate_prompt_tokens
        if longest is None:
            return prompt
        if longest == -1:  # what fits beside the answer
            longest = max(1, max_model_len - max(1, self._max_tokens() or 1))
        return prompt[:longest] if self.truncation_side == "right" else prompt[-longest:]

    def scope(self, tenant: str) -> CacheScope:
        """Who may share this request's cached blocks."""
        return CacheScope(
            tenant=tenant,
            cache_salt=self.cache_salt or "",
            prompt_cache_key=self.prompt_cache_key or "",
        )

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """The checked parameters. Raises ``InvalidRequest`` that names the field."""
        self._check_token_ids("stop_token_ids", self.stop_token_ids or [], vocab_size)
        self._check_token_ids("allowed_token_ids", self.allowed_token_ids or [], vocab_size)
        given: dict[str, Any] = {
            "n": self.n,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": None if self.top_k == -1 else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "seed": self.seed,
            "logit_bias": self._logit_bias(vocab_size),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "stop": None if self.stop is None else tuple(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "max_tokens": self._max_tokens(),
            "logprobs": self._num_logprobs(),
            "prompt_logprobs": self._num_prompt_logprobs(),
            "constraint": read_constraint(vars(self)),
        }
        # null means "the default" for OpenAI's clients
        return SamplingParams(**{name: v for name, v in given.items() if v is not None})

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _num_logprobs(self) -> int | None:
        return None

    def _num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _logit_bias(self, vocab_size: int) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise InvalidRequest(
                    "logit_bias has a key that is not a token id; write ids as decimal strings",
                    param="logit_bias",
                )
            if int(key) in biases:
                raise InvalidRequest(
                    f"logit_bias has the token id {int(key)} twice; keep one", param="logit_bias"
                )
            biases[int(key)] = bias
        self._check_token_ids("logit_bias", biases, vocab_size)
        return biases

    @staticmethod
    def _check_token_ids(field: str, ids: Any, vocab_size: int) -> None:
        for token_id in ids:
            check_token_id(field, token_id, vocab_size)


def check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    """Raise ``InvalidRequest`` for an id outside the vocabulary."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{field} holds the token id {describe(token_id)}; "
            f"this model's ids run from 0 to {vocab_size - 1}",
            param=field,
        )


class ContentPart(Body):
    """One part of a message. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def as_text(self, where: str) -> str:
        """The part's text. Raises ``InvalidRequest`` for an image, a sound or a file."""
        if self.type not in ("text", "refusal"):
            raise unsupported(f"{where}.type", 'send parts of type "text" only')
        text = self.text if self.type == "text" else self.refusal
        if text is None:
            raise InvalidRequest(f"{where}.{self.type} is missing; add it", param=where)
        return text


class ChatMessage(Body):
    """One message. Further fields go to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[list[ContentPart], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)] | None
    ) = None
    tool_calls: SkipValidation[Any] = None  # checked by hand, where the model has them

    def as_message(self, where: str) -> Message:
        """The message as a template reads it, with its parts joined to one string."""
        extra = dict(self.model_extra or {})
        if extra.pop("function_call", None):
            raise unsupported(f"{where}.function_call", "send tool_calls")
        if self.role == "function":
            raise unsupported(f"{where}.role", 'send a result with the role "tool"')
        if self.tool_calls:
            extra["tool_calls"] = check_calls(self.tool_calls, self.role, where)
        # "developer" is OpenAI's newer name of "system", the only one that open templates know
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self._text(where), **extra}

    def _text(self, where: str) -> str | None:
        if self.content is None:
            if self.tool_calls:
                return None
            raise InvalidRequest(
                f"{where}.content is null or missing; send a string or text parts",
                param=f"{where}.content",
            )
        parts = [
            part.as_text(f"{where}.content[{index}]") for index, part in enumerate(self.content)
        ]
        return "\n".join(parts)


class TemplateBody(Body):
    """How messages are rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: SkipValidation[Any] = None  # checked by hand: they go to the template as they are
    tool_choice: SkipValidation[Any] = None
    reasoning_effort: str | None = None

    def offered_tools(self) -> list[dict[str, Any]]:
        """The functions to show the model. Raises ``InvalidRequest`` that names the element."""
        return check_tools(self.tools, self.tool_choice)

    def chosen_tools(self) -> ToolChoice:
        """Those of them that an answer may call, or has to. Raises as ``offered_tools``."""
        return choose_tools(self.offered_tools(), self.tool_choice)

    @property
    def names_function(self) -> bool:
        """Whether the answer has to be a call of a certain function."""
        choice = self.tool_choice
        return isinstance(choice, dict) and choice.get("type") == "function"

    def template_kwargs(self, *, reads_reasoning_effort: bool) -> dict[str, Any]:
        """What the template gets beside the messages."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is None or not reads_reasoning_effort:
            return kwargs  # models with one effort are asked for others by many clients
        if self.reasoning_effort not in REASONING_EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)} for this model",
                param="reasoning_effort",
            )
        return kwargs | {"reasoning_effort": self.reasoning_effort}

    @property
    def adds_generation_prompt(self) -> bool:
        """True unless the client says otherwise or has the last message continued."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both true; "
                "set add_generation_prompt to false to continue the last message",
                param="continue_final_message",
            )
        return self.add_generation_prompt


class ChatRequest(SamplingBody, TemplateBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def _max_tokens(self) -> int | None:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                f"max_tokens is {both[0]} but max_completion_tokens is {both[1]}; send one of them",
                param="max_tokens",
            )
        return both[0] if both[1] is None else both[1]

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs} but logprobs is not true; set logprobs",
                param="top_logprobs",
            )
        return None


class CompletionRequest(SamplingBody):
    """The body of ``POST /v1/completions``."""

    # checked by hand in prompts.py: a union of lists gives unreadable errors
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    max_tokens: int | None = Field(DEFAULT_COMPLETION_TOKENS, ge=0, le=_INT32)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.suffix:
            raise unsupported("suffix", "leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "leave it out or set it to n")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens is 0, so nothing would come back; set echo, or ask for a token",
                param="max_tokens",
            )
        return self

    def _max_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def _num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        given = [n for n in (echoed, self.prompt_logprobs) if n is not None]
        return max(given, default=None)

    def _num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(TemplateBody):
    """The body of ``POST /tokenize``: a ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        refuse_unsupported(self.model_extra or {})
        if self.prompt is not None:
            refuse_unsupported({"tools": self.tools, "tool_choice": self.tool_choice})
        return self


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
