"""Tiers below the one that attention reads: their blocks, their bytes, and the threads between.

Which blocks exist and where is decided by the step loop alone (``CacheManager``). Threads only move
bytes of blocks that the loop holds for them, and report what they did.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from anaphora.cache.pool import Block, BlockPool, BlockRecord, WindowPart
from anaphora.errors import DamagedBlock
from anaphora.machine import map_memory
from anaphora.types import TierCounters

logger = logging.getLogger(__name__)

_MEMORY = 0.125  # weight of the newest measurement in a running mean
_HOPE = 0.98  # see Estimate.hope
_MAX_BATCH = 32  # transfers that are told of at once
_Job = tuple[Callable[[], None], "Transfer | None"]


@runtime_checkable
class Memory(Protocol):
    """Block bytes that can be looked at: tier 1, and host memory."""

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, writable."""


class Storage(Protocol):
    """The bytes of a lower tier. ``write`` and ``read`` run on two threads, never for one slot."""

    @property
    def num_slots(self) -> int:
        """How many blocks fit."""

    @property
    def is_memory(self) -> bool:
        """Whether its bytes can be looked at (``Memory``), and copying takes no longer than that:
        then the step loop may do it itself."""

    def write(self, slot: int, record: BlockRecord, data: memoryview, /) -> None:
        """Raises ``OSError``."""

    def read(self, slot: int, record: BlockRecord, into: memoryview, /) -> None:
        """Raises ``DamagedBlock`` or ``OSError``; ``into`` is then of no use."""

    def erase(self, slot: int) -> None:
        """Leaves nothing of the block that can be read. Raises ``OSError``."""

    def sync(self) -> None:
        """What was erased stays so, also after a power cut. Raises ``OSError``."""

    def close(self) -> None:
        """Gives the storage back."""


class HostMemory:
    """Tier 2: memory of this process, beside the K/V store. Stays out of core dumps."""

    is_memory = True

    def __init__(self, capacity: int, block_bytes: int, *, lock: bool = False) -> None:
        """``capacity`` in bytes. Raises ``ConfigError``."""
        self.num_slots = capacity // block_bytes
        self._block_bytes = block_bytes
        self._bytes = memoryview(
            map_memory(self.num_slots * block_bytes, option="--swap-space", lock=lock)
        )

    def block_view(self, block_id: int) -> memoryview:
        """As ``Memory`` says."""
        start = block_id * self._block_bytes
        return self._bytes[start : start + self._block_bytes]

    def write(self, slot: int, _record: BlockRecord, data: memoryview, /) -> None:
        """As ``Storage`` says."""
        _copy(self.block_view(slot), data)

    def read(self, slot: int, _record: BlockRecord, into: memoryview, /) -> None:
        """As ``Storage`` says."""
        _copy(into, self.block_view(slot))

    def erase(self, slot: int) -> None:
        """As ``Storage`` says."""
        self.block_view(slot)[:] = bytes(self._block_bytes)

    def sync(self) -> None:
        """As ``Storage`` says."""

    def close(self) -> None:
        """As ``Storage`` says."""


