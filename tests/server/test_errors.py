"""Every error in every dialect, as the table in docs/api.md has it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from anaphora.errors import EngineDied, QuotaExceeded, StoreUnavailable
from anaphora.server.endpoints import Endpoint
from anaphora.server.registry import LimitTerms, Registry
from anaphora.server.store import MEMORY, Store
from tests.server.running import HELLO, Running, serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
PATHS = {
    "openai": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "databricks": "/serving-endpoints/{model}/invocations",
}
JSON = {"content-type": "application/json"}
NONE = "–"

Ask = Callable[[Running, httpx.Client, str], httpx.Response]


def post(http: httpx.Client, dialect: str, *, model: str = "fake", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "max_tokens": 5, **fields}
    body = {name: value for name, value in body.items() if value is not None}
    return http.post(PATHS[dialect].format(model=model), json=body)


def sending(**fields: Any) -> Ask:
    return lambda _, http, dialect: post(http, dialect, **fields)


def raising(error: Exception, text: str = "") -> Ask:
    def ask(server: Running, http: httpx.Client, dialect: str) -> httpx.Response:
        if text:
            server.llm.enqueue(text, then=error)
        else:
            server.llm.enqueue(error)
        return post(http, dialect)

    return ask


def route(method: str, more: str = "", **options: Any) -> Ask:
    def ask(_: Running, http: httpx.Client, dialect: str) -> httpx.Response:
        return http.request(method, PATHS[dialect].format(model="fake") + more, **options)

    return ask


def only_openai(method: str, path: str, **options: Any) -> Ask:
    def ask(_: Running, http: httpx.Client, dialect: str) -> httpx.Response:
        if dialect != "openai":
            pytest.fail("not a route of this dialect")
        return http.request(method, path, **options)

    return ask


def slow(server: Running, _: httpx.Client, dialect: str) -> httpx.Response:
    path = PATHS[dialect].format(model="fake")
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\n"
    head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with server.connect() as sock:
        sock.sendall(head.encode())
        answer = ""
        while not answer.endswith("}"):
            answer += sock.recv(10_000).decode()
    status = int(answer.split()[1])
    return httpx.Response(status, content=answer.partition("\r\n\r\n")[2])


def while_dead(server: Running, http: httpx.Client, dialect: str) -> httpx.Response:
    server.llm.die()
    response = post(http, dialect)
    server.llm.recover()
    return response


def limited(server: Running, http: httpx.Client, dialect: str) -> httpx.Response:
    return post(http, dialect, model="limited")


def without_database(_: Running, __: httpx.Client, dialect: str) -> httpx.Response:
    with serving() as serve, serve().http() as http:
        return http.get("/v1/files")


def without_a_disk(server: Running, http: httpx.Client, dialect: str) -> httpx.Response:
    with pytest.MonkeyPatch.context() as patch:
        failing = StoreUnavailable("the database failed (disk I/O error)")
        patch.setattr(Store, "read", Mock(side_effect=failing))
        return http.get("/v1/files")


OPENAI_ONLY = {
    "the key may not do this": only_openai("POST", "/cache/purge", json={"scope": "all"}),
    "the tenant has no such stored response": only_openai("GET", "/v1/responses/resp_x"),
    "the tenant has no such pin": only_openai("DELETE", "/cache/pins/pin_x"),
    "the tenant has no such file or batch": only_openai("GET", "/v1/files/file-x"),
    "there is one of that name, or it cannot be changed any more": only_openai(
        "POST", "/admin/tenants", json={"name": "taken"}, headers={"authorization": "Bearer root"}
    ),
    "the server has no database for it": without_database,
    "the database cannot be read or written": without_a_disk,
}
CASES: dict[str, Ask] = {
    "a field has a wrong type or value": sending(temperature=9),
    "a field is missing": sending(messages=None),
    "a field would change the meaning and is not built": sending(tools=[{
        "type": "computer_use", "name": "f", "function": {"name": "f"}}]),
    "an unknown field, on Databricks' routes or with `--strict`": sending(zzz=1),
    "prompt, or prompt and `max_tokens`, do not fit the context": sending(max_tokens=5000),
    "the key is missing or wrong": route("POST", headers={"authorization": "Bearer no"}),
    **OPENAI_ONLY,
    "another model is served, or the adapter is not loaded": sending(model="other"),
    "there is no such route": route("GET", "/nowhere"),
    "wrong method": route("PUT"),
    "the body came too slowly": slow,
    "the body is over 4 MiB": route("POST", content=b" " * 30_000, headers=JSON),
    "the body is not declared as JSON, or compressed": route("POST", content=b"{}"),
    "beyond a limit of requests or tokens a minute, or at a time; see `retry-after`": limited,
    "beyond a quota": raising(QuotaExceeded("too much")),
    "the request was lost with its engine process": raising(EngineDied("it died"), "x"),
    "a fault of ours": raising(ValueError("canary"), "x"),
    "an engine is starting; see `retry-after`": while_dead,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    store = Store(MEMORY)
    Registry(store).add_tenant("taken")
    nobody = Endpoint(name="limited", limits=LimitTerms(requests_per_minute=0))
    with contextlib.closing(store), serving() as serve:
        yield serve(
            "a=key-a", admin_key="root", strict=True, max_body_bytes=20_000, body_timeout=0.2,
            store=store, endpoints=[Endpoint(name="fake"), nobody],
        )  # fmt: skip


def told(response: httpx.Response, dialect: str) -> tuple[str, ...]:
    """Status and what else of the error is for programs. The envelope must be the dialect's."""
    body = response.json()
    assert "canary" not in response.text
    if dialect == "databricks":
        assert set(body) == {"error_code", "message"}
        return str(response.status_code), f"`{body['error_code']}`"
    if dialect == "anthropic":
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
        return str(response.status_code), f"`{body['error']['type']}`"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    shown = [body["error"][name] for name in ("type", "code", "param")]
    return str(response.status_code), *(f"`{value}`" if value else NONE for value in shown)


def rows() -> dict[str, str]:
    """The table's lines by what they are about."""
    table = DOCUMENT.read_text().split("## Errors")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if re.match(r"\| [^-]", line)]
    return {line.split("|")[1].strip(): line for line in lines[1:]}


@pytest.mark.parametrize("when", CASES)
def test_the_table_is_true(server: Running, when: str) -> None:
    cells = [when]
    with server.http() as http:
        for dialect in PATHS:
            if when in OPENAI_ONLY and dialect != "openai":
                cells.append(NONE)
                continue
            found = told(CASES[when](server, http, dialect), dialect)
            if dialect == "openai":
                cells += found
            else:
                cells.append(" ".join(found))
    assert rows().get(when) == f"| {' | '.join(cells)} |"


def test_the_table_is_complete() -> None:
    assert set(rows()) == set(CASES)
