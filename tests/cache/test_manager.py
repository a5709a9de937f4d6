"""The whole cache under random use: sequences, tiers, transfers that end late or fail, purges."""

from __future__ import annotations

import array
import contextlib
import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anaphora.cache.eviction import POLICIES, LeastExpectedReuse
from anaphora.cache.hashing import BlockHasher
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.shares import Owner, Share
from anaphora.cache.tiers import HostMemory, Mover
from anaphora.cache.windows import Window, WindowState
from anaphora.errors import DamagedBlock, RequestError
from anaphora.types import CacheScope

BLOCK = 2  # tokens
BLOCK_BYTES = 4096
TENANTS = ("alice", "bob")


class LateMover(Mover):
    """Runs a transfer when the test says so, in order on each of the two threads it stands for."""

    def __init__(self):
        super().__init__()
        self.waiting = []
        self.done = []

    def submit(self, transfer, pieces):
        self.num_under_way += 1
        self.num_loading += transfer.is_load
        self.waiting.append((transfer, pieces))

    def run_next(self, *, loads, fail=False):
        """Runs the oldest load, or the oldest store."""
        wanted = [pair for pair in self.waiting if pair[0].is_load == loads]
        if not wanted:
            return
        transfer, pieces = wanted[0]
        self.waiting.remove(wanted[0])
        if fail:
            if transfer.is_load:
                pieces.views[0][:4] = b"junk"
            transfer.error = DamagedBlock("injected") if transfer.is_load else OSError("injected")
        else:
            transfer.run(pieces)
        self.done.append(transfer)

    def run_all(self):
        while self.waiting:
            self.run_next(loads=True)
            self.run_next(loads=False)

    def poll(self, timeout=0.0):
        if timeout is None and not self.done:
            assert self.waiting, "it would wait for ever"
            self.run_next(loads=False)
            self.run_next(loads=True)
        ended, self.done = self.done, []
        self.num_under_way -= len(ended)
        self.num_loading -= sum(transfer.is_load for transfer in ended)
        return ended


class Seq:
    """A stand-in for the engine's sequence."""

    def __init__(self, cache, tokens, scope, workload="interactive"):
        self.token_ids = list(tokens)
        self.root_hash = cache.root(scope)
        self.num_public_blocks = cache.num_public_blocks(tokens, scope)
        self.owner = Owner(scope.tenant, workload)
        self.admission = None
        self.num_computed_tokens = self.num_found_tokens = 0
        self.block_table = array.array("i")
        self.window = WindowState()
        self.block_keys = []


class Store:
    """Bytes of tier 1: what a block holds follows from its key, as K/V follow from the tokens."""

    def __init__(self, num_blocks):
        self.bytes = bytearray(num_blocks * BLOCK_BYTES)

    def block_view(self, block_id):
        return memoryview(self.bytes)[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]


