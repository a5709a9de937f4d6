"""The scheduler's door to the cache: match, start, allocate, commit, free."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from anaphora.cache.cacheable import Admission, Cacheable, Keyed, Match, Prefix
from anaphora.cache.hashing import (
    TOKEN_BYTES,
    BlockHash,
    BlockHasher,
    BlockKey,
    encode_tokens,
)
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.pins import Pins
from anaphora.cache.pool import Block, BlockPool
from anaphora.cache.shares import Owner
from anaphora.cache.tiers import Estimate, LowerTier, Transfer
from anaphora.cache.windows import Windows
from anaphora.errors import InvalidRequest
from anaphora.types import CacheReport, CacheScope, MissReason, PinInfo, PurgeCounts

# The last token of a prompt is always computed: its logits choose the first new token.
NUM_ALWAYS_COMPUTED = 1
PUBLIC_TENANT = "*"  # whose blocks all tenants share; no key can have this name
_KEYS_BETWEEN_YIELDS = 64
_MAX_COMPARED = 64  # prompts that one is compared with, to say where it differs
_MIN_LOADS = 4  # at once, also if they push out blocks that were not copied down yet
_MAX_REMEMBERED = 4096  # beginnings of prompts, to tell other scopes apart


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counters in tokens since the start. Queries and hits are of first starts only."""

    num_queries: int = 0
    num_hits: int = 0
    queries_of: Counter[str] = dataclasses.field(default_factory=Counter)
    hits_of: Counter[str] = dataclasses.field(default_factory=Counter)
    missed_because: Counter[str] = dataclasses.field(default_factory=Counter)
    tenant_queries: Counter[str] = dataclasses.field(default_factory=Counter)
    tenant_hits: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds_saved: float = 0.0  # hits at the speed of prefill at that time


