"""Fields that a route does not know are named in a header, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from anaphora.server.fields import ACCEPTED_WITHOUT_EFFECT
from anaphora.server.unknown import IGNORED_HEADER
from tests.server.running import HELLO, Running, check_error, serving

CHAT = {"model": "fake", "messages": HELLO, "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "fake", "prompt": "a"},
    "/v1/responses": {"model": "fake", "input": "a"},
    "/v1/responses/input_tokens": {"model": "fake", "input": "a"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "fake", "messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/invocations": CHAT,
}


@pytest.mark.parametrize("path", BODIES)
def test_they_are_named(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={**BODIES[path], "zzz": 1, "yyy": {"x": [1]}})
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "zzz, yyy"
    assert IGNORED_HEADER not in http.post(path, json=BODIES[path]).headers


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving() as serve:
        yield serve(strict=True)


@pytest.mark.parametrize("path", BODIES)
def test_a_strict_server_refuses_them(strict: Running, path: str) -> None:
    with strict.http() as http:
        assert http.post(path, json=BODIES[path]).status_code == 200
        response = http.post(path, json={**BODIES[path], "zzz": 1})
        if path.startswith("/v1/messages"):
            assert response.status_code == 400
            assert "zzz is not a field" in response.json()["error"]["message"]
        else:
            error = check_error(response, 400)
            assert (error["param"], error["code"]) == ("zzz", "unknown_parameter")


def test_in_a_stream_too(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, "stream": True, "zzz": 1})
    assert response.headers[IGNORED_HEADER] == "zzz"


def test_nested_ones_have_a_path(http: httpx.Client) -> None:
    part = {"type": "text", "text": "a", "zzz": 1, "cache_control": {"type": "ephemeral"}}
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": [part], "for_the_template": 1}],
        "stream": True,
        "stream_options": {"include_usage": True, "yyy": 1},
    }
    response = http.post("/v1/chat/completions", json=body)
    names = "stream_options.yyy, messages[0].content[0].zzz"
    assert response.headers[IGNORED_HEADER] == names


def test_what_is_documented_as_without_effect_is_known(strict: Running) -> None:
    fields = {name: None for name in ACCEPTED_WITHOUT_EFFECT if "[" not in name and "." not in name}
    with strict.http() as http:
        response = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200


def test_odd_names_cannot_break_the_header(http: httpx.Client) -> None:
    odd = {"a\r\nset-cookie: x": 1, "é" * 500: 1, "": 1, **{f"f{n}": 1 for n in range(1000)}}
    response = http.post("/v1/chat/completions", json={**CHAT, **odd})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    value = response.headers[IGNORED_HEADER]
    assert value.startswith("a??set-cookie??x, ???")
    assert len(value) < 1200
