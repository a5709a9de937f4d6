"""The plain data that travels between the parts: requests, their outputs, and counters.

These are msgspec structs because they also cross the socket to the engine process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from anaphora.constraints import Constraint
from anaphora.errors import ContextTooLong, InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
# Kinds of work, most urgent first: bought capacity, pay per token, what may take its time.
Workload = Literal["provisioned", "interactive", "batch"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
DEFAULT_TENANT = "default"
# How a model writes answers: as text, or with reasoning and calls of tools marked in it.
OutputFormat = Literal["text", "harmony", "llama3"]
# What a generated token is part of; "format" is what marks the other parts.
OutputPart = Literal["content", "reasoning", "tool_call", "format"]
# Why computing a prompt's next block could not be skipped.
MissReason = Literal[
    "no_full_block",  # what is left does not fill one
    "never_seen",
    "diverged",  # known prompts go on differently
    "evicted",
    "window_lost",  # its blocks are there, but not what windowed layers see before the next one
    "over_share",  # not kept: its tenant or class had its maximum already
    "purged",
    "damaged",  # it could not be read back
    "recompute_cheaper",  # than fetching it from a lower tier
    "other_adapter",  # same tokens, computed with another adapter
    "other_scope",  # same tokens, under another cache_salt or prompt_cache_key of this tenant
    "prompt_logprobs",  # asked for: all of the prompt is computed
    "disabled",
]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

MAX_CHOICES = 128  # n
MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20  # as OpenAI's top_logprobs
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_RUNS = 256
MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens for one request. Raises ``InvalidRequest`` that names the bad field.

    ``temperature`` 0 is greedy. ``max_tokens`` None means up to the context's end. ``logprobs`` is
    the number of alternatives to report beside the chosen token, None for no logprobs at all.
    ``max_tokens`` 0 computes the prompt and generates nothing.
    ``constraint`` is what an answer has to match. ``output_format`` says how to take the answer
    apart (``ChatTemplate.output_format``), and ``tool_names`` which functions it may call where
    only the name tells a call from text.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}  # msgspec copies it for each instance
    allowed_token_ids: tuple[int, ...] = ()  # the only ones; empty: all
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # runs of tokens that no output may hold
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, which finds no hits
    constraint: Constraint | None = None
    output_format: OutputFormat = "text"
    tool_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        _check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("top_k", self.top_k, 0, MAX_TOKENS)
        _check_range("top_p", self.top_p, 0, 1, low_open=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 10)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), MAX_SEED)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are "
                "allowed",
                param="logit_bias",
            )
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100, 100)
        if len(self.bad_token_ids) > MAX_BAD_RUNS or not all(self.bad_token_ids):
            raise InvalidRequest(
                f"bad_token_ids has {len(self.bad_token_ids)} runs of tokens; at most "
                f"{MAX_BAD_RUNS} are allowed, none of them empty",
                param="bad_token_ids",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for stop in self.stop:
            _check_range("stop string's length", len(stop), 1, MAX_STOP_STRING_CHARS, param="stop")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)


@functools.cache
def _params_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(SamplingParams)  # it resolves annotations at each call


def _check_types(params: SamplingParams) -> None:
    """Structs check types when they are decoded, not when they are made: do it here as well."""
    for field in _params_fields():
        value = getattr(params, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"{field.name} has the type {type(value).__name__}: {error}", param=field.name
            ) from None


def _check_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    param: str | None = None,
) -> None:
    # `not (a <= b)` so that NaN fails too
    if not (low < value if low_open else low <= value) or not value <= high:
        start = "above" if low_open else "at least"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise InvalidRequest(
            f"{name} is {value}; it must be {start} {low:g}{limit}", param=param or name
        )


class CacheScope(msgspec.Struct, frozen=True):
    """Who may share K/V blocks. The tenant comes from the API key, never from the client.

    ``cache_salt`` and ``prompt_cache_key`` are the client's and can only narrow the sharing within
    its tenant. ``adapter`` is the digest of the adapter that computes, empty for the model itself.
    """

    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    prompt_cache_key: str = ""
    adapter: str = ""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked to do: token ids only, never text."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    scope: CacheScope = CacheScope()
    workload: Workload = "interactive"
    endpoint: str = ""  # whose bought capacity serves it, for provisioned work
    urgent_in: float | None = None  # seconds until batch work becomes interactive

    def check(self, *, max_model_len: int, vocab_size: int) -> None:
        """Raises ``RequestError`` if a model of this size cannot serve the request."""
        num_prompt = len(self.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if num_prompt >= max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens, but the context holds {max_model_len} tokens "
                "for prompt and output together; shorten the prompt",
                param="prompt",
            )
        max_tokens = self.params.max_tokens
        if max_tokens is not None and num_prompt + max_tokens > max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, but the "
                f"context holds {max_model_len} tokens; shorten the prompt or ask for at most "
                f"{max_model_len - num_prompt} tokens",
                param="max_tokens",
            )
        for param, token_ids in (
            ("prompt", self.prompt_token_ids),
            ("stop_token_ids", self.params.stop_token_ids),
            ("logit_bias", self.params.logit_bias),
            ("allowed_token_ids", self.params.allowed_token_ids),
            *(("bad_token_ids", run) for run in self.params.bad_token_ids),
        ):
            if not are_token_ids(token_ids, vocab_size):
                wrong = next(i for i in token_ids if not are_token_ids((i,), vocab_size))
                raise InvalidRequest(
                    f"{param} has the token id {wrong!r}; token ids are integers from 0 to "
                    f"{vocab_size - 1}",
                    param=param,
                )


def are_token_ids(values: Collection[object], vocab_size: int) -> bool:
    """Whether all ``values`` are integers from 0 to ``vocab_size`` - 1; quick for long prompts."""
    if not set(map(type, values)) <= {int}:  # bool is an int in Python but not here
        return False
    ids = cast("Collection[int]", values)
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


class TokenTable(msgspec.Struct, frozen=True, tag=True):
    """What constraints need to know of a vocabulary: the engine sees no other text."""

    token_bytes: list[bytes]  # by token id
    control_ids: list[int]  # tokens that stand for no text


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What of one prompt was found in the cache, and why the rest was not. Counts in tokens."""

    hits: dict[str, int]  # by tier: device, host, disk
    num_missed_tokens: int
    miss_reason: MissReason | None  # of the first block that was not found
    first_differing_token: int | None = None  # diverged: its position in the prompt
    lost_from: str | None = None  # evicted, purged, damaged: the tier
    lost_seconds_ago: float | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """One generated token's log-probability and its best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one choice: a token, or only an end (abort, error)."""

    request_id: str
    index: int
    num_cached_tokens: int
    cache_report: CacheReport | None = None  # with the first output of a request
    prompt_logprobs: list[TokenLogprob] = []  # with a choice's first output: of all but one token
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_param: str | None = None  # the request's field, where its value is the reason


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a step added to the call of a tool; ``name`` is in the first delta of a call alone."""

    index: int  # of the call in its answer
    name: str | None = None
    arguments: str = ""  # a piece of JSON, as the model writes it


class CompletionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice. The last delta of a choice carries its ``finish_reason``.

    ``text`` can be empty while characters or a possible stop string are still incomplete.
    ``reasoning`` and ``tool_calls`` are apart from it where ``output_format`` has them.
    ``stop_reason`` is the stop string or stop token id that ended it, None for end of sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_cached_tokens: int  # of the prompt, the same in every delta of a request
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    part: OutputPart = "content"  # what ``token_ids`` are part of
    cache_report: CacheReport | None = None  # in the first delta of a request
    # In a choice's first delta, if asked for: of the prompt's tokens from the second one on.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TierCounters(msgspec.Struct, kw_only=True):
    """One tier of the cache: gauges of now, then counters since the start."""

    num_blocks: int = 0
    num_cached_blocks: int = 0
    hit_tokens: int = 0  # of prompts whose computation was skipped thanks to this tier
    evicted_blocks: int = 0
    refused_blocks: int = 0  # not kept, because their owner has its maximum share
    guarantees_broken: int = 0  # blocks taken from a guaranteed share, or pinned, for want of any
    stored_blocks: int = 0  # copied down into this tier
    stored_bytes: int = 0
    store_seconds: float = 0.0
    dropped_blocks: int = 0  # not copied down, for want of time
    failed_stores: int = 0
    loaded_blocks: int = 0  # fetched up from this tier
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: int = 0  # damaged, or the disk failed: each a miss
    recomputed_blocks: int = 0  # not fetched, because computing is quicker


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since the engine's start and gauges of now. Queries and hits are in tokens."""

    num_running: int = 0
    num_loading: int = 0
    num_waiting: int = 0
    num_total_blocks: int = 0
    num_used_blocks: int = 0  # held by sequences
    num_cached_blocks: int = 0  # findable by their hash, held or not
    num_window_blocks: int = 0  # further ones that windowed layers have of them
    num_pinned_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_evicted_blocks: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0  # prefill and decode, recomputation after preemption included
    num_engine_restarts: int = 0
    prefill_seconds_saved: float = 0.0
    num_audited_blocks: int = 0
    num_audits_skipped: int = 0  # sampled, but there was no time or room
    num_audit_mismatches: int = 0
    tiers: dict[str, TierCounters] = {}
    workload_queries: dict[str, int] = {}
    workload_hits: dict[str, int] = {}
    tenant_queries: dict[str, int] = {}
    tenant_hits: dict[str, int] = {}
    missed_tokens: dict[str, int] = {}  # by MissReason
    served_tokens: dict[str, float] = {}  # by workload, weighted as config.Weights says
    bought_tokens: dict[str, float] = {}  # of them, by the endpoint that had bought them


