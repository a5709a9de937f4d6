"""Pins and purges over HTTP: who may do what, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from anaphora.fake import FakeLLM
from tests.server.running import HELLO, Running, Serve, check_error

CANARY = "canary-5f1d"
LONG = "a system prompt that fills more than one block; " * 2
MESSAGES = [{"role": "system", "content": LONG}]
PINS, PURGE, RESET = "/cache/pins", "/cache/purge", "/reset_prefix_cache"
KEYS = ("a=key-a", "b=key-b")


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve(*KEYS, admin_key="root-key")


def call(server: Running, method: str, path: str, key: str = "key-a", **json: Any) -> Any:
    with server.http(headers={"authorization": f"Bearer {key}"}) as http:
        return http.request(method, path, **({"json": json} if json else {}))


def cached(server: Running, key: str = "key-a", messages: Any = MESSAGES, **fields: Any) -> int:
    body = {"model": "fake", "messages": messages, "max_tokens": 1, **fields}
    usage = call(server, "POST", "/v1/chat/completions", key, **body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def blocks(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "cache.purge"
    device = response.json()["purged"]["device"]
    assert set(device) == {"blocks", "in_use"}
    return int(device["blocks"])


def test_a_pin_is_what_a_chat_begins_with(server: Running) -> None:
    pin = call(server, "POST", PINS, model="fake", messages=MESSAGES, ttl_seconds=60).json()
    assert pin["object"] == "cache.pin"
    assert pin["ttl_seconds"] == 60
    assert abs(pin["expires_at"] - time.time() - 60) < 5
    [request] = server.llm.requests
    assert (request.params.max_tokens, request.params.temperature) == (1, 0)
    tokens = {"messages": MESSAGES, "add_generation_prompt": False}
    assert request.prompt_token_ids == call(server, "POST", "/tokenize", **tokens).json()["tokens"]
    assert pin["pinned_tokens"] == len(request.prompt_token_ids) // 16 * 16
    assert cached(server, messages=MESSAGES + HELLO) == pin["pinned_tokens"]  # it is cached now
    del pin["ttl_seconds"]
    listed = call(server, "GET", PINS).json()
    assert [entry | {"expires_at": 0} for entry in listed["data"]] == [pin | {"expires_at": 0}]
    metrics = call(server, "GET", "/metrics", "root-key").text
    assert f"anaphora_kv_blocks_pinned {pin['pinned_tokens'] // 16}.0" in metrics
    gone = call(server, "DELETE", f"{PINS}/{pin['id']}").json()
    assert gone == {"object": "cache.pin.deleted", "id": pin["id"], "deleted": True}
    assert call(server, "GET", PINS).json() == {"object": "list", "data": []}


@pytest.mark.parametrize("prompt", [LONG, [97] * 40])
def test_a_pin_of_a_prompt_has_the_scope_that_it_names(server: Running, prompt: Any) -> None:
    scope = {"cache_salt": "salt", "prompt_cache_key": "k"}
    call(server, "POST", PINS, model="fake", prompt=prompt, **scope)
    used = server.llm.requests[0].scope
    assert (used.tenant, used.cache_salt, used.prompt_cache_key) == ("a", "salt", "k")
    assert server.llm.requests[0].prompt_token_ids[-1] == (prompt[-1] if prompt != LONG else 32)


def test_pins_are_invisible_to_other_tenants(server: Running) -> None:
    pin = call(server, "POST", PINS, model="fake", messages=MESSAGES).json()["id"]
    for key in ("key-b", "root-key"):
        assert call(server, "GET", PINS, key).json()["data"] == []
        error = check_error(call(server, "DELETE", f"{PINS}/{pin}", key), 404)
        assert error["code"] == "pin_not_found"
        unknown = check_error(call(server, "DELETE", f"{PINS}/pin_none", key), 404)
        assert unknown["message"] == error["message"].replace(pin, "pin_none")
    assert len(call(server, "GET", PINS).json()["data"]) == 1
    long = check_error(call(server, "DELETE", f"{PINS}/{'x' * 5000}"), 404)
    assert len(long["message"]) < 200


def test_a_tenant_purges_its_own_and_nobody_elses(server: Running) -> None:
    for key in ("key-a", "key-b"):
        cached(server, key)
    call(server, "POST", PINS, model="fake", messages=MESSAGES)
    assert blocks(call(server, "POST", PURGE, scope="tenant")) > 0
    assert call(server, "GET", PINS).json()["data"] == []  # nothing is left of it
    assert cached(server) == 0
    assert cached(server, "key-b") > 0
    assert blocks(call(server, "POST", PURGE, scope="tenant", tenant="a")) > 0
    assert blocks(call(server, "POST", PURGE, scope="tenant", tenant="a")) == 0
    assert cached(server, "key-b") > 0


def test_a_prefix_goes_with_all_that_comes_after_it(server: Running) -> None:
    prompt = "x" * 15  # and a token for the beginning
    rest = {"model": "fake", "max_tokens": 1}
    for key in ("key-a", "key-b"):
        for text in (prompt + "y" * 40, "z" * 40):
            call(server, "POST", "/v1/completions", key, prompt=text, **rest)
    assert blocks(call(server, "POST", PURGE, scope="prefix", prompt=prompt)) == 3

    def hits(key: str, text: str) -> int:
        body = call(server, "POST", "/v1/completions", key, prompt=text, **rest).json()
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert hits("key-a", prompt + "y" * 40) == 0
    assert hits("key-a", "z" * 40) == hits("key-b", "z" * 40) == 32
    assert hits("key-b", prompt + "y" * 40) == 48
    body = {"scope": "prefix", "messages": MESSAGES, "cache_salt": "other"}
    cached(server)
    assert blocks(call(server, "POST", PURGE, **body)) == 0
    assert blocks(call(server, "POST", PURGE, scope="prefix", messages=MESSAGES)) > 0
    assert blocks(call(server, "POST", PURGE, "root-key", **body, tenant="b")) == 0


FOREIGN: list[dict[str, Any]] = [
    {"scope": "all"},
    {"scope": "tenant", "tenant": "b"},
    {"scope": "tenant", "tenant": "nobody"},
    {"scope": "adapter", "adapter": "x", "tenant": "b"},
    {"scope": "prefix", "prompt": LONG, "tenant": "b"},
]


@pytest.mark.parametrize("body", FOREIGN, ids=str)
def test_what_concerns_others_takes_the_admin_key(server: Running, body: dict[str, Any]) -> None:
    cached(server, "key-b")
    error = check_error(call(server, "POST", PURGE, **body), 403)
    assert error["code"] == "insufficient_permissions"
    assert "admin key" in error["message"]
    assert cached(server, "key-b") > 0
    expected = 404 if body["scope"] == "adapter" else 200
    assert call(server, "POST", PURGE, "root-key", **body).status_code == expected


@pytest.mark.parametrize("path", [PURGE, RESET])
def test_an_admin_purges_everything(server: Running, path: str) -> None:
    check_error(call(server, "POST", RESET), 403)
    for key in ("key-a", "key-b", "root-key"):
        cached(server, key)
    body = {"scope": "all"} if path == PURGE else {}
    assert blocks(call(server, "POST", path, "root-key", **body)) > 0
    assert [cached(server, key) for key in ("key-a", "key-b", "root-key")] == [0, 0, 0]


def test_with_keys_and_no_admin_key_nobody_is_admin(serve: Serve) -> None:
    server = serve(*KEYS)
    error = check_error(call(server, "POST", PURGE, scope="all"), 403)
    assert "--admin-key" in error["message"]
    check_error(call(server, "POST", RESET), 403)
    assert call(server, "GET", "/metrics").status_code == 200


def test_an_open_server_has_one_tenant_who_is_admin(serve: Serve) -> None:
    server = serve()
    assert cached(server) == 0
    assert blocks(call(server, "POST", PURGE, scope="tenant", tenant="default")) > 0
    assert blocks(call(server, "POST", PURGE, scope="tenant", tenant="other")) == 0
    cached(server)
    assert blocks(call(server, "POST", RESET)) > 0


def test_a_foreign_web_page_cannot_reset_the_cache(serve: Serve) -> None:
    server = serve()
    cached(server)
    with server.http(headers={"origin": "https://evil.example"}) as http:
        check_error(http.post(RESET), 403)
    assert cached(server) > 0


def test_metrics_are_the_admins_if_there_is_one(server: Running) -> None:
    check_error(call(server, "GET", "/metrics"), 403)
    assert call(server, "GET", "/metrics", "root-key").status_code == 200


def test_vllms_parameters(server: Running) -> None:
    for query in ("reset_running_requests=false&reset_external=true", "reset_external=0"):
        assert call(server, "POST", f"{RESET}?{query}", "root-key").status_code == 200
    error = check_error(
        call(server, "POST", f"{RESET}?reset_running_requests=true", "root-key"), 400
    )
    assert (error["code"], error["param"]) == ("unsupported_parameter", "reset_running_requests")
    error = check_error(call(server, "POST", f"{RESET}?reset_external={CANARY}", "root-key"), 400)
    assert error["param"] == "reset_external"
    assert CANARY not in error["message"]


WRONG_PREFIXES: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": LONG, "messages": MESSAGES}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "short"}, "prompt"),
    ({"prompt": [97] * 15}, "prompt"),
    ({"prompt": [97] * 20 + [999]}, "prompt"),
    ({"prompt": [97] * 20 + [True]}, "prompt[20]"),
    ({"prompt": [LONG, LONG]}, "prompt"),
    ({"prompt": "x" * 500_000}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": CANARY}, "messages"),
    ({"messages": [{"role": CANARY, "content": LONG}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ({"prompt": LONG, "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"prompt": LONG, "cache_salt": ""}, "cache_salt"),
    ({"prompt": LONG, "prompt_cache_key": 5}, "prompt_cache_key"),
    ({"prompt": LONG, "model": 5}, "model"),
    ({"prompt": LONG, "max_tokens": 5}, "max_tokens"),
    ({"messages": MESSAGES, "tools": [{"type": CANARY}]}, "tools[0].type"),
]
WRONG_PINS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": LONG, "model": None}, "model"),
    ({"prompt": LONG, "ttl_seconds": 0.5}, "ttl_seconds"),
    ({"prompt": LONG, "ttl_seconds": -1}, "ttl_seconds"),
    ({"prompt": LONG, "ttl_seconds": 30 * 86400 + 1}, "ttl_seconds"),
    ({"prompt": LONG, "ttl_seconds": "3600"}, "ttl_seconds"),
    ({"prompt": LONG, "ttl_seconds": True}, "ttl_seconds"),
    ({"prompt": LONG, "ttl_seconds": 10**400}, "ttl_seconds"),
    ({"prompt": LONG, "tenant": "b"}, "tenant"),
    ({"prompt": "x" * 4096}, "prompt"),
]
WRONG_PURGES: list[tuple[dict[str, Any], str]] = [
    ({"scope": CANARY}, "scope"),
    ({"scope": None}, "scope"),
    ({"scope": 5}, "scope"),
    ({"kind": "tenant"}, "scope"),
    ({"scope": "all", "tenant": "a"}, "tenant"),
    ({"scope": "all", "prompt": LONG}, "prompt"),
    ({"scope": "tenant", "messages": MESSAGES}, "messages"),
    ({"scope": "tenant", "cache_salt": "x"}, "cache_salt"),
    ({"scope": "tenant", "adapter": "x"}, "adapter"),
    ({"scope": "tenant", "tenant": ""}, "tenant"),
    ({"scope": "tenant", "tenant": 5}, "tenant"),
    ({"scope": "tenant", "seconds": 5}, "seconds"),
    ({"scope": "adapter"}, "adapter"),
    ({"scope": "prefix", "prompt": LONG, "adapter": "x"}, "adapter"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(PINS, {"model": "fake", **body}, param) for body, param in [*WRONG_PREFIXES, *WRONG_PINS]]
    + [(PURGE, {"scope": "prefix", **body}, param) for body, param in WRONG_PREFIXES]
    + [(PURGE, body, param) for body, param in WRONG_PURGES],
)  # fmt: skip
def test_a_wrong_body_names_the_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert check_error(response, 400)["param"] == param, response.text
    assert CANARY not in response.text
    assert len(response.text) < 500


def test_a_model_or_an_adapter_that_is_not_served(http: httpx.Client) -> None:
    for path, body, param in (
        (PINS, {"prompt": LONG, "model": "other"}, "model"),
        (PURGE, {"scope": "tenant", "model": "other"}, "model"),
        (PURGE, {"scope": "adapter", "adapter": "mine"}, "adapter"),
    ):
        assert check_error(http.post(path, json=body), 404)["param"] == param


def test_a_prefix_shorter_than_a_block_says_how_long_it_must_be(http: httpx.Client) -> None:
    for path, body in ((PINS, {"model": "fake"}), (PURGE, {"scope": "prefix"})):
        error = check_error(http.post(path, json={**body, "prompt": "short"}), 400)
        assert "prompt has 6 tokens" in error["message"]
        assert "at least 16 tokens" in error["message"]


def test_where_nothing_is_cached_nothing_is_pinned(serve: Serve) -> None:
    server = serve(llm=FakeLLM(enable_prefix_caching=False))
    error = check_error(call(server, "POST", PINS, model="fake", prompt=LONG), 400)
    assert "prefix caching is off" in error["message"]
    assert not server.llm.requests


def test_while_an_engine_starts_there_is_a_503(serve: Serve) -> None:
    server = serve()
    server.llm.die()
    for method, path, body in (
        ("POST", PINS, {"model": "fake", "prompt": LONG}),
        ("GET", PINS, {}),
        ("DELETE", f"{PINS}/pin_1", {}),
        ("POST", PURGE, {"scope": "all"}),
        ("POST", RESET, {}),
    ):
        assert "retry-after" in call(server, method, path, **body).headers
