"""Every series is there from the start, and none tells what it must not."""

from __future__ import annotations

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from anaphora.fake import FakeLLM
from anaphora.types import MISS_REASONS, WORKLOADS, TierCounters
from tests.server.running import Running, Serve

LONG = "x" * 40


def scrape(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def complete(server: Running, key: str, **fields: str) -> None:
    body = {"model": "fake", "prompt": LONG, "max_tokens": 1, **fields}
    with server.http(headers={"authorization": f"Bearer {key}"}) as http:
        http.post("/v1/completions", json=body).raise_for_status()


def test_all_series_are_zero_at_the_start(serve: Serve) -> None:
    with serve().http() as http:
        samples = scrape(http)
    for reason in MISS_REASONS:
        assert samples["anaphora_prefix_cache_missed_tokens_total", reason] == 0
    for workload in WORKLOADS:
        for name in ("queries", "hits"):
            assert samples[f"anaphora_prefix_cache_workload_{name}_total", workload] == 0
    for field in TierCounters.__struct_fields__:
        name = field.removeprefix("num_") + ("" if field.startswith("num_") else "_total")
        expected = 1024 if field == "num_blocks" else 0
        assert samples[f"anaphora_cache_tier_{name}", "device"] == expected
    for name in ("prefill_seconds_saved_total", "audited_blocks_total", "audits_skipped_total",
                 "audit_mismatches_total", "kv_blocks_pinned"):  # fmt: skip
        assert samples[f"anaphora_{name}",] == 0
    assert samples["anaphora_smallest_cacheable_prefix_tokens",] == 16
    assert not [key for key in samples if "tenant" in key[0]]


def test_lookups_are_told_apart_by_workload_reason_and_tier(serve: Serve) -> None:
    server = serve("a=key-a", "b=key-b")
    complete(server, "key-a")
    complete(server, "key-a", service_tier="flex")
    complete(server, "key-b")
    with server.http() as http:
        samples = scrape(http)
        assert "tenant" not in http.get("/metrics").text.replace("tenants", "")
    assert samples["anaphora_prefix_cache_workload_queries_total", "interactive"] == 82
    assert samples["anaphora_prefix_cache_workload_queries_total", "batch"] == 41
    assert samples["anaphora_prefix_cache_workload_hits_total", "batch"] == 32
    assert samples["anaphora_cache_tier_hit_tokens_total", "device"] == 32
    assert samples["anaphora_prefix_cache_missed_tokens_total", "never_seen"] == 82
    assert samples["anaphora_prefix_cache_missed_tokens_total", "no_full_block"] == 9
    assert samples["anaphora_prefix_cache_hits_total",] == 32


def test_tenants_are_labels_only_if_asked_for_and_only_the_first(serve: Serve) -> None:
    server = serve(*(f"name-{i}=key-{i}" for i in range(5)), metrics_tenants=2)
    for i in (3, 1, 0, 2, 4, 4):
        complete(server, f"key-{i}")
    with server.http() as http:
        for _ in range(2):
            samples = scrape(http)
            queries = {
                key[1]: value
                for key, value in samples.items()
                if key[0] == "anaphora_prefix_cache_tenant_queries_total"
            }
            assert queries == {"name-3": 41, "name-1": 41, "other": 4 * 41}
            assert samples["anaphora_prefix_cache_tenant_hits_total", "other"] == 32


def test_the_rates_of_both_tiers_are_real(serve: Serve) -> None:
    llm = FakeLLM()
    tiers = {"device": 10, "host": 10, "disk": 10}
    llm.info = msgspec.structs.replace(llm.info, tier_bytes=tiers)
    stats = llm.stats()
    stats.prefix_cache_queries, stats.prefix_cache_hits = 100, 60
    stats.tiers = {"device": TierCounters(hit_tokens=40), "host": TierCounters(hit_tokens=20)}
    with serve(llm=llm).http() as http:
        samples = scrape(http)
    assert samples["vllm:gpu_prefix_cache_hit_rate",] == 0.4
    assert samples["vllm:cpu_prefix_cache_hit_rate",] == 0.2
    assert samples["anaphora_prefix_cache_hit_rate",] == 0.6
    assert samples["anaphora_cache_tier_hit_tokens_total", "disk"] == 0  # not reported yet
