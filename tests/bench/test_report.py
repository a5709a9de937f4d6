"""Limits, gains and what a report says."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from anaphora.bench.hitrate import Loops, Sweep, gain
from anaphora.bench.limits import Limits
from anaphora.bench.report import Report, format_value, make_lines
from anaphora.bench.rounds import CACHING_OFF, CACHING_ON
from anaphora.bench.workloads import Decode, Hot, Prefill, Sample, SharedPrefix
from anaphora.ops.native import Peaks
from anaphora.types import ModelInfo

PEAKS = Peaks(int8_ops_per_second=2000, float_ops_per_second=1000, memory_bytes_per_second=50)
INFO = ModelInfo(
    name="m", architecture="llama", num_parameters=300, num_multiplied_weights=80,
    num_head_weights=20, vocab_size=1000, max_model_len=4096, dtype="int8",
    kv_cache_dtype="float16", block_size=16, num_blocks=9, weight_bytes=120,
    step_weight_bytes=100, kv_cache_bytes=9, tier_bytes={},
    max_num_seqs=4, max_num_batched_tokens=512, enable_prefix_caching=True, threads=2,
    kernels="native avx2",
)  # fmt: skip
BASE = Loops(throughput=100, p50_closed=8, p50_alone=1.2, p50_open=6, cached_share=0)
FASTER = Loops(throughput=180, p50_closed=4, p50_alone=0.8, p50_open=2, cached_share=0.3)


def test_limits() -> None:
    limits = Limits(INFO, PEAKS)
    # multiplying: 2 * (80 * 512 + 20) / 2000 seconds, more than reading takes
    assert limits.throughput(Prefill(512)) == pytest.approx(512 / 40.98)
    # reading: 2 seconds a step
    assert limits.throughput(Decode(1)) == pytest.approx(0.5)
    assert limits.throughput(Decode(8)) == pytest.approx(4)
    # multiplying again: 2 * 100 * 32 / 2000
    assert limits.throughput(Decode(32)) == pytest.approx(32 / 3.2)
    assert limits.throughput(SharedPrefix()) is None


def test_a_gain_is_the_product_of_its_parts() -> None:
    found = gain(FASTER, BASE)
    assert found.throughput == pytest.approx(1.8)
    assert found.p50_closed == pytest.approx(2)
    assert found.skipped_compute == pytest.approx(1.5)
    assert found.shared_loads == pytest.approx(1.2)
    assert found.p50_open == pytest.approx(3)
    assert found.shorter_queues == pytest.approx(2)


def report() -> Report:
    workloads = [Prefill(512), Hot(2048), SharedPrefix()]
    samples = {
        "prefill-512": {CACHING_ON: [Sample({"throughput": v}, 0.0) for v in (5, 6, 10)]},
        "hot-2048": {
            CACHING_ON: [Sample({"miss": 2.0, "hit": 0.05, "miss / hit": 40.0}, 0.99)] * 3
        },
        "shared16": {
            CACHING_OFF: [Sample({"wall": v}, 0.0) for v in (8.0, 9.0, 10.0)],
            CACHING_ON: [Sample({"wall": 2.0}, None)] * 3,
        },
    }
    shares = {share: [FASTER, FASTER] for share in (0.0, 0.3, 0.5, 0.8)}
    limits = Limits(INFO, PEAKS)
    return Report(
        url=None,
        model="m",
        info=INFO,
        seed=1,
        repeats=3,
        limits=limits,
        lines=make_lines(workloads, samples, limits),
        sweep=Sweep([BASE, BASE], shares),
    )


def test_the_document_is_one_line_of_json() -> None:
    line = report().to_json()
    assert b"\n" not in line
    document = json.loads(line)
    figures = {(f["workload"], f["system"], f["figure"]): f for f in document["figures"]}
    prefill = figures["prefill-512", CACHING_ON, "throughput"]
    assert prefill["median"] == 6
    assert prefill["samples"] == [5, 6, 10]
    assert prefill["share_of_limit"] == pytest.approx(6 / (512 / 40.98))
    assert figures["hot-2048", CACHING_ON, "hit"]["cached_share"] == pytest.approx(0.99)
    assert figures["hot-2048", CACHING_ON, "miss"]["cached_share"] == 0
    assert figures["shared16", CACHING_ON, "off / on"]["median"] == 4.5
    known = document["hit_rate"]["shares"]["0.3"]
    assert known["gain"]["shorter_queues"] == pytest.approx(2)
    assert document["hit_rate"]["baseline"]["median"]["throughput"] == 100
    assert document["peaks"]["memory_bytes_per_second"] == 50
    assert document["info"]["dtype"] == "int8"


def test_the_tables() -> None:
    output = io.StringIO()
    report().show(Console(file=output, width=80))
    text = output.getvalue()
    for words in ("prefill-512", "48%", "83%", "2.00 s", "50 ms", "uncached"):
        assert words in text, text
    for words in ("30%", "1.80 x", "3.00 x", "Skipped compute", "90%"):
        assert words in text, text
    assert "…" not in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.1234, "s", "123 ms"),
        (12.345, "s", "12 s"),
        (1.234, "s", "1.23 s"),
        (1234.5, "tok/s", "1,234 tok/s"),
        (3.456, "x", "3.46 x"),
        (65.4, "x", "65 x"),
    ],
)
def test_values_are_short(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text
