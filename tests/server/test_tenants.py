from __future__ import annotations

import hashlib
import http.client
from urllib.parse import urlsplit

import pytest

from anaphora.errors import ConfigError, Unauthorized
from anaphora.server import tenants as tenants_module
from anaphora.server.tenants import Caller, KnownKey, Tenants, digest_of
from tests.server.running import Running, Serve, check_error


def test_without_keys_everyone_is_the_default_tenant() -> None:
    tenants = Tenants.from_flags([])
    assert tenants.is_open
    assert tenants.authenticate(None) == tenants.authenticate("Bearer x") == Caller("default")


def test_each_key_has_its_tenant() -> None:
    tenants = Tenants.from_flags(["plain", "team=first", "team=second", "other=a=b=="])
    assert tenants.authenticate("Bearer first").tenant == "team"
    assert tenants.authenticate("bearer second").tenant == "team"
    assert tenants.authenticate("Bearer a=b==").tenant == "other"
    assert tenants.num_tenants == 3
    # the name of an unnamed key is the same after a restart
    again = Tenants.from_flags(["x", "plain"])
    assert tenants.authenticate("Bearer plain") == again.authenticate("Bearer plain")
    assert tenants.authenticate("Bearer plain").tenant.startswith("key-")
    assert again.authenticate("Bearer x") != again.authenticate("Bearer plain")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic good", "good", "Bearer good x",
     "Bearer goo", "Bearer GOOD", "Bearer name=good", "Bearer \xe9\u1234"],
)  # fmt: skip
def test_wrong_headers(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        Tenants.from_flags(["name=good"]).authenticate(header)
    assert "good" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [[""], ["name="], ["a", ""], ["name=key", "key"], ["a=key", "b=key"], ["sk-padded=="],
     ["two words"], ["schlüssel"], ["tab\tkey"], ["=key"], ["na me=key"], ["key-abc=key"]],
)  # fmt: skip
def test_unusable_flags_are_named_by_position_not_by_content(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"--api-key number {len(flags)} ") as caught:
        Tenants.from_flags(flags)
    assert "key=" not in str(caught.value)
    assert "schl" not in str(caught.value)


