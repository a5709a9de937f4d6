"""One generation: its tokens, its progress and its blocks."""

from __future__ import annotations

import array
import enum
import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from anaphora.cache.cacheable import Admission
from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.shares import Owner
from anaphora.cache.windows import WindowState
from anaphora.engine.grammar import Matcher
from anaphora.ops.lora import Adapter
from anaphora.types import CacheReport, FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from anaphora.engine.accounts import Account


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()  # not started, or preempted
    LOADING = enum.auto()  # its blocks are on their way from a lower tier
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One choice of one request.

    ::

        token_ids  [ prompt .................... | generated ........ ]
                   [ cached | computed ......................... | 1  ]
                   0        num_cached_tokens    num_computed_tokens   len(token_ids)

    The newest generated token is not computed yet: the next step computes it.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        root_hash: BlockHash,
        *,
        max_tokens: int,
        owner: Owner,
        account: Account,
        num_public_blocks: int = 0,
        adapter: Adapter | None = None,
        endpoint: str = "",
        urgent_at: float | None = None,
    ) -> None:
        # Set once.
        self.request_id = request_id
        self.index = index  # of the choice in its request
        self.params = params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.root_hash = root_hash
        self.owner = owner  # of the blocks that it computes
        self.endpoint = endpoint  # whose bought capacity it may use, if there is any
        self.urgent_at = urgent_at  # by the scheduler's clock: then it is no batch work any more
        self.num_public_blocks = num_public_blocks  # at its start, shared by all tenants
        self.adapter = adapter  # that it began with, and ends with

        # Filled by the scheduler.
        self.status = SequenceStatus.WAITING
        self.awaited_hash: BlockHash | None = None  # another sequence is computing this block
        self.num_cached_tokens: int | None = None  # of the prompt, at the first start
        self.cache_report: CacheReport | None = None  # of that start; only the first choice has one
        self.account = account  # whom its work is charged to; says how urgent it is
        self.num_charged_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the stop_token_ids entry that ended it

        # Filled by the cache manager.
        self.admission: Admission | None = None  # how it got its blocks
        self.num_computed_tokens = 0
        self.num_found_tokens = 0  # in blocks that it shares and never writes
        self.block_table = array.array("i")
        self.window = WindowState()
        self.block_keys: list[BlockKey] = []

        # Filled by the engine, a token at a time.
        self.token_ids = list(prompt_token_ids)
        self.token_counts: dict[int, int] = {}  # of generated tokens
        self.prompt_logprobs: list[TokenLogprob] = []  # of its second token and those after it
        self.matcher: Matcher | None = None  # of its constraint, after the generated tokens

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        is_wanted = self.params.prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """Its own random stream, so that its tokens do not depend on neighbours."""
        entropy = None if self.params.seed is None else [self.params.seed % 2**64, self.index]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    @functools.cached_property
    def prompt_vocabulary(self) -> npt.NDArray[np.int64]:
        """The prompt's distinct token ids."""
        return np.unique(np.asarray(self.token_ids[: self.num_prompt_tokens], np.int64))

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Adds a sampled token and sets ``finish_reason`` if it is the last one."""
        self.token_ids.append(token_id)
        self.token_counts[token_id] = self.token_counts.get(token_id, 0) + 1
        if self.matcher is not None and token_id in eos_token_ids:
            self.finish_reason = "stop"  # its constraint allows nothing after it
        elif self.num_generated_tokens >= self.params.min_tokens:
            if token_id in self.params.stop_token_ids:
                self.finish_reason, self.stop_token_id = "stop", token_id
            elif token_id in eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
        if self.finish_reason is None and self.num_generated_tokens >= self.max_tokens:
            self.finish_reason = "length"
