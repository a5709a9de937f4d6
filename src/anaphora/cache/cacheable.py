"""What the cache manager needs of a sequence, and what it found for one."""

from __future__ import annotations

import array
import collections
import dataclasses
from collections import Counter
from typing import Protocol

from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.pool import Block, BlockRecord
from anaphora.cache.shares import Owner
from anaphora.cache.tiers import LowerTier
from anaphora.cache.windows import WindowState


@dataclasses.dataclass(slots=True)
class Admission:
    """How a sequence got its blocks at its latest start."""

    num_found: int  # blocks in tier 1
    num_declined: int  # blocks that a lower tier had, but computing was cheaper
    to_load: collections.deque[tuple[LowerTier, Block, BlockRecord]]  # held; the next ones
    first_seen: int  # block from which on windowed layers see something
    is_unwanted: bool = False  # what the tiers have was not looked for
    num_loading: int = 0  # blocks on their way from lower tiers
    num_loaded: Counter[str] = dataclasses.field(default_factory=Counter)  # by tier


class Keyed(Protocol):
    """What decides the keys of blocks."""

    token_ids: list[int]
    root_hash: BlockHash
    num_public_blocks: int  # at its start, shared by all tenants
    block_keys: list[BlockKey]  # of its full blocks, each computed once


@dataclasses.dataclass(slots=True)
class Prefix:
    """Tokens that nobody generates anything after."""

    token_ids: list[int]
    root_hash: BlockHash
    num_public_blocks: int
    block_keys: list[BlockKey] = dataclasses.field(default_factory=list)


class Cacheable(Keyed, Protocol):
    """What the manager needs of a sequence. It fills all but the owner."""

    owner: Owner
    admission: Admission | None
    num_computed_tokens: int  # K and V exist for these, and the next step goes on after them
    num_found_tokens: int  # in blocks that it found, which it never writes
    block_table: array.array[int]  # ids of the blocks it holds, in order
    window: WindowState


@dataclasses.dataclass(slots=True)
class Match:
    """What the tiers have of the start of a sequence, at this moment."""

    found: list[Block]  # in tier 1
    below: list[tuple[LowerTier, Block]]  # right after them, worth fetching
    declined: list[tuple[LowerTier, Block]]  # right after these, but computing is cheaper
    first_seen: int = 0  # block from which on windowed layers see something
    is_unwanted: bool = False  # nothing was looked for: all has to be computed
    num_wanted: int = 0  # blocks that are there, if some could not be used for want of window parts