def test_only_digests_are_kept_and_found_by_what_nobody_can_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table's own index is keyed, and the digest itself is compared in constant time, found or
    not."""
    tenants = Tenants.from_flags(["first-key", "second-key", "third-key"])
    assert "first-key" not in repr(vars(tenants))
    assert hashlib.sha256(b"first-key").digest() not in tenants._keys
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr(tenants_module.hmac, "compare_digest", compare)
    tenants.authenticate("Bearer first-key")
    with pytest.raises(Unauthorized):
        tenants.authenticate("Bearer other-key")
    assert len(compared) == 2


def test_keys_of_the_database_come_go_and_expire() -> None:
    now = 100.0
    tenants = Tenants(clock=lambda: now)
    assert tenants.is_open
    key = KnownKey(digest_of("stored"), Caller("alice", "key_1"), expires_at=200.0)
    tenants.update([key])
    assert not tenants.is_open
    assert tenants.authenticate("Bearer stored") == Caller("alice", "key_1")
    now = 200.0
    with pytest.raises(Unauthorized):
        tenants.authenticate("Bearer stored")
    now = 100.0
    tenants.update([])
    assert not tenants.is_open  # the last key was revoked: nobody gets in
    with pytest.raises(Unauthorized):
        tenants.authenticate("Bearer stored")


def test_a_key_of_the_operators_options_holds_whatever_the_database_says() -> None:
    tenants = Tenants.from_flags(["team=same"])
    tenants.update([KnownKey(digest_of("same"), Caller("other", "key_1"))])
    assert tenants.authenticate("Bearer same").tenant == "team"


def test_the_admin_key_is_one_more_key_and_hashed_like_the_others() -> None:
    tenants = Tenants.from_flags(["a=key-of-a"], "root=key")
    assert tenants.has_admin_key
    assert "root=key" not in repr(vars(tenants))
    admin = tenants.authenticate("Bearer root=key")
    assert tenants.is_admin(admin.tenant)
    assert not tenants.is_admin(tenants.authenticate("Bearer key-of-a").tenant)
    assert tenants.num_tenants == 1
    only = Tenants.from_flags([], "root")
    assert not only.is_open
    with pytest.raises(Unauthorized):
        only.authenticate("Bearer other")
    assert Tenants.from_flags([]).is_admin("default")
    assert not Tenants.from_flags(["a=k"]).is_admin("a")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "same"])
def test_unusable_admin_keys(key: str) -> None:
    with pytest.raises(ConfigError, match="--admin-key") as caught:
        Tenants.from_flags(["a=same"], key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("name", ["key-admin", "key-0"])
def test_no_name_is_the_admins(name: str) -> None:
    with pytest.raises(ConfigError, match="unusable name"):
        Tenants.from_flags([f"{name}=key"])


def raw(server: Running, method: str, path: str, *authorizations: str) -> tuple[int, str]:
    """Sends ``path`` as it is: httpx would tidy it up."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.putrequest(method, path, skip_host=False, skip_accept_encoding=True)
    for value in authorizations:
        connection.putheader("Authorization", value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, response.getheader("www-authenticate") or ""


TRICKS = [
    "//v1/models", "/v1//models", "/v1/models/", "/v1%2fmodels", "/%76%31/models",
    "/health/../v1/models", "/health/..%2fv1/models", "/health/%2e%2e/v1/models", "/./v1/models",
    "/v1/models?x=/health", "/v1/models#/health", "/health/", "//health", "/health%2f", "/HEALTH",
    "/health;/v1/models", "/health%00", "/health?/../v1/models/x", "http://x/v1/models",
    "/v1/models/%2e%2e/%2e%2e/health", "/\\health", "/nowhere", "/", "/docs/oauth2-redirect",
]  # fmt: skip


def test_only_health_opens_without_a_key(serve: Serve) -> None:
    server = serve("team=good-key")
    routes = [
        (path, method) for path, method in _routes(server) if path not in ("/health", "/ready")
    ]
    assert len(routes) >= 15
    assert {("/cache/pins", "POST"), ("/cache/pins/{pin_id}", "DELETE")} <= set(routes)
    assert {("/cache/purge", "POST"), ("/reset_prefix_cache", "POST")} <= set(routes)
    tricks = [
        (path, method)
        for path in TRICKS
        if not path.startswith("/health?")
        for method in ("GET", "HEAD", "POST", "OPTIONS", "TRACE")
    ]
    for path, method in [*routes, *tricks]:
        for keys in ((), ("Bearer wrong",), ("good-key",), ("Bearer wrong", "Bearer good-key")):
            status, challenge = raw(server, method, path, *keys)
            assert (status, challenge) == (401, "Bearer"), (method, path, keys)
    assert raw(server, "GET", "/health")[0] == 200
    assert raw(server, "GET", "/health?x=1")[0] == 200
    assert raw(server, "POST", "/health")[0] == 405


def _routes(server: Running) -> list[tuple[str, str]]:
    paths = ["/docs", "/redoc", "/openapi.json", "/v1/models/fake"]
    described = server.app.openapi()["paths"]
    found = [(path, "GET") for path in paths]
    return found + [(path, method.upper()) for path in described for method in described[path]]


FOR_ADMINS = (
    *("/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "/server_info",
    *("/admin/tenants", "/admin/keys", "/admin/limits"),
)
KEPT_IN_A_DATABASE = ("/usage", "/v1/files", "/v1/batches")  # this server has none


def test_with_a_good_key_every_route_answers(serve: Serve) -> None:
    server = serve("team=good-key")
    for path, method in _routes(server):
        status, _ = raw(server, method, path, "Bearer good-key")
        # without a body; {name} is no model; what concerns other tenants takes another key
        allowed = (403,) if path in FOR_ADMINS else (200, 415)
        allowed = (501,) if path in KEPT_IN_A_DATABASE else allowed
        allowed = (400,) if path == "/serving-endpoints/embeddings" else allowed
        assert status in allowed or "{" in path, path
    for path in TRICKS:
        status, _ = raw(server, "GET", path, "Bearer good-key")
        assert status in (200, 404), path


def test_the_refusal_has_the_envelope_and_no_cors_header(serve: Serve) -> None:
    server = serve("good-key")
    with server.http(follow_redirects=False) as http_client:
        headers = {"authorization": "Bearer wrong", "origin": "https://evil.example"}
        response = http_client.get("/v1/models", headers=headers)
        assert check_error(response, 401)["code"] == "invalid_api_key"
        response = http_client.get("/v1/models", headers={"origin": "https://evil.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_tenant_comes_from_the_key_alone(serve: Serve) -> None:
    server = serve("a=key-a", "b=key-b")
    cached = []
    for key in ("key-a", "key-b", "key-b"):
        with server.openai(key) as sdk:
            answer = sdk.completions.create(
                model="fake", prompt="x" * 40, user="a", extra_body={"tenant": "a", "scope": "a"}
            )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 32]
    assert [request.scope.tenant for request in server.llm.requests] == ["a", "b", "b"]
