"""The cache's routes and reports over a real ``anaphora serve`` with all three tiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anaphora.cache.hashing import encode_tokens
from tests.server.running import check_error
from tests.serving import serving

ADA, BEN, ROOT = "key-of-ada", "key-of-ben", "key-of-root"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "tiny"
PUBLIC = "Everybody may know that this assistant is polite, brief and never late. " * 3


@pytest.fixture(scope="module")
def server(smollm2_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    (folder / "disk").mkdir()
    (folder / "public.txt").write_text(PUBLIC + "\n")
    arguments = [
        str(smollm2_path), "--served-model-name", MODEL, "--kv-cache-memory", "64MiB",
        "--swap-space", "64MiB", "--disk-cache", str(folder / "disk"), "--disk-cache-size", "64MiB",
        "--api-key", f"ada={ADA}", "--api-key", f"ben={BEN}", "--metrics-tenants", "1",
        "--public-prefix", str(folder / "public.txt"), "--strict",
    ]  # fmt: skip
    with serving(folder, *arguments, key=ROOT, ANAPHORA_ADMIN_KEY=ROOT) as running:
        yield running


def ask(server, key, path, fields, method="POST"):
    with server.http(key) as http:
        body = {"json": fields} if fields is not None else {}
        return http.request(method, path, **body)


def chat(server, key, system, user="Hello", **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
    response = ask(server, key, CHAT, body | {"cache_diagnostics": True} | fields)
    assert response.status_code == 200, response.text
    return response


def told(response):
    """The three places that tell of a hit; they have to agree."""
    body = response.json()
    report = body["cache_diagnostics"]
    header = dict(item.split("=") for item in response.headers["x-anaphora-cache"].split("; "))
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert report["cached_tokens"] == cached == int(header["cached"])
    assert sum(report["hits"].values()) == cached
    assert report["missed_tokens"] == body["usage"]["prompt_tokens"] - cached
    assert report["missed_tokens"] == int(header["missed"])
    assert report["reason"] == header["reason"]
    return report


def topic(name):
    return f"{name} is what this is about. " + "Stay with it and answer briefly. " * 5


def test_it_says_what_each_tier_takes(server):
    for words in ("in 63.8 MiB of 64.0 MiB", "host tier", "disk tier", "ends with the server",
                  "tenants: 2, and an admin"):  # fmt: skip
        assert words in server.output
    assert ROOT not in server.output + server.errors


def test_a_strict_server_refuses_unknown_fields(server):
    body = {"model": MODEL, "prompt": "a", "zzz": 1}
    assert check_error(ask(server, ADA, COMPLETIONS, body), 400)["param"] == "zzz"


def test_another_tenant_has_never_seen_it(server):
    own = [told(chat(server, ADA, topic("a secret"))) for _ in range(2)]
    assert own[0]["reason"] == "never_seen"
    assert own[1]["cached_tokens"] > 0
    other = told(chat(server, BEN, topic("a secret")))
    assert other == own[0]
    assert other["hits"] == {"device": 0, "host": 0, "disk": 0}


def test_a_stream_tells_the_same(server):
    chat(server, ADA, topic("a stream"))
    whole = chat(server, ADA, topic("a stream"))
    stream = chat(server, ADA, topic("a stream"), stream=True)
    assert stream.headers["x-anaphora-cache"] == whole.headers["x-anaphora-cache"]
    assert (
        str(whole.json()["cache_diagnostics"]["cached_tokens"]) in stream.text.split("data: ")[-2]
    )


def test_reasons_are_those_of_the_engine(server):
    chat(server, ADA, topic("reasons"), "x " * 40)
    first = told(chat(server, ADA, topic("reasons"), "y " * 40))
    assert first["reason"] == "diverged"
    assert first["first_differing_token"] >= first["cached_tokens"]
    salted = told(chat(server, ADA, topic("reasons"), "x " * 40, cache_salt="s"))
    assert salted["reason"] == "other_scope"
    purge = ask(server, ADA, "/cache/purge", {"scope": "tenant"}).json()["purged"]
    assert set(purge) == {"device", "host", "disk"}
    assert purge["device"]["blocks"] > 0
    gone = told(chat(server, ADA, topic("reasons"), "x " * 40))
    assert (gone["reason"], gone["cached_tokens"]) == ("purged", 0)
    assert gone["lost_from"] in ("device", "host", "disk")
    assert 0 <= gone["lost_seconds_ago"] < 120


def test_a_purge_leaves_what_others_have(server):
    for key in (ADA, BEN):
        chat(server, key, topic("a purge"))
    assert ask(server, ADA, "/cache/purge", {"scope": "tenant", "tenant": "ada"}).status_code == 200
    assert told(chat(server, BEN, topic("a purge")))["cached_tokens"] > 0
    assert told(chat(server, ADA, topic("a purge")))["reason"] == "purged"
    for body in ({"scope": "all"}, {"scope": "tenant", "tenant": "ben"}):
        check_error(ask(server, ADA, "/cache/purge", body), 403)
    check_error(ask(server, ADA, "/reset_prefix_cache", None), 403)
    check_error(ask(server, ADA, "/metrics", None, "GET"), 403)
    assert told(chat(server, BEN, topic("a purge")))["cached_tokens"] > 0
    reset = ask(server, ROOT, "/reset_prefix_cache?reset_external=true", None)
    assert reset.status_code == 200
    assert reset.json()["purged"]["device"]["blocks"] > 0
    assert told(chat(server, BEN, topic("a purge")))["reason"] == "purged"


def test_a_prefix_is_purged_with_what_follows(server):
    long, other = topic("a prefix"), topic("something else")
    for system in (long, other):
        chat(server, ADA, system)
    messages = [{"role": "system", "content": long}]
    body = {"scope": "prefix", "messages": messages}
    assert ask(server, BEN, "/cache/purge", body).json()["purged"]["device"]["blocks"] == 0
    assert ask(server, ADA, "/cache/purge", body).json()["purged"]["device"]["blocks"] > 0
    again = told(chat(server, ADA, long))
    assert again["reason"] == "purged"
    assert told(chat(server, ADA, other))["cached_tokens"] > 0


def test_pins_belong_to_their_tenant(server):
    messages = [{"role": "system", "content": topic("a pin")}]
    body = {"model": MODEL, "messages": messages, "ttl_seconds": 100}
    pin = ask(server, ADA, "/cache/pins", body).json()
    assert pin["object"] == "cache.pin"
    assert pin["pinned_tokens"] % 16 == 0
    assert told(chat(server, ADA, topic("a pin")))["cached_tokens"] >= pin["pinned_tokens"] > 0
    assert server.metrics()["anaphora_kv_blocks_pinned"] == pin["pinned_tokens"] // 16
    for key in (BEN, ROOT):
        assert ask(server, key, "/cache/pins", None, "GET").json()["data"] == []
        error = check_error(ask(server, key, f"/cache/pins/{pin['id']}", None, "DELETE"), 404)
        assert error["code"] == "pin_not_found"
    [listed] = ask(server, ADA, "/cache/pins", None, "GET").json()["data"]
    assert (listed["id"], listed["pinned_tokens"]) == (pin["id"], pin["pinned_tokens"])
    assert abs(listed["expires_at"] - pin["expires_at"]) <= 1
    assert ask(server, ADA, f"/cache/pins/{pin['id']}", None, "DELETE").json()["deleted"]
    assert server.metrics()["anaphora_kv_blocks_pinned"] == 0


def test_marks_are_pins_and_counts_add_up_to_the_prompt(server):
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": topic("a mark"), "cache_control": mark}]
    turns = [{"role": "user", "content": "Hello"}]
    body = {"model": MODEL, "system": system, "messages": turns}
    count = ask(server, BEN, "/v1/messages/count_tokens", body).json()["input_tokens"]
    body["max_tokens"] = 2
    usages = [ask(server, BEN, "/v1/messages", body).json()["usage"] for _ in range(2)]
    counts = [
        (u["input_tokens"], u["cache_creation_input_tokens"], u["cache_read_input_tokens"])
        for u in usages
    ]
    assert [sum(each) for each in counts] == [count, count]
    assert counts[0][1] == usages[0]["cache_creation"]["ephemeral_1h_input_tokens"] > 16
    assert counts[1][1] == 0
    assert counts[1][2] >= counts[0][1]
    [pin] = ask(server, BEN, "/cache/pins", None, "GET").json()["data"]
    assert pin["pinned_tokens"] == counts[0][1]
    assert ask(server, ADA, "/cache/pins", None, "GET").json()["data"] == []
    long = [{**system[0], "text": topic("a mark") * 30}]
    unpinned = ask(server, BEN, "/v1/messages", {**body, "system": long}).json()["usage"]
    assert unpinned["cache_creation_input_tokens"] == 0  # over the quota: silently not kept
    ask(server, BEN, f"/cache/pins/{pin['id']}", None, "DELETE").raise_for_status()


def test_a_chain_of_responses_hits_what_it_said_before(server):
    cached, previous = [], {}
    for question in ("Why is the sky blue?", "And in the evening?", "And at night?"):
        body = {"model": MODEL, "input": question, "max_output_tokens": 20, "temperature": 0}
        answer = ask(server, ADA, "/v1/responses", {**body, **previous}).json()
        previous = {"previous_response_id": answer["id"]}
        cached.append(answer["usage"]["input_tokens_details"]["cached_tokens"])
    assert cached[0] < cached[1] < cached[2]
    check_error(ask(server, BEN, "/v1/responses", {**body, **previous}), 404)


def test_more_pins_than_the_quota_are_refused(server):
    prompt = list(range(1000, 1000 + 320))  # of 2,816 tokens a tenth may be pinned
    error = check_error(ask(server, ADA, "/cache/pins", {"model": MODEL, "prompt": prompt}), 429)
    assert error["code"] == "pin_quota_exceeded"
    assert "--pin-quota" in error["message"]


def test_a_public_prefix_is_shared_and_nothing_after_it(server):
    told(chat(server, ADA, PUBLIC, "What is the secret of the house? " * 4))
    other = told(chat(server, BEN, PUBLIC, "What is the secret of the house? " * 4))
    assert other["cached_tokens"] > 0
    assert other["missed_tokens"] > 16
    assert other["reason"] == "never_seen"
    assert other["first_differing_token"] is None
    # a tenant's purge of a prefix within it takes only what is its own
    body = {"scope": "prefix", "messages": [{"role": "system", "content": PUBLIC}]}
    ask(server, ADA, "/cache/purge", body)
    kept = told(chat(server, BEN, PUBLIC, "What is the secret of the house? " * 4))
    assert kept["missed_tokens"] <= 16
    everyone = {"scope": "tenant", "tenant": "*"}
    check_error(ask(server, ADA, "/cache/purge", everyone), 403)
    assert ask(server, ROOT, "/cache/purge", everyone).json()["purged"]["device"]["blocks"] > 0


def test_all_tiers_and_the_first_tenant_are_in_the_metrics(server):
    chat(server, ADA, topic("metrics"), service_tier="flex")
    metrics = server.metrics()
    for tier in ("device", "host", "disk"):
        assert metrics[f"anaphora_cache_tier_blocks tier={tier}"] > 0
    assert metrics["anaphora_prefix_cache_workload_queries_total workload=batch"] > 0
    assert metrics["anaphora_prefix_cache_missed_tokens_total reason=never_seen"] > 0
    names = {name.partition("tenant=")[2] for name in metrics if " tenant=" in name}
    assert len(names) == 2
    assert "other" in names


def test_what_was_pushed_out_of_memory_is_hit_below_and_told(smollm2_path, tmp_path):
    arguments = [str(smollm2_path), "--served-model-name", MODEL, "--kv-cache-memory", "8MiB"]
    with serving(tmp_path, *arguments, "--swap-space", "64MiB") as running:
        prompts = [[1000 + 10 * i + k for k in range(250)] for i in (0, 100, 200, 300)]
        body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "cache_diagnostics": True}
        for prompt in prompts:
            response = ask(running, "none", COMPLETIONS, body | {"prompt": prompt})
            assert response.status_code == 200, response.text
        response = ask(running, "none", COMPLETIONS, body | {"prompt": prompts[0]})
        [report] = response.json()["cache_diagnostics"]
        header = response.headers["x-anaphora-cache"]
        metrics = running.metrics()
        assert report["cached_tokens"] == 240
        assert report["hits"]["host"] > 0
        assert f"host={report['hits']['host']}" in header
        assert metrics["vllm:cpu_prefix_cache_hit_rate"] > 0
        assert metrics["anaphora_cache_tier_loaded_blocks_total tier=host"] > 0
        assert metrics["anaphora_cache_tier_stored_blocks_total tier=host"] > 0


def unnamed_files(pid):
    """What the engine keeps on disk without a name."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link)
        if "/disk/" in target and target.endswith("(deleted)"):
            yield link.read_bytes()


