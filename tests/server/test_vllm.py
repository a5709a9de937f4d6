"""vLLM's operational routes."""

from __future__ import annotations

import httpx

import anaphora
from tests.server.running import HELLO, Serve, check_error


def test_what_runs(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json() == {"version": anaphora.__version__}
    body = http.get("/server_info").json()
    assert body["info"]["name"] == "fake"
    assert body["stats"]["num_running"] == 0


def test_server_info_is_for_the_admin(serve: Serve) -> None:
    server = serve("a=key-a", admin_key="root")
    with server.http() as http:
        admin = {"authorization": "Bearer root"}
        for path in ("/server_info", "/load"):
            check_error(http.get(path), 403)
            assert http.get(path, headers=admin).status_code == 200


def test_ping_tells_that_no_engine_is_there(serve: Serve) -> None:
    server = serve()
    server.llm.die()
    with server.http() as http:
        check_error(http.get("/ping"), 503)


def test_invocations_are_chats_or_completions(http: httpx.Client) -> None:
    chat = http.post("/invocations", json={"model": "fake", "messages": HELLO}).json()
    assert chat["choices"][0]["message"]["content"] == "You said: hello"
    completion = http.post("/invocations", json={"model": "fake", "prompt": "a"}).json()
    assert completion["choices"][0]["text"] == "You said: a"
    assert check_error(http.post("/invocations", json={"model": "fake"}), 400)["param"]