def content(key, page=0):
    """Of the block, or of one page of its window part."""
    return hashlib.blake2b(key.block_hash, salt=bytes([page])).digest() * (BLOCK_BYTES // 64)


class Cache:
    """A manager with its tiers, and what an engine would do with it."""

    def __init__(
        self,
        num_blocks,
        lower,
        *,
        policy=LeastExpectedReuse,
        shares=(),
        reserve=2,
        public=(),
        pin_quota=1.0,
        window=None,
    ):
        self.store = Store(num_blocks)
        self.mover = LateMover()
        self.num_pages = 1 + (window.num_pages if window else 0)
        names = ("host", "disk")
        size = self.num_pages * BLOCK_BYTES
        self.storages = {
            name: HostMemory(slots * size, size) for name, slots in zip(names, lower, strict=False)
        }
        self.hierarchy = Hierarchy(
            num_blocks,
            self.store,
            self.storages,
            shares=shares,
            new_policy=policy,
            reserve=reserve,
            window=window,
            mover=self.mover,
        )
        self.manager = CacheManager(
            self.hierarchy,
            BLOCK,
            BlockHasher(bytes(32), {}),
            public_prefixes=public,
            pin_quota=pin_quota,
        )

    def start(self, tokens, *, tenant="alice", salt="", workload="interactive"):
        """A sequence that has its blocks, or None if there is no room."""
        cache = self.manager
        seq = Seq(cache, tokens, CacheScope(tenant, salt), workload)
        match = cache.match(seq)
        if cache.find_awaited(seq, len(match.found)) or not cache.can_start(match, len(tokens)):
            return None
        cache.start(seq, match)
        seq.is_ready = not match.below
        if seq.is_ready:
            assert cache.allocate(seq, seq.num_computed_tokens + 1)
        return seq

    def compute(self, seq, num_tokens=None):
        """Computes the next tokens; False if it got no blocks for them."""
        left = len(seq.token_ids) - seq.num_computed_tokens
        num_tokens = left if num_tokens is None else min(num_tokens, left)
        before = seq.num_computed_tokens
        if not self.manager.allocate(seq, before + num_tokens):
            return False
        self.manager.compute_keys(seq)
        self.look(seq)
        for index in range(before // BLOCK, (before + num_tokens) // BLOCK):
            if index * BLOCK >= seq.num_found_tokens:  # found blocks are never written
                block = self.manager.pool.blocks[seq.block_table[index]]
                assert block.key is None
                self.store.block_view(block.block_id)[:] = content(seq.block_keys[index])
                for page, table in enumerate(seq.window.tables, 1):
                    self.store.block_view(table[index])[:] = content(seq.block_keys[index], page)
        seq.num_computed_tokens += num_tokens
        self.manager.commit(seq, before)
        return True

    def look(self, seq):
        """What attention reads is what it should be."""
        end = seq.num_computed_tokens // BLOCK
        windows = self.manager.windows
        first = windows.first_seen(seq.num_computed_tokens) if windows else end
        tables = [(0, 0, seq.block_table)]
        tables += [(page, first, table) for page, table in enumerate(seq.window.tables, 1)]
        for page, begin, table in tables:
            for index in range(begin, end):
                view = self.store.block_view(table[index])
                assert view == content(seq.block_keys[index], page)

    def run(self, tokens, **scope):
        """Starts, loads, computes and ends one sequence; its report."""
        seq = self.start(tokens, **scope)
        assert seq is not None
        self.settle()
        report = self.manager.report(seq)
        assert self.compute(seq)
        self.manager.free(seq)
        self.settle()
        return report

    def poll(self):
        for seq in self.manager.poll():
            assert seq.admission.num_loading == 0
            assert not seq.is_ready
            seq.is_ready = True
        self.manager.prepare()

    def settle(self):
        """All transfers end, also those that others cause."""
        while True:
            self.poll()
            if not self.mover.waiting and not self.mover.done:
                break
            self.mover.run_all()

    def check(self):
        self.manager.check()
        for tier in self.hierarchy.tiers:
            memory = self.store if tier is self.hierarchy.device else tier.storage
            for block in tier.pool.findable():
                view = memory.block_view(block.block_id)
                assert view[:BLOCK_BYTES] == content(block.key)
                views = [view[i * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(1, self.num_pages)]
                if tier is self.hierarchy.device:
                    pages = block.window.pages if block.window else ()
                    is_full = block.window is None or block.window.num_readers == 0
                    views = [memory.block_view(page.block_id) for page in pages] if is_full else []
                elif not block.has_window:
                    continue
                for page, part in enumerate(views, 1):
                    assert part == content(block.key, page)


PROMPTS = st.builds(
    lambda document, length: list(document[:length]),
    st.sampled_from([(1, 1, 1, 2, 1, 1, 2, 2, 1), (1, 1, 1, 2, 2, 2, 1, 1, 2), (2, 1) * 4]),
    st.integers(1, 9),
)


class CacheMachine(RuleBasedStateMachine):
    """What is findable holds the right bytes; nothing is stranded, leaked or held for ever."""

    @initialize(
        num_blocks=st.integers(4, 14),
        lower=st.lists(st.integers(1, 12), max_size=2),
        has_shares=st.booleans(),
        has_public=st.booleans(),
        reserve=st.integers(0, 4),
        policy=st.sampled_from(list(POLICIES.values())),
        num_pages=st.integers(0, 2),
        num_seen=st.integers(1, 7),
    )
    def create(
        self, num_blocks, lower, has_shares, has_public, reserve, policy, num_pages, num_seen
    ):
        window = None
        if num_pages:
            window = Window(num_tokens=num_seen, num_pages=num_pages, block_size=BLOCK, max_chunk=5)
            num_blocks *= 1 + num_pages
        shares = (Share("class:batch", 0, 0.3), Share("tenant:alice", 0.3, 0.8))
        self.cache = Cache(
            num_blocks,
            lower,
            shares=shares if has_shares else (),
            public=[[1, 1, 1, 2]] if has_public else (),
            reserve=reserve,
            policy=policy,
            window=window,
        )
        self.manager = self.cache.manager
        self.running = []

    @rule(
        tokens=PROMPTS,
        tenant=st.sampled_from(TENANTS),
        salt=st.sampled_from(["", "", "salt"]),
        workload=st.sampled_from(["interactive", "batch", "provisioned"]),
    )
    def start(self, tokens, tenant, salt, workload):
        seq = self.cache.start(tokens, tenant=tenant, salt=salt, workload=workload)
        if seq is not None:
            self.running.append(seq)

    @rule(tokens=PROMPTS, tenant=st.sampled_from(TENANTS))
    def run_alone(self, tokens, tenant):
        """A whole request at once, with all transfers that it needs or causes."""
        seq = self.cache.start(tokens, tenant=tenant)
        if seq is not None:
            self.cache.settle()
            assert seq.is_ready
            self.cache.compute(seq)
            self.manager.free(seq)

    def ready(self):
        return [seq for seq in self.running if seq.is_ready]

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), num_tokens=st.integers(1, 5), new=st.integers(1, 2))
    def compute(self, data, num_tokens, new):
        seq = data.draw(st.sampled_from(self.ready()))
        is_computed = self.cache.compute(seq, num_tokens)
        if not is_computed:
            self.manager.free(seq)  # preempted
            self.running.remove(seq)
        elif seq.num_computed_tokens == len(seq.token_ids) and len(seq.token_ids) < 12:
            seq.token_ids.append(new)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """Finished, aborted or preempted, also while it is loading."""
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.manager.free(seq)

    @precondition(lambda self: self.cache.mover.waiting)
    @rule(loads=st.booleans())
    def move(self, loads):
        self.cache.mover.run_next(loads=loads)

    @precondition(lambda self: self.cache.mover.waiting)
    @rule(loads=st.booleans())
    def fail(self, loads):
        self.cache.mover.run_next(loads=loads, fail=True)

    @precondition(lambda self: self.cache.mover.waiting)
    @rule()
    def settle(self):
        self.cache.settle()

    @rule()
    def poll(self):
        self.cache.poll()

    @rule(
        tenant=st.sampled_from([None, *TENANTS]),
        prefix=st.none() | PROMPTS,
    )
    def purge(self, tenant, prefix):
        scope = CacheScope(tenant or "alice")
        where = None if prefix is None else (scope, prefix)
        self.manager.purge(tenant=tenant, prefix=where)
        for tier in self.cache.hierarchy.tiers:
            for block in tier.pool.findable():
                assert prefix is not None or (tenant is not None and block.owner.tenant != tenant)

    @rule(
        tokens=PROMPTS,
        tenant=st.sampled_from(TENANTS),
        seconds=st.sampled_from([0.0, 1e6]),
    )
    def pin(self, tokens, tenant, seconds):
        with contextlib.suppress(RequestError):
            self.manager.pin(CacheScope(tenant), tokens, seconds)

    @invariant()
    def all_is_well(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for seq in self.running:
            self.manager.free(seq)
        self.cache.settle()
        self.cache.check()
        assert not self.manager._computing
        for tier in self.cache.hierarchy.tiers:
            assert tier.pool.num_available == len(tier.pool.blocks)
        self.manager.purge()
        self.cache.settle()
        for tier in self.cache.hierarchy.tiers:
            assert tier.pool.num_findable == 0
            memory = self.cache.store if tier is self.cache.hierarchy.device else tier.storage
            for block in tier.pool.blocks:  # what was written has been erased
                assert not any(memory.block_view(block.block_id)[:8])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
