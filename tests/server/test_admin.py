"""Tenants, keys and limits over HTTP, and that they hold at once."""

from __future__ import annotations

import openai
import pytest

from anaphora.errors import ConfigError, EngineDied
from anaphora.fake import FakeLLM
from anaphora.server.app import create_app
from anaphora.server.endpoints import Endpoint
from anaphora.server.registry import LimitTerms, Registry
from anaphora.server.store import MEMORY, Store
from anaphora.server.tenants import Tenants
from tests.server.running import HELLO, check_error, wait_until


@pytest.fixture
def store():
    opened = Store(MEMORY)
    yield opened
    opened.close()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def ask(http, key, model="fake", **fields):
    body = {"model": model, "messages": HELLO, "max_tokens": 2, **fields}
    body = {name: value for name, value in body.items() if value is not None}
    return http.post("/v1/chat/completions", json=body, headers=bearer(key))


def test_the_life_of_a_tenant(store, serve):
    server = serve(admin_key="root", store=store)
    with server.http(headers=bearer("root")) as http:
        assert http.post("/admin/tenants", json={"name": "ann"}).json()["name"] == "ann"
        check_error(http.post("/admin/tenants", json={"name": "ann"}), 409)
        key = http.post("/admin/keys", json={"tenant": "ann"}).json()
        assert key["secret"].endswith(key["hint"])
        assert "secret" not in http.get("/admin/keys").text
        assert ask(http, key["secret"]).status_code == 200
        [tenant] = http.get("/admin/tenants").json()["data"]
        assert (tenant["name"], tenant["num_keys"]) == ("ann", 1)
        again = http.post("/admin/keys", json={"tenant": "ann", "expires_in_seconds": 60}).json()
        assert http.delete(f"/admin/keys/{key['id']}").json()["deleted"]
        check_error(ask(http, key["secret"]), 401)
        answer = ask(http, again["secret"], messages=HELLO * 20)
        assert answer.status_code == 200
        num_cached = server.llm.stats().num_cached_blocks
        assert num_cached > 0
        assert http.delete("/admin/tenants/ann").json()["deleted"]
        check_error(ask(http, again["secret"]), 401)
        assert server.llm.stats().num_cached_blocks == 0  # its cache is erased
        check_error(http.delete("/admin/tenants/ann"), 404)


def test_nobody_else_may(store, serve):
    server = serve("ann=k1", admin_key="root", store=store)
    with server.http() as http:
        for method, path in [
            ("GET", "/admin/tenants"), ("POST", "/admin/tenants"), ("DELETE", "/admin/tenants/x"),
            ("GET", "/admin/keys"), ("POST", "/admin/keys"), ("DELETE", "/admin/keys/x"),
            ("GET", "/admin/limits"), ("PUT", "/admin/limits"),
        ]:  # fmt: skip
            check_error(http.request(method, path, json={}), 403)
            check_error(http.request(method, path, json={}, headers=bearer("x")), 401)


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/admin/tenants", {}, "name"),
        ("POST", "/admin/tenants", {"name": "a b"}, "name"),
        ("POST", "/admin/tenants", {"name": "a", "colour": 1}, "colour"),
        ("POST", "/admin/keys", {"tenant": "a", "expires_in_seconds": 0}, "expires_in_seconds"),
        ("PUT", "/admin/limits", {"tenant": "a", "requests_per_minute": -1}, "requests_per_minute"),
        ("PUT", "/admin/limits", {"tenant": "a", "requests_per_minute": 1.5},
         "requests_per_minute"),
    ],
)  # fmt: skip
def test_bad_bodies_name_the_field(store, serve, method, path, body, param):
    server = serve(admin_key="root", store=store)
    with server.http(headers=bearer("root")) as http:
        assert check_error(http.request(method, path, json=body), 400)["param"] == param


