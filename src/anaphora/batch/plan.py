"""In which order to run many prompts, and what of them the cache is expected to hold.

A prompt's path through the prefix tree of all prompts is its key: one number for each of its full
blocks, chained, so that keys begin alike as far as prompts do. Sorted by key, prompts come in the
depth-first order of the tree: whatever several share is computed once and used while it is hot,
however small the cache is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_NODE_BYTES = 6  # of a key for each block: two of 60 million nodes are taken for one a few times
_TEXT_BYTES = 4  # of English that are about a token
_TEXT_BLOCK_BYTES = 16 * _TEXT_BYTES


def token_key(token_ids: Sequence[int], block_size: int) -> bytes:
    """The key of a prompt. Its last token is always computed, so it fills no block."""
    packed = memoryview(array("I", token_ids)).cast("B")
    return _key(packed, block_size * 4, (len(token_ids) - 1) // block_size)


def text_key(text: str) -> tuple[bytes, int]:
    """The same from text, which orders alike, and how many tokens that is about."""
    encoded = memoryview(text.encode(errors="surrogatepass"))
    key = _key(encoded, _TEXT_BLOCK_BYTES, len(encoded) // _TEXT_BLOCK_BYTES)
    return key, len(encoded) // _TEXT_BYTES


def _key(units: memoryview, num_bytes: int, num_blocks: int) -> bytes:
    node, nodes = b"", []
    for start in range(0, num_blocks * num_bytes, num_bytes):
        block = units[start : start + num_bytes]
        node = hashlib.blake2b(block, digest_size=_NODE_BYTES, key=node).digest()
        nodes.append(node)
    return b"".join(nodes)


def num_shared_blocks(key: bytes, other: bytes) -> int:
    """Full blocks that both prompts begin with."""
    low, high = 0, min(len(key), len(other)) // _NODE_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * _NODE_BYTES, middle * _NODE_BYTES)
        if key[last] == other[last]:  # chained: what comes before is equal too
            low = middle
        else:
            high = middle - 1
    return low


class HitEstimate:
    """How many blocks of prompts that come one after another an LRU cache finds.

    ``num_cache_blocks`` None is a cache without bound.
    """

    def __init__(self, num_cache_blocks: int | None) -> None:
        self.num_prompts = 0
        self.num_hits = 0
        self._capacity = num_cache_blocks
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> int:
        """Blocks of the next prompt that are found."""
        nodes = [key[i : i + _NODE_BYTES] for i in range(0, len(key), _NODE_BYTES)]
        num_hits = 0
        for node in nodes:
            if node not in self._cached:
                break
            num_hits += 1
        for node in reversed(nodes):  # heads last: they are evicted after their tails
            self._cached[node] = None
            self._cached.move_to_end(node)
        if self._capacity is not None:
            while len(self._cached) > self._capacity:
                self._cached.popitem(last=False)
        self.num_prompts += 1
        self.num_hits += num_hits
        return num_hits
