"""The adapters' routes, and adapters as models, over a fake engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from anaphora.errors import ConfigError, UnusableAdapter
from anaphora.fake import FakeLLM
from anaphora.server.app import create_app
from anaphora.server.tenants import Tenants
from anaphora.types import AdapterInfo
from tests.server.running import HELLO, Running, Serve, check_error

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve("a=key-a", "b=key-b", admin_key="root-key")


def call(
    server: Running, path: str, key: str = "root-key", method: str = "POST", **body: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as http:
        return http.request(method, path, json=body or None)


def ask(
    server: Running, model: str, key: str = "key-a", text: str = "x" * 60, **fields: Any
) -> Any:
    with server.openai(key) as sdk:
        return sdk.completions.create(model=model, prompt=text, max_tokens=1, **fields)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_loading_gives_a_model_and_unloading_takes_it(server: Running) -> None:
    response = call(server, LOAD, **SQL)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'sql' added successfully."
    with server.openai("key-a") as sdk:
        assert [model.id for model in sdk.models.list()] == ["fake", "sql"]
        answer = sdk.chat.completions.create(model="sql", messages=HELLO)  # type: ignore[arg-type]
        assert answer.model == "sql"
        assert server.llm.requests[-1].scope.adapter == server.llm.adapters["sql"].digest
        base = sdk.chat.completions.create(model="fake", messages=HELLO)  # type: ignore[arg-type]
        assert server.llm.requests[-1].scope.adapter == ""
        assert answer.system_fingerprint != base.system_fingerprint
        assert call(server, UNLOAD, lora_name="sql").status_code == 200
        with pytest.raises(openai.NotFoundError, match="'sql', which is not served"):
            sdk.chat.completions.create(model="sql", messages=HELLO)  # type: ignore[arg-type]
        assert [model.id for model in sdk.models.list()] == ["fake"]
    error = check_error(call(server, UNLOAD, lora_name="sql"), 404)
    assert error["param"] == "lora_name"


def test_a_models_parent_and_root(server: Running) -> None:
    """As in vLLM; only the admin is told where things lie."""
    call(server, LOAD, **SQL)
    for key, root in (("root-key", "/adapters/sql"), ("key-a", "sql")):
        listed = call(server, "/v1/models", key, "GET").json()["data"][1]
        one = call(server, "/v1/models/sql", key, "GET").json()
        assert listed == one
        assert (one["parent"], one["root"]) == ("fake", root)
        assert "/adapters" not in str(one) or key == "root-key"
    base = call(server, "/v1/models/fake", "key-a", "GET").json()
    assert base["parent"] is None


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_only_the_admin_loads_and_unloads(server: Running, serve: Serve, path: str) -> None:
    body = SQL if path == LOAD else {"lora_name": "sql"}
    error = check_error(call(server, path, "key-a", **body), 403)
    assert "admin key" in error["message"]
    check_error(call(server, path, "wrong", **body), 401)
    check_error(call(serve("a=key-a"), path, "key-a", **body), 403)
    opened = serve()
    assert call(opened, LOAD, "none", **SQL).status_code == 200
    # a form, as a foreign page could send one
    with opened.http() as http:
        assert http.post(path, data={"lora_name": "sql"}).status_code == 415


def test_nothing_is_shared_with_the_model_or_another_adapter(server: Running) -> None:
    call(server, LOAD, **SQL)
    call(server, LOAD, lora_name="law", lora_path="/adapters/law")
    call(server, LOAD, lora_name="sql-2", lora_path="/adapters/sql")
    for model in ("fake", "sql", "law"):
        assert cached(ask(server, model)) == 0
        assert cached(ask(server, model)) > 0
    assert cached(ask(server, "sql-2")) > 0  # the same weights
    assert cached(ask(server, "sql", key="key-b")) == 0


def test_a_new_adapter_under_an_old_name_hits_nothing_old(server: Running) -> None:
    call(server, LOAD, **SQL)
    ask(server, "sql")
    error = check_error(call(server, LOAD, **SQL | {"lora_path": "/adapters/2"}), 400)
    assert error["param"] == "lora_name"
    assert "load_inplace" in error["message"]
    answer = call(server, LOAD, **SQL | {"lora_path": "/adapters/2", "load_inplace": True})
    assert answer.status_code == 200
    assert cached(ask(server, "sql")) == 0
    call(server, LOAD, **SQL | {"load_inplace": True})
    assert cached(ask(server, "sql")) == 0  # purged when it was replaced


def test_a_tenant_purges_what_an_adapter_computed_for_it(server: Running) -> None:
    call(server, LOAD, **SQL)
    for model in ("fake", "sql"):
        for key in ("key-a", "key-b"):
            ask(server, model, key)
    answer = call(server, "/cache/purge", "key-a", scope="adapter", adapter="sql").json()
    assert answer["purged"]["device"]["blocks"] > 0
    assert cached(ask(server, "sql")) == 0
    assert min(cached(ask(server, "fake")), cached(ask(server, "sql", "key-b"))) > 0
    check_error(call(server, "/cache/purge", "key-a", scope="adapter", adapter="x"), 404)


def test_pins_and_prefixes_are_those_of_the_model_that_is_named(server: Running) -> None:
    call(server, LOAD, **SQL)
    body = {"model": "sql", "prompt": "x" * 60, "ttl_seconds": 60}
    assert call(server, "/cache/pins", "key-a", **body).status_code == 200
    assert cached(ask(server, "fake")) == 0
    assert cached(ask(server, "sql")) > 0
    purge = {"scope": "prefix", "prompt": "x" * 60}
    call(server, "/cache/purge", "key-a", **purge)
    assert cached(ask(server, "sql")) > 0
    call(server, "/cache/purge", "key-a", model="sql", **purge)
    assert cached(ask(server, "sql")) < cached(ask(server, "sql"))


BAD = [
    ({"lora_path": "/x"}, "lora_name"),
    ({"lora_name": "x"}, "lora_path"),
    ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "x", "lora_path": ""}, "lora_path"),
    ({"lora_name": 3, "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "a b", "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "a\nb", "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "x" * 129, "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "fake", "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "fake", "lora_path": "/x", "load_inplace": True}, "lora_name"),
    ({"lora_name": "x", "lora_path": "/x", "load_inplace": "yes"}, "load_inplace"),
    ({"lora_name": "x", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=str)
def test_bad_bodies_name_the_field(server: Running, body: dict[str, Any], param: str) -> None:
    assert check_error(call(server, LOAD, **body), 400)["param"] == param
    assert not server.llm.adapters


def test_too_many_adapters(server: Running) -> None:
    for number in range(4):
        call(server, LOAD, lora_name=f"a{number}", lora_path=f"/{number}")
    error = check_error(call(server, LOAD, **SQL), 400)
    assert "--max-loras is 4" in error["message"]
    assert call(server, LOAD, lora_name="a0", lora_path="/9", load_inplace=True).status_code == 200


def test_an_unusable_adapter_is_the_clients_mistake(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(name: str, path: str, *, load_inplace: bool = False) -> None:
        raise UnusableAdapter(f"{path} has no readable adapter_config.json")

    monkeypatch.setattr(server.llm, "load_adapter", load)
    error = check_error(call(server, LOAD, **SQL), 400)
    assert error["param"] == "lora_path"
    assert "adapter_config.json" in error["message"]


def test_a_name_of_the_model_is_no_name_of_an_adapter() -> None:
    llm = FakeLLM()
    llm._names.set("fake", AdapterInfo(path="/x", digest="0" * 64, rank=1, num_bytes=0))
    with pytest.raises(ConfigError, match="'fake', which is a name of the model"):
        create_app(llm, Tenants.from_flags([]))


def test_metrics_count_adapters(server: Running) -> None:
    call(server, LOAD, **SQL)
    text = call(server, "/metrics", "root-key", "GET").text
    assert "anaphora_lora_adapters 1.0" in text
