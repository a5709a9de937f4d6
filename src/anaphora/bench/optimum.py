"""What no policy can beat: Belady's choice, which knows the whole trace."""

from __future__ import annotations

import heapq

from anaphora.bench.traces import Trace

_NEVER = 1 << 62


def optimal_hits(trace: Trace, capacity: int) -> list[int]:
    """For each request, how many of its first blocks the best cache of ``capacity`` blocks has.

    Leaves only: the one that is used last of all goes first, and a block that would be used no
    earlier than any leaf does not come in at all. Blocks of the request under way stay.
    """
    next_uses = _next_uses(trace)
    next_use = [_NEVER] * trace.num_unique  # by block, of cached ones
    num_children = [0] * trace.num_unique
    is_cached = bytearray(trace.num_unique)
    used_by = [-1] * trace.num_unique  # the latest request that used it
    leaves: list[tuple[int, int]] = []  # (-next use, -block), with entries that are no longer true
    num_cached = 0
    hits: list[int] = []

    def push(block: int) -> None:
        heapq.heappush(leaves, (-next_use[block], -block))

    def pop(request: int, candidate: int) -> int | None:
        """Evicts a leaf that is used later than ``candidate``; its parent may become one."""
        while leaves:
            negative_use, negative_block = leaves[0]
            block = -negative_block
            is_leaf = is_cached[block] and not num_children[block] and used_by[block] != request
            if not is_leaf or next_use[block] != -negative_use:
                heapq.heappop(leaves)
                continue
            if -negative_use <= candidate:
                return None
            heapq.heappop(leaves)
            is_cached[block] = 0
            parent = trace.parents[block]
            if parent >= 0:
                num_children[parent] -= 1
                if not num_children[parent] and used_by[parent] != request:
                    push(parent)
            return block
        return None

    for number, request in enumerate(trace.requests):
        blocks, uses = request.blocks, next_uses[number]
        num_hits = 0
        for block in blocks:
            if not is_cached[block]:
                break
            num_hits += 1
        hits.append(num_hits)
        num_kept = 0
        for block, use in zip(blocks, uses, strict=True):
            if not is_cached[block]:
                if num_cached >= capacity and pop(number, use) is None:
                    break
                num_cached = min(num_cached + 1, capacity)
                is_cached[block] = 1
                if trace.parents[block] >= 0:
                    num_children[trace.parents[block]] += 1
            next_use[block], used_by[block] = use, number
            num_kept += 1
        if num_kept and not num_children[blocks[num_kept - 1]]:
            push(blocks[num_kept - 1])
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each request and block, the number of the next request that uses it."""
    upcoming = [_NEVER] * trace.num_unique
    result: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        result.append([upcoming[block] for block in blocks])
        for block in blocks:
            upcoming[block] = number
    return result[::-1]
