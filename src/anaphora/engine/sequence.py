"""One generation: its tokens, its progress and its blocks."""

from __future__ import annotations

import enum

import numpy as np

from anaphora.cache.hashing import BlockHash
from anaphora.cache.pool import Block
from anaphora.types import FinishReason, SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()  # not started, or preempted
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
    ) -> None:
        # Set once.
        self.request_id = request_id
        self.index = index  # of the choice in its request
        self.params = params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.root_hash = root_hash
        # A seeded sequence draws from its own stream, so its tokens do not depend on neighbours.
        entropy = None if params.seed is None else [params.seed % 2**64, index]
        self.rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

        # Filled by the scheduler.
        self.status = SequenceStatus.WAITING
        self.num_cached_tokens: int | None = None  # of the prompt, at the first start
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the stop_token_ids entry that ended it

        # Filled by the cache manager.
        self.num_computed_tokens = 0
        self.blocks: list[Block] = []
        self.block_hashes: list[BlockHash] = []

        # Filled by the engine, a token at a time.
        self.token_ids = list(prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Adds a sampled token and sets ``finish_reason`` if it is the last one."""
        self.token_ids.append(token_id)
        if self.num_generated_tokens >= self.params.min_tokens:
            if token_id in self.params.stop_token_ids:
                self.finish_reason, self.stop_token_id = "stop", token_id
            elif token_id in eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
        if self.finish_reason is None and self.num_generated_tokens >= self.max_tokens:
            self.finish_reason = "length"
