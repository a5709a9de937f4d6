"""Keys put prompts into the order of their prefix tree; the estimate is a cache of that size."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.batch.plan import HitEstimate, num_shared_blocks, text_key, token_key

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=20)


def shared(a: list[int], b: list[int], size: int) -> int:
    """Full blocks that two prompts share, the last token of each left out."""
    count = 0
    for x, y in zip(a[:-1], b[:-1], strict=False):
        if x != y:
            break
        count += 1
    return count // size


@given(PROMPTS, st.sampled_from([1, 2, 4]))
def test_keys_share_as_many_nodes_as_prompts_share_blocks(
    prompts: list[list[int]], size: int
) -> None:
    keys = [token_key(prompt, size) for prompt in prompts]
    for a, key_a in zip(prompts, keys, strict=True):
        for b, key_b in zip(prompts, keys, strict=True):
            expected = shared(a, b, size)
            if a == b:
                expected = (len(a) - 1) // size
            assert num_shared_blocks(key_a, key_b) == expected


@given(PROMPTS, st.sampled_from([1, 2, 4]))
def test_in_the_order_of_keys_a_prompt_shares_most_with_the_one_before_it(
    prompts: list[list[int]], size: int
) -> None:
    keys = sorted(token_key(prompt, size) for prompt in prompts)
    unbounded = HitEstimate(None)
    num_hits = [unbounded.add(key) for key in keys]
    for index in range(1, len(keys)):
        assert num_hits[index] == num_shared_blocks(keys[index - 1], keys[index])
    longest = max(len(key) for key in keys) // 6
    small = HitEstimate(max(longest, 1))  # one prompt's path is room enough
    for key in keys:
        small.add(key)
    assert small.num_hits == unbounded.num_hits


@given(PROMPTS, st.integers(1, 30))
def test_the_estimate_is_that_of_a_plain_lru(prompts: list[list[int]], capacity: int) -> None:
    estimate = HitEstimate(capacity)
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    for prompt in prompts:
        blocks = [tuple(prompt[: i + 2]) for i in range(0, (len(prompt) - 1) // 2 * 2, 2)]
        found = 0
        while found < len(blocks) and blocks[found] in cache:
            found += 1
        assert estimate.add(token_key(prompt, 2)) == found
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)


def test_groups_in_any_order_are_computed_once_in_a_small_cache() -> None:
    """SGLang's generated-shared-prefix at its defaults: 64 groups of 16, 2,048 + 128 tokens each,
    in a cache of a tenth of it, where LRU in a shuffled order finds about 15 %."""
    chance = random.Random(1)
    prompts = [
        [group] * 2048 + [1000 + group * 16 + i] * 128 for group in range(64) for i in range(16)
    ]
    chance.shuffle(prompts)
    keys = [token_key(prompt, 16) for prompt in prompts]
    total = sum(map(len, prompts))
    found = []
    for order in (keys, sorted(keys)):
        estimate = HitEstimate(1638)
        for key in order:
            estimate.add(key)
        found.append(estimate.num_hits * 16 / total)
    assert 0.1 < found[0] < 0.2
    assert found[1] == pytest.approx(960 * 2048 / total)  # all that can be found: .8824


def test_the_token_that_is_always_computed_fills_no_block() -> None:
    assert len(token_key([7] * 16, 16)) == 0
    assert len(token_key([7] * 17, 16)) == 6


@pytest.mark.parametrize("text", ["", "x" * 63, "é" * 200, "\ud800" * 100])
def test_text_of_any_kind_has_a_key(text: str) -> None:
    key, num_tokens = text_key(text)
    assert len(key) // 6 <= num_tokens // 16
    assert text_key(text + "tail")[0][: len(key)] == key
