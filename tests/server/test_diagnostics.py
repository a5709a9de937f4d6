"""What a client is told about its own hits and misses."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest

from anaphora.server.diagnostics import CACHE_HEADER, cache_headers, diagnostics
from anaphora.server.fields import ServiceTier
from anaphora.types import MISS_REASONS, CacheReport
from tests.server.running import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "a system prompt that fills more than one block; " * 2


def prompt_of(path: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}


def body_of(path: str) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 3, "cache_diagnostics": True, **prompt_of(path, LONG)}


def ask(http: httpx.Client, path: str, **fields: Any) -> tuple[Any, dict[str, str]]:
    """``cache_diagnostics`` and the header's items, of a whole answer or of a stream."""
    response = http.post(path, json=body_of(path) | fields)
    assert response.status_code == 200, response.text
    items = dict(item.split("=") for item in response.headers[CACHE_HEADER].split("; "))
    if not fields.get("stream"):
        return response.json()["cache_diagnostics"], items
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    *others, last = map(json.loads, events[:-1])
    assert not any("cache_diagnostics" in chunk for chunk in others)
    assert last["choices"] == []
    has_usage = bool(fields.get("stream_options"))
    assert ("usage" in last) == has_usage
    if has_usage:
        assert last["usage"]["prompt_tokens"] > 0
    return last["cache_diagnostics"], items


@pytest.mark.parametrize(
    "stream",
    [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}],
    ids=["whole", "stream", "usage"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_misses_and_hits_are_explained(serve: Serve, path: str, stream: dict[str, Any]) -> None:
    with serve().http() as http:
        told = [ask(http, path, **stream) for _ in range(2)]
        told.append(ask(http, path, **stream, **prompt_of(path, LONG[:40] + "#" * 60)))
    if path == COMPLETIONS:
        assert all(len(entries) == 1 for entries, _ in told)
        told = [(entries[0], items) for entries, items in told]
    (cold, cold_items), (warm, warm_items), (other, other_items) = told
    num_prompt = cold["missed_tokens"]
    assert cold == {
        "cached_tokens": 0,
        "hits": {"device": 0},
        "missed_tokens": num_prompt,
        "reason": "never_seen",
        "first_differing_token": None,
        "lost_from": None,
        "lost_seconds_ago": None,
    }
    assert cold_items == {"cached": "0", "missed": str(num_prompt), "reason": "never_seen"}
    cached = warm["cached_tokens"]
    assert cached == (num_prompt - 1) // 16 * 16 == warm["hits"]["device"]
    assert warm["reason"] == "no_full_block"
    assert warm_items == {
        "cached": str(cached),
        "device": str(cached),
        "missed": str(num_prompt - cached),
        "reason": "no_full_block",
    }
    assert other["reason"] == other_items["reason"] == "diverged"
    position = 41 if path == COMPLETIONS else 1 + 1 + len("user\n") + 40  # after control tokens
    assert other["first_differing_token"] == int(other_items["at"]) == position
    assert other["cached_tokens"] % 16 == 0


def test_each_prompt_has_its_own_entry(serve: Serve) -> None:
    with serve().http() as http:
        ask(http, COMPLETIONS, prompt="y" * 40)
        entries, items = ask(http, COMPLETIONS, prompt=["x" * 40, "y" * 40], n=2)
        assert [entry["reason"] for entry in entries] == ["diverged", "no_full_block"]
        assert items == {"cached": "32", "device": "32", "missed": "50", "prompts": "2"}
        entries, items = ask(http, COMPLETIONS, prompt=["x" * 40, "z" * 40], stream=True)
    assert [entry["cached_tokens"] for entry in entries] == [32, 0]
    assert int(items["prompts"]) in (1, 2)  # as many as had begun when the header went out


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_without_asking_there_is_only_the_header(serve: Serve, path: str) -> None:
    with serve().http() as http:
        for fields in ({"cache_diagnostics": None}, {"cache_diagnostics": False}):
            for stream in (True, False):
                response = http.post(path, json=body_of(path) | fields | {"stream": stream})
                assert "cache_diagnostics" not in response.text
                assert "cached=" in response.headers[CACHE_HEADER]
        refused = http.post(path, json=body_of(path) | {"n": 0})
    assert CACHE_HEADER not in refused.headers


def test_another_tenant_learns_nothing(serve: Serve) -> None:
    server = serve("a=key-a", "b=key-b")
    told = []
    with server.http() as http:
        for key in ("key-a", "key-b", "key-b"):
            headers = {"authorization": f"Bearer {key}"}
            response = http.post(CHAT, json=body_of(CHAT), headers=headers)
            told.append((response.json()["cache_diagnostics"], response.headers[CACHE_HEADER]))
    assert told[0] == told[1] != told[2]
    assert told[1][0]["reason"] == "never_seen"


def test_what_was_lost_is_named_with_its_tier_and_age() -> None:
    report = CacheReport(
        hits={"device": 32, "host": 16, "disk": 0},
        num_missed_tokens=5,
        miss_reason="evicted",
        lost_from="disk",
        lost_seconds_ago=1.23456,
    )
    assert diagnostics(report)["lost_seconds_ago"] == 1.235
    assert cache_headers([report]) == {
        CACHE_HEADER: "cached=48; device=32; host=16; missed=5; reason=evicted; from=disk"
    }
    assert cache_headers([None]) == {}
    assert diagnostics(None)["reason"] is None
    for reason in MISS_REASONS:  # they have to be plain words
        assert reason.replace("_", "").isalpha()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_can_only_lower_itself(serve: Serve, path: str) -> None:
    server = serve()
    tiers = (*get_args(ServiceTier), None)
    with server.http() as http:
        for tier in tiers:
            response = http.post(path, json=body_of(path) | {"service_tier": tier})
            expected = "flex" if tier in ("flex", "batch") else "default"
            assert response.json()["service_tier"] == expected, tier
    workloads = [request.workload for request in server.llm.requests]
    assert workloads == ["batch" if tier in ("flex", "batch") else "interactive" for tier in tiers]
    assert "provisioned" not in workloads
