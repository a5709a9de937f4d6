"""The simulator against slow and obvious references."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.bench.optimum import optimal_hits
from anaphora.bench.simulate import (
    SimulateOptions,
    hit_rate,
    make_keys,
    parse_capacity,
    replay,
    replay_with_ttl,
)
from anaphora.bench.traces import Trace
from anaphora.cache.eviction import LRU, POLICIES
from anaphora.errors import ConfigError
from tests.bench.test_traces import DATA
from tests.serving import run_command


def trace_of(prompts):
    """A prompt is a tuple of names, one a block of one token; one comes each second."""
    trace = Trace("test", 1)
    for second, prompt in enumerate(prompts):
        trace.add(prompt, len(prompt), float(second))
    return trace


prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8
)


def naive_lru(trace, capacity):
    """The cache as a list of blocks, the least recently used first."""
    cached, hits = [], []
    for request in trace.requests:
        path = list(request.blocks[:capacity])
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        hits.append(found)
        cached = [block for block in cached if block not in path]
        cached = cached[max(0, len(cached) + len(path) - capacity) :]
        cached += reversed(path)  # tail first
    return hits


def best_hits(trace, capacity):
    """The most blocks that any choice of leaves to evict, or not to let in, can find."""

    def is_closed(blocks):
        return all(trace.parents[b] < 0 or trace.parents[b] in blocks for b in blocks)

    def choices(cached, path):
        """Closed sets that hold what is in ``path`` already, and some of the rest of it."""
        held = cached & set(path)
        for length in range(len(held), len(path) + 1):
            wanted = cached | set(path[:length])
            seen, stack = {wanted}, [wanted]
            while stack:
                blocks = stack.pop()
                if len(blocks) <= capacity:
                    yield blocks
                    continue
                for block in blocks - set(path[:length]):
                    fewer = blocks - {block}
                    if is_closed(fewer) and fewer not in seen:
                        seen.add(fewer)
                        stack.append(fewer)

    @functools.cache
    def best(number, cached):
        if number == len(trace.requests):
            return 0
        path = trace.requests[number].blocks
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        return found + max(best(number + 1, after) for after in choices(cached, tuple(path)))

    return best(0, frozenset())


@settings(deadline=None)
@given(prompts, st.integers(1, 5))
def test_lru_is_a_flat_list_touched_tail_first(prompts, capacity):
    trace = trace_of(prompts)
    assert replay(trace, make_keys(trace), LRU, capacity).hits == naive_lru(trace, capacity)


@settings(deadline=None, max_examples=60)
@given(prompts, st.integers(1, 4))
def test_the_optimum_is_what_trying_everything_finds(prompts, capacity):
    trace = trace_of(prompts)
    assert sum(optimal_hits(trace, capacity)) == best_hits(trace, capacity)


@settings(deadline=None, max_examples=60)
@given(prompts, st.integers(1, 5))
def test_no_policy_beats_the_optimum(prompts, capacity):
    trace = trace_of(prompts)
    for policy in POLICIES.values():
        hits = replay(trace, make_keys(trace), policy, capacity).hits
        assert sum(hits) <= sum(optimal_hits(trace, capacity))


def test_hits_count_tokens_of_the_last_part():
    trace = Trace("test", 4)
    for _ in range(4):
        trace.add("ab", 7)
    hits = replay(trace, make_keys(trace), LRU, 10).hits
    assert hits == [0, 2, 2, 2]
    assert hit_rate(trace, hits, 0) == 21 / 28
    assert hit_rate(trace, hits, 2) == 1


def test_a_prompt_larger_than_the_cache_fills_it():
    trace = trace_of(["abcde", "abcde"])
    assert replay(trace, make_keys(trace), LRU, 3).hits == [0, 3]


def test_time_to_live_begins_anew_with_each_use():
    trace = trace_of(["a", "ab", "c", "a"])
    kept = replay_with_ttl(trace, 2.0)
    assert kept.hits == [0, 1, 0, 1]
    assert kept.block_seconds == 1 + 2 + 2 + 1 + 0  # a twice, b, c until the end, a
    assert replay_with_ttl(trace, 1.0).hits == [0, 1, 0, 0]


def test_capacities():
    assert parse_capacity("12", 1000) == 12
    assert parse_capacity("2.5%", 1000) == 25
    assert parse_capacity("0.01%", 1000) == 1
    for bad in ("", "0", "0%", "-1", "many", "1e3", "5 %"):
        with pytest.raises(ConfigError, match="--capacity"):
            parse_capacity(bad, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "--policy best"),
        ({"ttl": 0.0}, "--ttl"),
        ({"capacities": ("x",)}, "--capacity x"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        SimulateOptions(trace="gsp", **options)


def test_the_command(tmp_path):
    trace = str(DATA / "mooncake.jsonl")
    done = run_command(tmp_path, "simulate", trace, "--capacity", "20", "--ttl", "60")
    assert done.status == 0, done.errors
    *table, last = done.output.splitlines()
    document = json.loads(last)
    assert document["num_requests"] == 12
    assert [point["capacity"] for point in document["points"]] == [20]
    assert document["lifetime"]["ttl"] == 60
    assert any("gap closed" in line for line in table)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    trace = str(DATA / "mooncake.jsonl")
    done = run_command(tmp_path, "simulate", trace, "--plot", str(tmp_path / "sweep"))
    assert done.status == 0, done.errors
    assert (tmp_path / "sweep.svg").read_text().count("<svg") == 1
    assert (tmp_path / "sweep.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments",
    [("nowhere.jsonl",), (str(DATA / "README.md"),), ("gsp", "--ttl", "9")],
)
def test_a_mistake_is_status_2_and_one_line(tmp_path, arguments):
    done = run_command(tmp_path, "simulate", *arguments)
    assert (done.status, done.output) == (2, "")
    assert "error:" in done.errors


def test_a_second_tier_adds_to_the_first():
    """Blocks go down instead of away: the traffic adds up, and the hits are those of both."""
    trace = trace_of([(i, 100 + i) for i in range(8)] * 4)
    keys = make_keys(trace)
    alone = replay(trace, keys, POLICIES["lru"], 8)
    below = replay(trace, keys, POLICIES["lru"], 8, host_capacity=16)
    assert sum(alone.hits) == 0
    assert sum(below.hits) == 3 * 16
    assert below.host.num_hits == 3 * 16
    assert below.host.num_evicted == 0
    assert below.host.num_stored == 16  # never copied twice