def test_a_canary_prompt_is_found_nowhere(smollm2_path, tmp_path):
    """Not on disk, as text or as token ids, nor in a log, the metrics or an error's body."""
    canary = "xylophone-quartz-4711-zebra"
    (tmp_path / "disk").mkdir()
    arguments = [
        str(smollm2_path), "--served-model-name", MODEL, "--kv-cache-memory", "8MiB",
        "--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "64MiB",
        "--api-key", f"ada={ADA}",
    ]  # fmt: skip
    with serving(tmp_path, *arguments, key=ADA) as running:
        for index in range(6):
            chat(running, ADA, f"{canary} {index} " * 12, canary)
        body = {"model": MODEL, "messages": [{"role": "user", "content": canary}]}
        shown = [
            ask(running, ADA, CHAT, body | {"top_k": "many"}).text,
            ask(running, ADA, CHAT, body | {"n": 0}).text,
            ask(running, ADA, CHAT, body | {"max_tokens": 10**6}).text,
            ask(running, "a-wrong-key", CHAT, body).text,
            ask(running, ADA, "/metrics", None, "GET").text,
        ]
        text = ask(running, ADA, "/tokenize", {"prompt": canary}).json()
        kept = list(unnamed_files(running.engine_pid))
        assert running.metrics()["anaphora_cache_tier_stored_blocks_total tier=disk"] > 0
        assert list((tmp_path / "disk").iterdir()) == []
    shown += [running.output, running.errors]
    assert "cache" in running.output
    for seen in shown:
        assert canary not in seen
    assert sum(map(len, kept)) > 2**25
    for content in kept:
        assert canary.encode() not in content
        assert encode_tokens(text["tokens"][:4]) not in content