def test_limits_hold_over_http_and_say_what_is_left(store, serve):
    chat = Endpoint(name="chat", limits=LimitTerms(requests_per_minute=3))
    server = serve("ann=k1", admin_key="root", store=store, endpoints=[chat])
    with server.http() as http:
        answer = ask(http, "k1", "chat")
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        for _ in range(2):
            ask(http, "k1", "chat")
        response = ask(http, "k1", "chat")
        error = check_error(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 15 < float(response.headers["retry-after-ms"]) / 1000 <= 20
        assert response.headers["retry-after"] == "20"
        check_error(ask(http, "k1", "chat", stream=True), 429)
        limits = {"tenant": "ann", "endpoint": "chat", "requests_per_minute": 1000}
        assert http.put("/admin/limits", json=limits, headers=bearer("root")).status_code == 200
        assert ask(http, "k1", "chat").status_code == 200
        listed = http.get("/admin/limits", headers=bearer("root")).json()["data"]
        assert [row["requests_per_minute"] for row in listed] == [1000]


def test_a_sdk_waits_as_long_as_it_is_told_and_then_gets_in(store, serve):
    Registry(store).set_limits("ann", "*", LimitTerms(requests_per_minute=120))
    server = serve("ann=k1", store=store)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k1", max_retries=2)
    wait_until(lambda: server.app.state.service.limiter._terms)
    with client:
        server.app.state.service.limiter.admit("ann", "fake", 1, 1)
        for bucket in server.app.state.service.limiter._accounts["ann", "*"].buckets.values():
            bucket.level = 0.0
        answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
        assert answer.choices


def test_changes_of_another_process_are_taken_over(store, serve):
    server = serve("ann=k1", store=store)
    registry = Registry(store)
    registry.add_tenant("zoe")
    _, secret = registry.create_key("zoe")
    with server.http() as http:
        wait_until(lambda: ask(http, secret).status_code == 200)


def test_the_first_key_closes_an_open_server(store, serve):
    server = serve(store=store)
    with server.http() as http:
        assert http.post("/admin/tenants", json={"name": "ann"}).status_code == 200
        secret = http.post("/admin/keys", json={"tenant": "ann"}).json()["secret"]
        check_error(http.get("/admin/keys"), 401)
        assert ask(http, secret).status_code == 200


def test_a_name_given_to_somebody_else_brings_nothing_along(store, serve):
    """Not the cache, even if nobody has looked in between, nor responses, nor usage."""
    registry = Registry(store)
    registry.add_tenant("ann")
    _, first = registry.create_key("ann")
    server = serve(admin_key="root", store=store)
    wait_until(lambda: "ann" in server.app.state.service.tenants.names)
    with server.http() as http:
        prompt = HELLO * 20
        assert ask(http, first, messages=prompt).status_code == 200
        body = {"model": "fake", "input": "remember me"}
        response = http.post("/v1/responses", json=body, headers=bearer(first)).json()
        registry.remove_tenant("ann")
        registry.add_tenant("ann")
        _, second = registry.create_key("ann")
        wait_until(lambda: ask(http, second, max_tokens=1).status_code == 200)
        usage = ask(http, second, messages=prompt).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 16
        stored = http.get(f"/v1/responses/{response['id']}", headers=bearer(second))
        check_error(stored, 404)
        [used] = http.get("/usage", headers=bearer(second)).json()["data"]
        assert used["requests"] == 2
        everything = http.get("/usage?by=tenant", headers=bearer("root")).json()["data"]
        assert [row["requests"] for row in everything] == [4]


def test_an_engine_that_is_gone_holds_up_neither_keys_nor_batches(store, serve):
    """Removing a tenant takes the engine; without one it is done later, and revocations hold."""
    registry = Registry(store)
    for name in ("ann", "ben"):
        registry.add_tenant(name)
    _, ann = registry.create_key("ann")
    key, ben = registry.create_key("ben")
    server = serve(admin_key="root", store=store)
    wait_until(lambda: len(server.app.state.service.tenants.names) == 2)
    command = server.llm.command

    async def fail(_):
        raise EngineDied("the engine process died")

    server.llm.command = fail
    with server.http() as http:
        assert http.delete("/admin/tenants/ann", headers=bearer("root")).status_code == 200
        check_error(ask(http, ann), 401)
        registry.revoke_key(key.id)
        wait_until(lambda: ask(http, ben).status_code == 401)
        server.llm.command = command
        _, again = registry.create_key("ben")
        wait_until(lambda: ask(http, again).status_code == 200)


def test_odd_questions_about_usage(store, serve):
    server = serve("ann=k1", store=store)
    with server.http() as http:
        assert ask(http, "k1").status_code == 200
        [row] = http.get("/usage?by=" + "class,day," * 300).json()["data"]
        assert row["class"] == "interactive"
        for query in ("since=nan", "until=inf", "since=1e999", "by=tenant;drop"):
            check_error(http.get(f"/usage?{query}"), 400)


def test_two_keys_at_once_are_named_as_such(store, serve):
    server = serve("ann=k1", store=store)
    with server.http(headers={"x-api-key": "other"}) as http:
        assert "several keys" in check_error(http.get("/v1/models"), 401)["message"]


def test_an_endpoints_bound_of_output(store, serve):
    server = serve(store=store, endpoints=[Endpoint(name="chat", max_output_tokens=5)])
    with server.http() as http:
        assert ask(http, "x", "chat", max_tokens=None).json()["usage"]["completion_tokens"] == 5
        error = check_error(ask(http, "x", "chat", max_tokens=6), 400)
        assert error["param"] == "max_tokens"


def test_an_adapter_that_can_never_be_loaded_is_found_at_the_start():
    llm = FakeLLM(max_loras=0)
    with pytest.raises(ConfigError, match=r"'legal'.*--lora-modules"):
        create_app(llm, Tenants(), endpoints=[Endpoint(name="x", adapter="legal")])