def _copy(into: memoryview, data: memoryview) -> None:
    """As ``into[:] = data``, but other threads run meanwhile: with a slice, one that copies block
    after block would let the step loop wait for 5 ms each time."""
    assert into.nbytes == data.nbytes
    ctypes.memmove(_address(into), _address(data), into.nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@dataclasses.dataclass(slots=True)
class Estimate:
    """A running mean of measured seconds; None before the first."""

    seconds: float | None = None

    def add(self, seconds: float) -> None:
        """One more measurement."""
        old = seconds if self.seconds is None else self.seconds
        self.seconds = old + _MEMORY * (seconds - old)

    def hope(self) -> None:
        """A mean that keeps us from trying would never be corrected: let it fall slowly."""
        if self.seconds is not None:
            self.seconds *= _HOPE


class Tier:
    """One tier: which blocks it has, and where their bytes are."""

    def __init__(self, name: str, pool: BlockPool) -> None:
        self.name = name
        self.pool = pool
        self.counters = TierCounters()  # of what the pool does not count itself


class LowerTier(Tier):
    """A tier that attention cannot read: host memory or disk."""

    def __init__(self, name: str, pool: BlockPool, storage: Storage) -> None:
        super().__init__(name, pool)
        self.storage = storage
        self.load_time = Estimate()  # of one block, on the thread that loads
        self.num_pending = 0  # stores on their way


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A block's bytes where they lie: in one run, or page by page with those of its window part.

    A lower tier has ``num_bytes`` for them, whether the part is there or not.
    """

    views: tuple[memoryview, ...]
    num_bytes: int

    def run(self) -> memoryview:
        """Memory of ``num_bytes``: the pieces' own if they are one run."""
        is_run = len(self.views) == 1 and len(self.views[0]) == self.num_bytes
        return self.views[0] if is_run else memoryview(bytearray(self.num_bytes))

    def gather(self) -> memoryview:
        """The bytes in one run."""
        run = self.run()
        if run is not self.views[0]:
            start = 0
            for view in self.views:
                run[start : start + len(view)] = view
                start += len(view)
        return run

    def scatter(self, run: memoryview) -> None:
        """Puts what was read to ``run()`` where it belongs."""
        if run is self.views[0]:
            return
        start = 0
        for view in self.views:
            view[:] = run[start : start + len(view)]
            start += len(view)


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """One block on its way between a tier and a lower one. Both its ends are held meanwhile."""

    is_load: bool
    upper: Tier
    block: Block  # of ``upper``
    lower: LowerTier
    slot: Block  # of ``lower``
    record: BlockRecord
    on_end: Callable[[Transfer], None]
    part: WindowPart | None = None  # goes with the block
    error: Exception | None = None
    seconds: float = 0.0

    def run(self, pieces: Pieces) -> None:
        """Moves the bytes, on whatever thread. An error is reported, not raised."""
        start = time.perf_counter()
        try:
            if self.is_load:
                data = pieces.run()
                self.lower.storage.read(self.slot.block_id, self.record, data)
                pieces.scatter(data)
            else:
                self.lower.storage.write(self.slot.block_id, self.record, pieces.gather())
        except (OSError, DamagedBlock) as error:
            self.error = error
        except Exception as error:  # a bug must cost a hit, not the engine
            logger.exception("moving a block to or from the tier %r", self.lower.name)
            self.error = error
        self.seconds = time.perf_counter() - start


class Mover:
    """Two threads, so that a prompt that waits for its blocks never waits behind stores."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[list[Transfer]] = queue.SimpleQueue()
        self._stores = _Worker("cache-store", self._ended)
        self._loads = _Worker("cache-load", self._ended)
        self.num_under_way = 0
        self.num_loading = 0

    def submit(self, transfer: Transfer, pieces: Pieces) -> None:
        """Moves ``transfer``'s bytes from or to ``pieces`` soon, in the order of submission."""
        self.num_under_way += 1
        self.num_loading += transfer.is_load
        worker = self._loads if transfer.is_load else self._stores
        worker.submit(lambda: transfer.run(pieces), transfer)

    def erase(self, storage: Storage, slot: int) -> None:
        """Erases soon: after all stores so far and before all later ones."""
        self._stores.submit(lambda: _or_log(lambda: storage.erase(slot)), None)

    def sync(self, storage: Storage) -> None:
        """After a purge: what was erased stays so."""
        self._stores.submit(lambda: _or_log(storage.sync), None)

    def poll(self, timeout: float | None = 0.0) -> list[Transfer]:
        """What has ended; waits up to ``timeout`` seconds for some, with None as long as needed."""
        ended: list[Transfer] = []
        try:
            while len(ended) < self.num_under_way:
                wait = not ended and timeout != 0
                ended += self._ended.get(wait, timeout)
        except queue.Empty:
            pass
        self.num_under_way -= len(ended)
        self.num_loading -= sum(transfer.is_load for transfer in ended)
        return ended

    def close(self) -> None:
        """Waits for what is under way and ends the threads."""
        self._stores.close()
        self._loads.close()


class _Worker:
    """A thread that does what has piled up and then tells all of it at once: on a busy machine each
    change from one thread to another can take milliseconds."""

    def __init__(self, name: str, ended: queue.SimpleQueue[list[Transfer]]) -> None:
        self._name = name
        self._ended = ended
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], transfer: Transfer | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._todo.put((work, transfer))

    def _run(self) -> None:
        while self._work_off():
            pass

    def _work_off(self) -> bool:
        """Waits for jobs and does them. It returns each time, so as to hold on to none of them."""
        done: list[Transfer] = []
        while job := self._todo.get():
            work, transfer = job
            work()
            if transfer is not None:
                done.append(transfer)
            if self._todo.empty() or len(done) == _MAX_BATCH:
                break
        if done:
            self._ended.put(done)
        return job is not None

    def close(self) -> None:
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()


def _or_log(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        logger.error("a purged block could not be erased: %s", error)
