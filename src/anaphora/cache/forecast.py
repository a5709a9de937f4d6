"""How soon a block will be used again, learnt from the blocks that were used before it."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from anaphora.cache.hashing import BlockHash

# Time is counted in requests. A block rests from one use to the next; rests are told apart by
# their length, two kinds to each doubling: 1, 2, 3, 4, 6, 8, 12, 16, ... 65,536 and more.
NUM_RESTS = 32
_STARTS = [1, 2, *(base << octave for octave in range(15) for base in (3, 4))]
WIDTHS = [end - start for start, end in zip(_STARTS, [*_STARTS[1:], _STARTS[-2] << 1], strict=True)]
NUM_CLASSES = 6  # of blocks: used again 0, 1, 2, 3, 4, or more times
NUM_CELLS = NUM_CLASSES * NUM_RESTS

# Tried on nine traces, docs/log.md: all of these may be halved or doubled without much loss.
_NUM_WATCHED = (
    8  # uses that are remembered, for each block that fits: sees reuse that came too late
)
_NUM_GHOSTS = 2  # evicted blocks whose number of uses is remembered, for each block that fits
_SAMPLE = 2048  # blocks; of a larger cache one in 2, 4, 8, ... blocks is watched, down to these
_FADING = 0.98  # of what was counted, whenever the forecast is renewed
_MIN_USES_BETWEEN = 1024  # renewals; a larger cache renews when it has been used once over
_PRIOR = 0.1  # share of blocks that are used again within one kind of rest; counts as one block


class ReuseForecast:
    """The expected uses of a cached block per request that it stays, at the best time to give up.

    For each class of blocks it learns which share of those that have rested for so long is used
    within the next kind of rest (a hazard rate). From these follows the rate of uses until any
    later moment, and the best of these rates is the block's worth. This is Gittins' index, which
    says what to keep when reward is uncertain and room is short: it is high before a use is likely,
    even if the block has just been used and will rest for a while, as in a loop that is longer than
    the cache.

    Uses are watched whether a block is still cached or not, in one of several blocks, chosen by
    hash: a choice that depends on nothing but the prefix.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: blocks that fit."""
        self.now = 0  # requests so far
        self.version = 0  # of scores, ranks and cells
        self.scores: list[float] = []  # uses per request, by cell = class and kind of rest
        self.is_rising: list[bool] = []  # whether a longer rest is better than this one
        self.ranks: list[int] = []  # by cell, 0 for the lowest score
        self.cells: list[int] = []  # by rank
        self._mask = 0
        while capacity // (2 * (self._mask + 1)) >= _SAMPLE and self._mask < 255:
            self._mask = 2 * self._mask + 1
        self._max_watched = max(1, _NUM_WATCHED * capacity // (self._mask + 1))
        self._max_ghosts = _NUM_GHOSTS * capacity
        self._watched: OrderedDict[BlockHash, int] = OrderedDict()  # → when, class; oldest first
        self._ghosts: OrderedDict[BlockHash, int] = OrderedDict()  # → uses before the eviction
        self._num_ended = [0.0] * NUM_CELLS  # rests, by how long they were; by a use or unknown how
        self._num_reused = [0.0] * NUM_CELLS  # rests that ended with a use
        self._uses_between = max(_MIN_USES_BETWEEN, capacity)
        self._uses_left = self._uses_between
        self._renew()

    def cell(self, num_reuses: int, used_at: int) -> int:
        """Class and kind of rest of a block at this moment."""
        return min(num_reuses, NUM_CLASSES - 1) * NUM_RESTS + self.rest(used_at)

    def rest(self, used_at: int) -> int:
        """The kind of rest since ``used_at``."""
        return bisect_right(_STARTS, self.now - used_at, lo=1) - 1

    def use(self, block_hash: BlockHash, num_reuses: int) -> None:
        """A block was used; ``num_reuses`` is 0 for its first use."""
        if not block_hash[0] & self._mask:
            self._end_rest(self._watched.pop(block_hash, None), is_reused=True)
            self._watched[block_hash] = self.now * NUM_CLASSES + min(num_reuses, NUM_CLASSES - 1)
            if len(self._watched) > self._max_watched:
                self._end_rest(self._watched.popitem(last=False)[1], is_reused=False)
        self._uses_left -= 1
        if self._uses_left <= 0:
            self._uses_left = self._uses_between
            self._renew()

    def recall(self, block_hash: BlockHash) -> int:
        """How often a block had been used again when it was seen last, this use included."""
        num_reuses = self._ghosts.pop(block_hash, None)
        if num_reuses is None:
            use = self._watched.get(block_hash)
            return 0 if use is None else use % NUM_CLASSES + 1
        return num_reuses + 1

    def remember(self, block_hash: BlockHash, num_reuses: int) -> None:
        """A block was evicted."""
        self._ghosts[block_hash] = num_reuses
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def forget(self, block_hash: BlockHash) -> None:
        """A block was purged: nothing of it may stay."""
        self._watched.pop(block_hash, None)

    def _end_rest(self, use: int | None, *, is_reused: bool) -> None:
        if use is not None:
            used_at, class_ = divmod(use, NUM_CLASSES)
            cell = self.cell(class_, used_at)
            self._num_ended[cell] += 1
            if is_reused:
                self._num_reused[cell] += 1

    def _renew(self) -> None:
        """Scores from what was counted so far."""
        reused = np.array(self._num_reused).reshape(NUM_CLASSES, NUM_RESTS)
        ended = np.array(self._num_ended).reshape(NUM_CLASSES, NUM_RESTS)
        # Rests that go on are counted as if they ended now, or only short ones would be known.
        uses = np.fromiter(self._watched.values(), dtype=np.int64, count=len(self._watched))
        used_at, class_ = np.divmod(uses, NUM_CLASSES)
        rest = np.searchsorted(_STARTS, np.maximum(self.now - used_at, 1), side="right") - 1
        going_on = np.bincount(class_ * NUM_RESTS + rest, minlength=NUM_CELLS)
        lasted = ended + going_on.reshape(NUM_CLASSES, NUM_RESTS)
        exposed = lasted[:, ::-1].cumsum(axis=1)[:, ::-1]  # rests that were at least so long
        overall = (reused.sum(axis=0) + _PRIOR) / (exposed.sum(axis=0) + 1)
        scores = _best_rates((reused + overall) / (exposed + 1))
        is_rising = np.zeros_like(scores, dtype=bool)
        is_rising[:, :-1] = scores[:, 1:] > scores[:, :-1]
        cells = np.argsort(scores, axis=None, kind="stable")
        ranks = np.empty_like(cells)
        ranks[cells] = np.arange(NUM_CELLS)
        self.scores = scores.ravel().tolist()
        self.is_rising = is_rising.ravel().tolist()
        self.cells, self.ranks = cells.tolist(), ranks.tolist()
        self._num_reused = (reused * _FADING).ravel().tolist()
        self._num_ended = (ended * _FADING).ravel().tolist()
        self.version += 1


def _best_rates(hazards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each class and kind of rest, the best rate of uses over all times to give up.

    The rate until a time = probability of a use by then / expected requests until the use or then.
    A block is taken to be in the middle of its kind of rest, and a use in the middle of its own.
    """
    rates = np.empty_like(hazards)
    widths = np.array(WIDTHS, dtype=np.float64)
    for rest in range(NUM_RESTS):
        hazard, width = hazards[:, rest:].copy(), widths[rest:].copy()
        hazard[:, 0] = 1 - np.sqrt(1 - hazard[:, 0])
        width[0] /= 2
        survival = np.cumprod(1 - hazard, axis=1)
        before = np.ones_like(survival)
        before[:, 1:] = survival[:, :-1]
        time = np.cumsum(before * width * (1 - hazard / 2), axis=1)
        rates[:, rest] = ((1 - survival) / time).max(axis=1)
    return rates
