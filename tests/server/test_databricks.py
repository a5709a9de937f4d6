"""Databricks' serving endpoints, with the clients that talk to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import mlflow.deployments
import openai
import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import BadRequest, ResourceDoesNotExist, Unauthenticated
from databricks.sdk.service.serving import ChatMessage, ChatMessageRole, EndpointStateReady

from anaphora.errors import EngineDied
from anaphora.fake import FakeLLM
from tests.server.running import HELLO, Running, Serve, serving
from tests.server.test_tools import HARMONY_ANSWER, HARMONY_CALL, TOOL, enqueue

pytestmark = pytest.mark.usefixtures("let_go_of_sockets")


INVOKE = "/serving-endpoints/fake/invocations"
MESSAGES: Any = HELLO
ASKED = [ChatMessage(role=ChatMessageRole.USER, content="hello")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as serve:
        yield serve("a=key-a")


@pytest.fixture(scope="module")
def harmony() -> Iterator[Running]:
    with serving() as serve:
        yield serve("a=key-a", llm=FakeLLM(output_format="harmony"))


@pytest.fixture(scope="module")
def workspace(server: Running) -> WorkspaceClient:
    return WorkspaceClient(host=server.url, token="key-a")


@pytest.fixture
def deployments(server: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DATABRICKS_HOST", server.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "key-a")
    return mlflow.deployments.get_deploy_client("databricks")


def openai_client(server: Running) -> openai.OpenAI:
    url = f"{server.url}/serving-endpoints"
    return openai.OpenAI(base_url=url, api_key="key-a", max_retries=0, timeout=20)


def check_error(response: httpx.Response, status: int, code: str) -> str:
    """The message; the envelope must be exactly Databricks'."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error_code", "message"}
    assert response.json()["error_code"] == code
    message: str = response.json()["message"]
    return message


class TestDatabricksSDK:
    def test_query_a_chat(self, workspace: WorkspaceClient) -> None:
        answer = workspace.serving_endpoints.query(
            "fake",
            messages=ASKED,
            max_tokens=30,
            temperature=0.5,
            stop=["zzz"],
            extra_params={"top_k": "3", "seed": "7"},
            client_request_id="mine",
            usage_context={"team": "x"},
        )
        assert answer.choices is not None
        assert answer.choices[0].message is not None
        assert answer.choices[0].message.content == "You said: hello"
        assert answer.served_model_name == "fake"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16

    def test_query_a_prompt(self, workspace: WorkspaceClient) -> None:
        answer = workspace.serving_endpoints.query("fake", prompt="hello")
        assert answer.choices is not None
        assert answer.choices[0].text == "You said: hello"

    def test_list_and_get(self, workspace: WorkspaceClient) -> None:
        [endpoint] = workspace.serving_endpoints.list()
        assert (endpoint.name, endpoint.task) == ("fake", "llm/v1/chat")
        got = workspace.serving_endpoints.get("fake")
        assert got.state is not None
        assert got.state.ready == EndpointStateReady.READY
        assert got.config is not None
        assert got.config.served_entities is not None
        assert got.config.served_entities[0].entity_name == "fake"

    def test_errors_are_the_sdks(self, server: Running, workspace: WorkspaceClient) -> None:
        with pytest.raises(ResourceDoesNotExist):
            workspace.serving_endpoints.get("other")
        with pytest.raises(ResourceDoesNotExist):
            workspace.serving_endpoints.query("other", messages=ASKED)
        with pytest.raises(BadRequest, match='json: unknown field "zzz"'):
            workspace.serving_endpoints.query("fake", messages=ASKED, extra_params={"zzz": "1"})
        with pytest.raises(BadRequest, match="inputs is not supported"):
            workspace.serving_endpoints.query("fake", inputs=[1])
        with pytest.raises(Unauthenticated):
            WorkspaceClient(host=server.url, token="wrong").serving_endpoints.get("fake")

    def test_its_openai_client(self, workspace: WorkspaceClient) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # for a package of its own
            client = workspace.serving_endpoints.get_open_ai_client()
        with client:
            answer = client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == "You said: hello"


def test_mlflow_predicts_and_lists(deployments: Any) -> None:
    inputs = {"messages": HELLO, "max_tokens": 3}
    whole = deployments.predict(endpoint="fake", inputs=inputs)
    assert whole["choices"][0]["message"]["content"] == "You"
    chunks = deployments.predict_stream(endpoint="fake", inputs=inputs)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "You"
    assert [endpoint["name"] for endpoint in deployments.list_endpoints()] == ["fake"]
    assert deployments.get_endpoint("fake")["state"]["ready"] == "READY"