GAUGES = frozenset(
    {
        *("num_running", "num_loading", "num_waiting", "num_total_blocks", "num_used_blocks"),
        *("num_cached_blocks", "num_pinned_blocks", "num_blocks", "num_window_blocks"),
    }
)


class PurgeCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget and erase what belongs to all that is given; everything if nothing is."""

    tenant: str | None = None
    adapter: str | None = None
    prefix: list[int] | None = None  # its last full block and all that comes after it
    scope: CacheScope = CacheScope()  # of ``prefix``


class PinPrefix(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep the cached blocks of a prefix for a while."""

    token_ids: list[int]
    scope: CacheScope
    seconds: float


class EndPin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep a prefix no longer."""

    tenant: str
    pin_id: str


class ListPins(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What does a tenant keep?"""

    tenant: str


CacheCommand = PurgeCache | PinPrefix | EndPin | ListPins


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a LoRA adapter; requests name it by the digest that comes back."""

    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No new request uses it. What it computed is purged now, and again when its requests end."""

    digest: str


EngineCommand = CacheCommand | LoadAdapter | UnloadAdapter


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is loaded."""

    path: str  # as it was given
    digest: str  # SHA-256 of all that decides its results, in hexadecimal
    rank: int  # the largest
    num_bytes: int  # of memory


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that is kept."""

    pin_id: str
    num_tokens: int
    seconds_left: float


class PurgeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge found in one tier."""

    blocks: int
    in_use: int  # of them: found by nobody any more, and erased when their requests end


class CacheAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``CacheCommand`` did."""

    purged: dict[str, PurgeCounts] = {}  # by tier
    pins: list[PinInfo] = []


class EngineAnswer(CacheAnswer, frozen=True, kw_only=True):
    """What an ``EngineCommand`` did."""

    adapter: AdapterInfo | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, resolved: printed at start and shown by ``/v1/models``."""

    name: str
    architecture: str
    num_parameters: int
    num_multiplied_weights: int  # each token is multiplied with them; those of the head not counted
    num_head_weights: int  # only a token whose logits are wanted is multiplied with them
    vocab_size: int
    max_model_len: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    weight_bytes: int
    step_weight_bytes: int  # of them, what a step that chooses one token reads
    kv_cache_bytes: int
    tier_bytes: dict[str, int]  # of all tiers of the cache, the highest first
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    threads: int
    kernels: str  # for example "native avx2"
    max_loras: int = 0  # adapters that may be loaded at a time
    max_lora_rank: int = 0
    adapter_bytes: int = 0  # of memory, kept free for them
    sliding_window: int = 0  # tokens that windowed layers see, if they have blocks of their own
    num_window_blocks: int = 0  # blocks that windowed layers then take for those of one block

    @property
    def num_cache_tokens(self) -> int:
        """How many tokens the K/V store holds, if all of them are seen by windowed layers."""
        return self.num_blocks // (1 + self.num_window_blocks) * self.block_size


def add_stats(finished: EngineStats, current: EngineStats) -> EngineStats:
    """``current``'s gauges, and counters that go on where ``finished`` ended."""
    return _add_counters(finished, current)


S = TypeVar("S", EngineStats, TierCounters)


def _add_counters(finished: S, current: S) -> S:
    totals: dict[str, Any] = {}
    for name in current.__struct_fields__:
        old, new = getattr(finished, name), getattr(current, name)
        if name in GAUGES:
            totals[name] = new
        elif isinstance(new, dict):
            totals[name] = {**old, **new}
            for key, one in old.items():
                other = new.get(key, type(one)())  # nothing: a fresh engine has not told yet
                is_tier = isinstance(one, TierCounters)
                totals[name][key] = _add_counters(one, other) if is_tier else one + other
        else:
            totals[name] = old + new
    return type(current)(**totals)


Message = dict[str, Any]  # one chat message: role, content and what else its template reads