class CacheManager:
    """Finds, gives and takes back the blocks of sequences.

    Knows no tensors: block ids and opaque token bytes only. Not thread-safe; the step loop owns it.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        block_size: int,
        hasher: BlockHasher,
        *,
        enable_caching: bool = True,
        public_prefixes: Sequence[Sequence[int]] = (),
        pin_quota: float = 0.0,
    ) -> None:
        self.hierarchy = hierarchy
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool: BlockPool = hierarchy.device.pool
        self.windows = hierarchy.windows
        self.stats = CacheStats()
        self.compute_time = Estimate()  # of one token in a prefill
        # Blocks of the pool that a sequence's next block takes.
        self._num_pages = 1 + (self.windows.window.num_pages if self.windows else 0)
        self.pins = Pins(self.pool, block_size, pin_quota, self._num_pages)
        self._hasher = hasher
        self._public_root = hasher.root({"public": b""})
        self._public_prefixes = [list(prefix) for prefix in public_prefixes]
        # Blocks that a sequence is about to compute or load: others wait for them (single flight).
        self._computing: dict[BlockHash, Cacheable] = {}
        self._unfinished: list[tuple[Cacheable, Admission]] = []  # some loads have not begun yet
        self._loaded: list[Cacheable] = []  # all that they waited for has ended
        # (tenant, first block's tokens) → roots under which this beginning was asked for
        self._beginnings: OrderedDict[tuple[str, bytes], dict[BlockHash, str]] = OrderedDict()

    def root(self, scope: CacheScope) -> BlockHash:
        """Where the blocks begin that requests of ``scope`` share."""
        return self._hasher.root(
            {
                "tenant": scope.tenant.encode(),
                "adapter": scope.adapter.encode(),
                "cache_salt": scope.cache_salt.encode(),
                "prompt_cache_key": scope.prompt_cache_key.encode(),
            }
        )

    def num_public_blocks(self, token_ids: list[int], scope: CacheScope) -> int:
        """Full blocks at the start of a prompt that all tenants share: those in a public prefix.

        None for a request that narrows its sharing, or uses an adapter.
        """
        if scope.cache_salt or scope.prompt_cache_key or scope.adapter or not self.enable_caching:
            return 0
        size, longest = self.block_size, 0
        for prefix in self._public_prefixes:
            num_blocks = 0
            for end in range(size, min(len(prefix), len(token_ids)) + 1, size):
                if prefix[end - size : end] != token_ids[end - size : end]:
                    break
                num_blocks += 1
            longest = max(longest, num_blocks)
        return longest

    def match(self, seq: Cacheable) -> Match:
        """The longest run of blocks at the start of ``seq`` that some tier has. Changes no block.

        It may cover all tokens; ``start`` leaves the last one to be computed all the same.
        """
        found: list[Block] = []
        below: list[tuple[LowerTier, Block]] = []
        self.compute_keys(seq)
        keys = seq.block_keys[: self._num_matchable(seq)]
        for key in keys:
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        if self.hierarchy.lower:
            for key in keys[len(found) :]:
                place = self.hierarchy.find_below(key)
                if place is None:
                    break
                below.append(place)
        seconds = self.compute_time.seconds
        num_worth = self.hierarchy.num_worth_loading(
            below, None if seconds is None else seconds * self.block_size
        )
        match = Match(found, below[:num_worth], below[num_worth:])
        if self.windows is not None:
            self._cut(match, self.windows, len(seq.token_ids))
        return match

    def _cut(self, match: Match, windows: Windows, num_tokens: int) -> None:
        """Ends the run where windowed layers have what they see."""
        has_part = [block.window is not None for block in match.found]
        has_part += [slot.has_window for _, slot in match.below]
        num_blocks = windows.cut(has_part, num_tokens)
        match.first_seen = windows.first_needed(num_blocks, num_tokens)
        if num_blocks < len(has_part):
            match.num_wanted = len(has_part)
            del match.below[max(0, num_blocks - len(match.found)) :]
            del match.found[num_blocks:]
            match.declined.clear()

    def find_awaited(self, seq: Cacheable, num_found: int) -> BlockHash | None:
        """The last block of the run after those in tier 1 that others are about to bring there.

        None if nobody computes or loads the next block: then ``seq`` has to do it itself.
        """
        awaited = None
        for index in range(num_found, self._num_matchable(seq)):
            block_hash = self._key(seq, index).block_hash
            if block_hash not in self._computing:
                break
            awaited = block_hash
        return awaited

    def is_being_computed(self, block_hash: BlockHash | None) -> bool:
        """Whether a sequence is about to compute or load this block."""
        return block_hash in self._computing

    def can_start(self, match: Match, num_tokens: int) -> bool:
        """Whether a sequence can have what it matched and new blocks for ``num_tokens`` in all."""
        num_blocks = -(-num_tokens // self.block_size)
        needed = num_blocks - len(match.found)
        needed += sum(block.ref_count == 0 for block in match.found)  # free now, not after start
        if self.windows is not None:
            needed += self.windows.num_new_pages(num_blocks, match.found[match.first_seen :])
        return needed <= self.pool.num_available

    def num_cached_tokens(self, seq: Cacheable, num_blocks: int) -> int:
        """Tokens of ``seq`` that need no computation with ``num_blocks``: all but the last."""
        return min(num_blocks * self.block_size, len(seq.token_ids) - NUM_ALWAYS_COMPUTED)

    def start(self, seq: Cacheable, match: Match) -> None:
        """Gives what ``match`` found just now to ``seq`` and announces what it computes.

        If ``match.below`` has any, they are on their way; ``poll`` gives ``seq`` when all have come
        that will, and only then it may run.
        """
        assert not seq.block_table
        to_load = collections.deque((tier, slot, slot.record) for tier, slot in match.below)
        seq.admission = Admission(
            len(match.found), len(match.declined), to_load, match.first_seen, match.is_unwanted
        )
        for tier, slot in match.below:  # before anything is taken, which may push others out
            tier.pool.hold(slot)
        for block in match.found:
            self.pool.hold(block)
            self.pool.hit(block, seq.owner)
        seq.block_table.extend(block.block_id for block in match.found)
        if self.windows is not None:
            self.windows.begin(seq.window, match.found, match.first_seen)
            seq.window.num_wanted = match.num_wanted
            seq.window.num_prompt_blocks = self._num_matchable(seq)
        self._set_found(seq, len(match.found))
        for index in range(len(match.found), self._num_matchable(seq)):
            self._computing.setdefault(self._key(seq, index).block_hash, seq)
        self.hierarchy.decline(match.declined)
        if to_load:
            self._load_more(seq, seq.admission)

    def _load_more(self, seq: Cacheable, admission: Admission) -> None:
        """Fetches as many blocks as there is room prepared for; the others when these are here.

        So what they push out of tier 1 has the time to go down.
        """
        num_ready = self.pool.num_ready
        if num_ready < _MIN_LOADS and self.hierarchy.is_storing:
            self._unfinished.append((seq, admission))  # room is being made
            return
        most = min(len(admission.to_load), max(_MIN_LOADS, num_ready))
        num_blocks = self._num_with_room(admission, most)
        end = functools.partial(self._end_load, seq, admission)
        admission.num_loading += num_blocks  # all at once: taking a block may end earlier loads
        for _ in range(num_blocks):
            tier, slot, record = admission.to_load.popleft()
            block = self.pool.take(seq.owner)
            seq.block_table.append(block.block_id)
            if self.windows is not None and record.depth >= admission.first_seen:
                self.windows.extend(seq.window, block, seq.owner)
            elif self.windows is not None:
                self.windows.extend_without(seq.window)
            self.hierarchy.load(tier, slot, record, block, end)
        if num_blocks == 0:  # the others took all
            self._end_loading(seq, admission)

    def _num_with_room(self, admission: Admission, most: int) -> int:
        """How many of the next blocks to load, and their window parts, the pool can take."""
        left, num_blocks = self.pool.num_available, 0
        for _, _, record in itertools.islice(admission.to_load, most):
            left -= self._num_pages if record.depth >= admission.first_seen else 1
            if left < 0:
                break
            num_blocks += 1
        return num_blocks

    def _set_found(self, seq: Cacheable, num_blocks: int) -> None:
        seq.num_found_tokens = num_blocks * self.block_size
        seq.num_computed_tokens = self.num_cached_tokens(seq, num_blocks)

    def _end_load(self, seq: Cacheable, admission: Admission, transfer: Transfer) -> None:
        """One block for ``seq`` has come, or could not; what comes after a gap is not used."""
        key, depth, owner, _ = transfer.record
        is_waiting = seq.admission is admission  # not aborted or preempted meanwhile
        is_next = seq.num_found_tokens == depth * self.block_size
        if (
            transfer.error is None
            and (
                is_next and self._is_findable_before(seq, depth)
                if is_waiting  # otherwise it is going to write to this block
                else depth == 0 or self.pool.is_staying(key.parent)
            )
            and self.pool.publish(transfer.block, key, depth, owner)
        ):
            if is_waiting:
                self._set_found(seq, depth + 1)
                admission.num_loaded[transfer.lower.name] += 1
                self._retract(seq, key)
            elif depth and not self.pool.is_findable(key.parent):
                self.pool.forget(transfer.block)  # its owner's maximum cost it its parent
        admission.num_loading -= 1
        if not is_waiting or admission.num_loading:
            return
        is_whole = seq.num_found_tokens == len(seq.block_table) * self.block_size
        if admission.to_load and is_whole:  # else one was lost, and the others are of no use
            self._unfinished.append((seq, admission))
        else:
            self._end_loading(seq, admission)

    def _end_loading(self, seq: Cacheable, admission: Admission) -> None:
        """All has come that will: the sequence can go on after that."""
        self._load_no_more(admission)
        if self.windows is not None:
            self._settle_window(seq, self.windows)
        self._loaded.append(seq)

    def _settle_window(self, seq: Cacheable, windows: Windows) -> None:
        """Where blocks were lost on the way, windowed layers may lack what comes before."""
        num_found, num_tokens = seq.num_found_tokens // self.block_size, len(seq.token_ids)
        blocks = [self.pool.blocks[block_id] for block_id in seq.block_table]
        has_part = [block.window is not None for block in blocks[:num_found]]
        num_blocks = windows.cut(has_part, num_tokens)
        if num_blocks == len(blocks):
            return
        windows.end(seq.window)
        first = windows.first_needed(num_blocks, num_tokens)
        windows.begin(seq.window, blocks[:num_blocks], first)
        self.pool.release(blocks[num_blocks:])
        del seq.block_table[num_blocks:]
        seq.window.num_wanted = max(seq.window.num_wanted, num_found)
        self._set_found(seq, num_blocks)

    def _load_no_more(self, admission: Admission) -> None:
        for tier, slot, _ in admission.to_load:
            tier.pool.release([slot])
        admission.to_load.clear()

    def poll(self, timeout: float = 0.0) -> list[Cacheable]:
        """Takes note of what has been moved; the sequences for which all has come that will."""
        self.pins.expire()
        if self.hierarchy.lower:
            self.hierarchy.poll(timeout)
            unfinished, self._unfinished = self._unfinished, []
            if unfinished:
                self.hierarchy.prepare()
            for seq, admission in unfinished:
                if seq.admission is admission:
                    self._load_more(seq, admission)
        loaded, self._loaded = self._loaded, []
        return [seq for seq in loaded if seq.admission is not None]

    def prepare(self) -> None:
        """Starts to copy down what the next step may push out of tier 1."""
        if self.hierarchy.lower:
            self.hierarchy.prepare()

    def report(self, seq: Cacheable) -> CacheReport:
        """Counts the first start of a request, and says what was found for it and what not."""
        assert seq.admission is not None
        num_prompt, num_cached = len(seq.token_ids), seq.num_computed_tokens
        report = self._explain(seq, num_prompt - num_cached)
        stats = self.stats
        if self.enable_caching:
            stats.num_queries += num_prompt
            stats.num_hits += num_cached
            for tier in self.hierarchy.tiers:
                tier.counters.hit_tokens += report.hits[tier.name]
        stats.queries_of[seq.owner.workload] += num_prompt
        stats.hits_of[seq.owner.workload] += num_cached
        stats.tenant_queries[seq.owner.tenant] += num_prompt
        stats.tenant_hits[seq.owner.tenant] += num_cached
        stats.seconds_saved += num_cached * (self.compute_time.seconds or 0.0)
        if report.miss_reason is not None:
            stats.missed_because[report.miss_reason] += report.num_missed_tokens
        return report

    def _explain(self, seq: Cacheable, num_missed: int) -> CacheReport:
        assert seq.admission is not None
        left, hits = seq.num_computed_tokens, {}
        for tier in self.hierarchy.tiers:
            is_device = tier is self.hierarchy.device
            num = seq.admission.num_found if is_device else seq.admission.num_loaded[tier.name]
            hits[tier.name] = min(left, num * self.block_size)
            left -= hits[tier.name]
        index = seq.num_found_tokens // self.block_size
        explain = functools.partial(CacheReport, hits=hits, num_missed_tokens=num_missed)
        if not self.enable_caching:
            return explain(miss_reason="disabled")
        if seq.admission.is_unwanted:
            return explain(miss_reason="prompt_logprobs")
        if index == self._num_matchable(seq):
            return explain(miss_reason="no_full_block")
        key = self._key(seq, index)
        loss = self.hierarchy.history.find(key.block_hash)
        if index < seq.window.num_wanted:
            return explain(miss_reason="window_lost")
        if seq.admission.num_declined:
            return explain(miss_reason="recompute_cheaper")
        if loss is not None:
            age = time.monotonic() - loss.seconds
            return explain(miss_reason=loss.reason, lost_from=loss.tier, lost_seconds_ago=age)
        if index == 0 and (other := self._find_other_scope(seq, key)) is not None:
            return explain(miss_reason=other)
        num_equal = self._first_differing(seq, key)
        if num_equal is None or index + num_equal == 0:  # nothing begins as it does
            return explain(miss_reason="never_seen")
        position = index * self.block_size + num_equal
        return explain(miss_reason="diverged", first_differing_token=position)

    def _first_differing(self, seq: Cacheable, key: BlockKey) -> int | None:
        """Where in the block the nearest known prompt of the same tenant goes on differently."""
        longest = None
        for _, block in zip(
            range(_MAX_COMPARED), self.hierarchy.children(key.parent), strict=False
        ):
            # What other tenants say after a public prefix is theirs.
            if block.key is not None and block.owner.tenant in (seq.owner.tenant, PUBLIC_TENANT):
                longest = max(longest or 0, _num_equal_tokens(key.tokens, block.key.tokens))
        return longest

    def _find_other_scope(self, seq: Cacheable, key: BlockKey) -> MissReason | None:
        """Whether this tenant's cache has the beginning under another salt, key or adapter."""
        beginning = seq.owner.tenant, key.tokens
        roots = self._beginnings.setdefault(beginning, {})
        found: MissReason | None = None
        for root, adapter in roots.items():
            if root != seq.root_hash and any(
                block.key is not None and block.key.tokens == key.tokens
                for block in self.hierarchy.children(root)
            ):
                is_same = adapter == seq.owner.adapter
                found = "other_scope" if is_same else "other_adapter"
        roots[seq.root_hash] = seq.owner.adapter
        if len(roots) > _MAX_COMPARED:
            del roots[next(iter(roots))]
        self._beginnings.move_to_end(beginning)
        if len(self._beginnings) > _MAX_REMEMBERED:
            self._beginnings.popitem(last=False)
        return found

    def allocate(self, seq: Cacheable, num_tokens: int) -> bool:
        """Gives ``seq`` blocks for its first ``num_tokens`` tokens, or nothing and False."""
        missing = -(-num_tokens // self.block_size) - len(seq.block_table)
        if missing * self._num_pages > self.pool.num_available:
            return False
        for _ in range(missing):
            block = self.pool.take(seq.owner)
            seq.block_table.append(block.block_id)
            if self.windows is not None:
                self.windows.extend(seq.window, block, seq.owner)
        return True

    def commit(self, seq: Cacheable, num_computed_before: int) -> None:
        """Makes the blocks findable that became full since ``num_computed_before``."""
        if self.enable_caching:
            self._publish(seq, num_computed_before)
        self.slide(seq)

    def slide(self, seq: Cacheable) -> None:
        """Gives back what windowed layers see no more."""
        if self.windows is not None:
            self.windows.slide(seq.window, seq.num_computed_tokens)

    def _publish(self, seq: Cacheable, num_computed_before: int) -> None:
        full = seq.num_computed_tokens // self.block_size
        first = max(num_computed_before, seq.num_found_tokens) // self.block_size
        for index in range(first, full):
            key = self._key(seq, index)
            block = self.pool.blocks[seq.block_table[index]]
            self._retract(seq, key)
            if not self._is_findable_before(seq, index):
                continue
            history, known = self.hierarchy.history, self.pool.find(key)
            if known is not None:  # computed by two at once, with the same bits: keep one of them
                self.pool.hold(known)
                if self.windows is not None:
                    self.windows.share(seq.window, index, known)
                self.pool.release([block])
                seq.block_table[index] = known.block_id
            elif self.pool.publish(block, key, index, self._owner(seq, index)):
                history.discard(key.block_hash)
            else:
                history.record(key.block_hash, "over_share", self.hierarchy.device.name)

    def _is_findable_before(self, seq: Cacheable, index: int) -> bool:
        """Whether ``seq`` holds the findable block before ``index``; it may have been purged."""
        return index == 0 or self.pool.blocks[seq.block_table[index - 1]].key is not None

    def free(self, seq: Cacheable) -> None:
        """Takes everything back from ``seq``: finished, aborted, failed or preempted."""
        if self.windows is not None:
            self.windows.end(seq.window)
        self.pool.release([self.pool.blocks[block_id] for block_id in seq.block_table])
        del seq.block_table[:]
        seq.num_computed_tokens = seq.num_found_tokens = 0
        if seq.admission is not None:
            self._load_no_more(seq.admission)
            seq.admission = None
        for key in seq.block_keys:  # followers take over what it did not finish
            self._retract(seq, key)

    def compute_keys(self, seq: Keyed, yield_: Callable[[], None] | None = None) -> None:
        """Hashes all that can be matched of ``seq``; each block once.

        ``yield_`` is called now and then, for when another thread wants to go on meanwhile.
        """
        num_keys = self._num_matchable(seq)
        for end in range(len(seq.block_keys), num_keys, _KEYS_BETWEEN_YIELDS):
            self._add_keys(seq, min(end + _KEYS_BETWEEN_YIELDS, num_keys))
            if yield_ is not None:
                yield_()

    def _owner(self, seq: Cacheable, index: int) -> Owner:
        if index < seq.num_public_blocks:
            return seq.owner._replace(tenant=PUBLIC_TENANT)
        return seq.owner

    def _retract(self, seq: Cacheable, key: BlockKey) -> None:
        if self._computing.get(key.block_hash) is seq:
            del self._computing[key.block_hash]

    def _num_matchable(self, seq: Keyed) -> int:
        if not self.enable_caching:
            return 0
        return len(seq.token_ids) // self.block_size

    def _key(self, seq: Keyed, index: int) -> BlockKey:
        """The key of block ``index``."""
        if index >= len(seq.block_keys):
            self._add_keys(seq, index + 1)
        return seq.block_keys[index]

    def _add_keys(self, seq: Keyed, num_keys: int) -> None:
        """Computes the keys of a sequence up to ``num_keys``, each once and in order."""
        keys, child = seq.block_keys, self._hasher.child
        first, num_bytes = len(keys), self.block_size * TOKEN_BYTES
        encoded = encode_tokens(seq.token_ids[first * self.block_size : num_keys * self.block_size])
        parent = keys[-1].block_hash if keys else self._first_parent(seq)
        for index in range(first, num_keys):
            start = (index - first) * num_bytes
            tokens = encoded[start : start + num_bytes]
            hashed_parent = parent
            if index and index == seq.num_public_blocks:
                hashed_parent = self._hasher.branch(seq.root_hash, parent)
            key = BlockKey(child(hashed_parent, tokens), parent, tokens)
            keys.append(key)
            parent = key.block_hash

    def _first_parent(self, seq: Keyed) -> BlockHash:
        return self._public_root if seq.num_public_blocks else seq.root_hash

    def pin(self, scope: CacheScope, token_ids: list[int], seconds: float) -> PinInfo:
        """Keeps the blocks of a prefix that are in tier 1 now. Raises ``RequestError``."""
        keys = self._keys_of(scope, token_ids)
        found = [key.block_hash for key in keys if self.pool.find(key) is not None]
        if not found:
            raise InvalidRequest(
                f"nothing of this prefix is cached; it has {len(token_ids)} tokens, and only full "
                f"blocks of {self.block_size} are kept"
            )
        return self.pins.add(scope.tenant, found, seconds)

    def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        prefix: tuple[CacheScope, list[int]] | None = None,
    ) -> dict[str, PurgeCounts]:
        """Forgets and erases in all tiers what belongs to all the given; everything if none is.

        ``prefix``: the last full block of these tokens and all that comes after it. The tenant
        ``PUBLIC_TENANT`` stands for the public prefixes and all that comes after them. What running
        requests hold is found by nobody any more, and is erased when they end.
        """
        wanted: set[BlockHash] | None = None
        if prefix is not None:
            wanted = set()
            for key in self._keys_of(*prefix)[-1:]:
                wanted |= {key.block_hash, *self._hashes_after(key.block_hash)}
        elif tenant == PUBLIC_TENANT:  # with what tenants have after it, which would be stranded
            tenant, wanted = None, self._hashes_after(self._public_root)

        def is_wanted(block: Block) -> bool:
            return (
                (tenant is None or block.owner.tenant == tenant)
                and (adapter is None or block.owner.adapter == adapter)
                and (wanted is None or (block.key is not None and block.key.block_hash in wanted))
            )

        counts = self.hierarchy.purge(is_wanted)
        self.pins.end_lost()
        return {
            name: PurgeCounts(blocks=blocks, in_use=in_use)
            for name, (blocks, in_use) in counts.items()
        }

    def _hashes_after(self, block_hash: BlockHash) -> set[BlockHash]:
        blocks = (block for _, block in self.hierarchy.descendants(block_hash))
        return {block.key.block_hash for block in blocks if block.key is not None}

    def _keys_of(self, scope: CacheScope, token_ids: list[int]) -> list[BlockKey]:
        num_public = self.num_public_blocks(token_ids, scope)
        prefix = Prefix(token_ids, self.root(scope), num_public)
        self.compute_keys(prefix)
        return prefix.block_keys

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        self.hierarchy.check()
        for block_hash, seq in self._computing.items():
            assert any(key.block_hash == block_hash for key in seq.block_keys)
            assert seq.admission is not None, "a sequence without blocks is announced as computing"


def _num_equal_tokens(mine: bytes, theirs: bytes) -> int:
    """Tokens of the common beginning of two blocks."""
    for start in range(0, len(mine), TOKEN_BYTES):
        if mine[start : start + TOKEN_BYTES] != theirs[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return len(mine) // TOKEN_BYTES