def test_openais_client_below_serving_endpoints(server: Running) -> None:
    with openai_client(server) as client:
        whole = client.chat.completions.create(model="fake", messages=MESSAGES)
        chunks = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.choices[0].message.content == text == "You said: hello"
        assert client.completions.create(model="fake", prompt="a").choices[0].text
        assert client.responses.create(model="fake", input="a").output_text == "You said: a"
        with pytest.raises(openai.BadRequestError, match="is an embedding model"):
            client.embeddings.create(model="fake", input="a")
        unknown = {"zzz": 1}
        with pytest.raises(openai.BadRequestError, match="unknown field"):
            client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=unknown)
        with pytest.raises(openai.BadRequestError, match="unknown field"):
            client.responses.create(model="fake", input="a", extra_body=unknown)
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.chat.completions.create(model="other", messages=MESSAGES)


def test_reasoning_is_a_part_of_content(harmony: Running) -> None:
    for _ in range(2):
        enqueue(harmony, HARMONY_ANSWER)
    with harmony.http() as http:
        message = http.post(INVOKE, json={"messages": HELLO}).json()["choices"][0]["message"]
    thought, said = message["content"]
    assert thought["type"] == "reasoning"
    assert thought["summary"] == [{"type": "summary_text", "text": "They want the weather. 🌦"}]
    assert said == {"type": "text", "text": "It is sunny ☀."}
    assert "reasoning_content" not in message
    thoughts, texts = [], []
    with openai_client(harmony) as client:
        for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
            content: Any = chunk.choices[0].delta.content
            if isinstance(content, list):
                thoughts += [part["summary"][0]["text"] for part in content]
            elif content:
                texts.append(content)
    assert ("".join(thoughts), "".join(texts)) == ("They want the weather. 🌦", "It is sunny ☀.")


def test_names_may_have_slashes(serve: Serve) -> None:
    server = serve("a=key-a", served_model_names=["org/model"])
    with server.http() as http:
        for name in ("org/model", "org%2Fmodel"):
            invoked = http.post(f"/serving-endpoints/{name}/invocations", json={"prompt": "a"})
            assert invoked.status_code == 200
            assert http.get(f"/api/2.0/serving-endpoints/{name}").json()["name"] == "org/model"


def test_calls_of_tools(harmony: Running) -> None:
    enqueue(harmony, HARMONY_CALL)
    with harmony.http() as http:
        choice = http.post(INVOKE, json={"messages": HELLO, "tools": [TOOL]}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": HELLO, "zzz": 1}, 'json: unknown field "zzz"'),
        ({"messages": HELLO, "a b\n": 1}, 'json: unknown field "a?b?"'),
        ({"prompt": "a", "zzz": 1}, 'json: unknown field "zzz"'),
        ({}, "messages is missing"),
        ({"dataframe_records": []}, "dataframe_records is not supported"),
        ({"messages": HELLO, "model": "other"}, "model is not the endpoint's name"),
        ({"messages": HELLO, "extra_params": {"top_k": 3}}, "extra_params must be"),
        ({"messages": HELLO, "extra_params": {"top_k": "many"}}, "top_k is a string"),
        ({"messages": HELLO, "client_request_id": 5}, "client_request_id is 5"),
        ({"messages": HELLO, "usage_context": "x"}, "usage_context is a string"),
    ],
)
def test_refusals(server: Running, fields: dict[str, Any], message: str) -> None:
    with server.http() as http:
        assert message in check_error(http.post(INVOKE, json=fields), 400, "BAD_REQUEST")


def test_refusals_of_the_gate_and_of_the_engine_have_the_envelope(serve: Serve) -> None:
    server = serve("a=key-a", max_body_bytes=1000)
    chat = {"messages": HELLO}
    with server.http() as http:
        keyless = http.post(INVOKE, json=chat, headers={"authorization": "Bearer no"})
        check_error(keyless, 401, "UNAUTHENTICATED")
        check_error(http.post(INVOKE, json={"prompt": "x" * 1000}), 413, "BAD_REQUEST")
        check_error(http.get(INVOKE), 405, "BAD_REQUEST")
        check_error(http.get("/api/2.0/clusters"), 404, "RESOURCE_DOES_NOT_EXIST")
        server.llm.enqueue("x", then=EngineDied("the engine died"))
        check_error(http.post(INVOKE, json=chat), 500, "INTERNAL_ERROR")
        server.llm.die()
        check_error(http.post(INVOKE, json=chat), 503, "TEMPORARILY_UNAVAILABLE")
        [endpoint] = http.get("/serving-endpoints").json()["endpoints"]
        assert endpoint["state"]["ready"] == "NOT_READY"
