"""Readers of request traces, on excerpts of the real ones."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from anaphora.bench.traces import SYNTHETIC, ReadOptions, read_trace
from anaphora.errors import ConfigError

DATA = Path(__file__).parent / "data"


def read(name, **options):
    return read_trace(str(DATA / name), ReadOptions(**options))


def test_mooncake():
    trace = read("mooncake.jsonl")
    lines = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    assert trace.block_size == 512
    assert [r.num_tokens for r in trace.requests] == [line["input_length"] for line in lines]
    assert [r.seconds for r in trace.requests] == [line["timestamp"] / 1000 for line in lines]
    assert trace.num_unique == len({id_ for line in lines for id_ in line["hash_ids"]})
    last = trace.requests[0]
    assert trace.hit_tokens(last, len(last.blocks)) == last.num_tokens


def test_sessions_are_merged_by_time_with_their_agents_and_keep_their_ids_apart(tmp_path):
    trace = read("sessions")
    seconds = [request.seconds for request in trace.requests]
    assert seconds == sorted(seconds)
    sessions = [json.loads(path.read_text()) for path in sorted((DATA / "sessions").iterdir())]
    entries = [entry for session in sessions for entry in session["requests"]]
    assert len(trace.requests) == sum(len(entry.get("requests", [0])) for entry in entries)
    agent = next(entry for entry in entries if "requests" in entry)
    assert agent["t"] + agent["requests"][1]["t"] in seconds
    first = {request.blocks[0] for request in trace.requests if request.blocks}
    assert len(first) >= len(sessions)

    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
        archive.add(DATA / "sessions", "traces")
    packed = read_trace(str(tmp_path / "all.tar.xz"), ReadOptions())
    assert packed.requests == trace.requests
    name = sorted((DATA / "sessions").iterdir())[0].name
    one = read_trace(str(tmp_path / "all.tar.xz"), ReadOptions(sessions=f"*/{name}"))
    assert 0 < len(one.requests) < len(trace.requests)


def test_agents_go_in_step_in_blocks_of_256_characters():
    trace = read("agents")
    assert len(trace.requests) == 6
    assert all(len(request.blocks) == 2 for request in trace.requests)
    assert all(request.num_tokens == 128 for request in trace.requests)
    assert trace.requests[0].blocks[0] != trace.requests[1].blocks[0]


def test_conversations_of_tau_bench_are_in_flight_together():
    one, three = read("tau_bench.json", in_flight=1), read("tau_bench.json", in_flight=3)
    assert len(one.requests) == len(three.requests) == 6
    longer = one.requests[1].blocks
    assert longer[: len(one.requests[0].blocks)] == one.requests[0].blocks
    assert three.requests[3].num_tokens == one.requests[1].num_tokens
    assert three.requests[0].num_tokens == one.requests[0].num_tokens


def test_a_log_of_requests_is_tokenized(tmp_path):
    log = tmp_path / "log.jsonl"
    bodies = [{"messages": [1]}, {"body": {"prompt": [2]}}]
    log.write_text("\n".join(map(json.dumps, bodies)))
    trace = read_trace(str(log), ReadOptions(encode=lambda body: list(range(40))))
    assert [request.num_tokens for request in trace.requests] == [40, 40]
    assert trace.num_unique == 2


def test_generated_workloads_have_the_size_that_their_definition_says():
    sizes = {"gsp": 16_384, "prefix-repetition": 16_160, "llm-d": 112_500}
    for name in SYNTHETIC:
        assert read_trace(name, ReadOptions()).num_unique == sizes[name]


GOOD = '{"timestamp": 0, "input_length": 512, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "what kind of trace"),
        ("hello", {}, "what kind of trace"),
        (f"{GOOD}\n{{", {}, "line 2: it is not JSON"),
        (f"{GOOD}\n[1]", {}, "line 2: it is a list"),
        (f"{GOOD}\n{{}}", {}, "line 2: it has no 'input_length'"),
        (f'{GOOD}\n{{"input_length": "1"}}', {}, "line 2: 'input_length' is a str"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": [1, 2]}', {}, "too many"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": ["a"]}', {}, "no integer"),
        (GOOD, {"format": "tau-bench"}, "no list of conversations"),
        ("[1]", {}, "conversation 1: it is a int"),
        ('{"hash_id_scope": "local"}', {}, "it has no 'block_size'"),
    ],
)
def test_a_bad_trace_says_where_and_what(tmp_path, text, options, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(path), ReadOptions(**options))


def test_a_damaged_archive(tmp_path):
    path = tmp_path / "all.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        archive.add(DATA / "mooncake.jsonl", "a.jsonl")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"damaged|what kind"):
        read_trace(str(path), ReadOptions())


def test_an_unknown_format():
    with pytest.raises(ConfigError, match="--format x: there is no such format"):
        ReadOptions(format="x")
