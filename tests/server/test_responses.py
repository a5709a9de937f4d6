"""The Responses API, with the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from anaphora.errors import EngineDied, UnknownResponse
from anaphora.fake import FakeLLM
from anaphora.server.response_store import ResponseStore
from tests.server.running import Running, Serve, check_error, serving
from tests.server.test_tools import ARGUMENTS, HARMONY_ANSWER, HARMONY_CALL, enqueue, prompt

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def harmony() -> Iterator[Running]:
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format="harmony"))


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(PATH, json={"model": "fake", "input": "hello", **fields})


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    text = post(http, stream=True, **fields).text
    blocks = [block.split("\n") for block in text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_has_openais_shape(http: httpx.Client) -> None:
    body = post(http, metadata={"a": "b"}, temperature=0, prompt_cache_key="k").json()
    [item] = body["output"]
    assert body["id"].startswith("resp_")
    assert item["content"] == [
        {"type": "output_text", "text": "You said: hello", "annotations": [], "logprobs": []}
    ]
    assert (body["status"], item["status"], item["role"]) == ("completed",) * 2 + ("assistant",)
    assert body["metadata"] == {"a": "b"}
    assert (body["temperature"], body["top_p"], body["prompt_cache_key"]) == (0, 1, "k")
    assert body["usage"] == {
        "input_tokens": 25,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 16},
        "output_tokens": 16,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 41,
    }


def test_every_shape_of_input(harmony: Running) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Zürich?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    enqueue(harmony, HARMONY_ANSWER)
    with harmony.openai() as client:
        answer = client.responses.create(
            model="fake", input=items, tools=[TOOL], reasoning={"effort": "low"}
        )
    assert answer.output_text == "It is sunny ☀."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    shown = prompt(harmony)
    parts = ("Reasoning: low", "Be brief.", "Zürich?", ARGUMENTS, "sunny", '"weather"')
    assert all(part in shown for part in parts)


@pytest.mark.parametrize(
    ("script", "kinds"),
    [(HARMONY_ANSWER, ["reasoning", "message"]), (HARMONY_CALL, ["reasoning", "function_call"])],
)
def test_the_sdks_stream_helper_adds_up_to_the_answer(
    harmony: Running, script: str, kinds: list[str]
) -> None:
    enqueue(harmony, script)
    enqueue(harmony, script)
    fields: Any = {"model": "fake", "input": "Zürich?", "tools": [TOOL]}
    with harmony.openai() as client:
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as events:
            final = events.get_final_response()
    assert [item.type for item in whole.output] == [item.type for item in final.output] == kinds
    assert final.output_text == whole.output_text
    if kinds[-1] == "function_call":
        assert final.output[-1].arguments == ARGUMENTS  # type: ignore[union-attr]


def test_all_events_in_order(harmony: Running) -> None:
    with harmony.http() as http:
        enqueue(harmony, HARMONY_CALL)
        call = [event["type"] for event in stream(http, tools=[TOOL])]
        enqueue(harmony, HARMONY_ANSWER)
        events = stream(http)
    unique = list(dict.fromkeys(event["type"] for event in events))
    in_item = ["output_item.added", "content_part.added"]
    assert unique == [
        f"response.{name}"
        for name in [
            *("created", "in_progress", *in_item, "reasoning_text.delta", "reasoning_text.done"),
            *("content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
            "completed",
        ]
    ]
    assert call[-4:] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    for index in (0, 1):  # what was delivered piece by piece is what is there at the end
        pieces = [e for e in events if e.get("output_index") == index and "delta" in e]
        item = events[-1]["response"]["output"][index]
        assert "".join(e["delta"] for e in pieces) == item["content"][0]["text"]
        assert {e["item_id"] for e in pieces} == {item["id"]}


def test_a_cut_answer_is_incomplete(http: httpx.Client) -> None:
    body = post(http, max_output_tokens=3).json()
    assert (body["status"], body["output"][0]["status"]) == ("incomplete",) * 2
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream(http, max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_has_an_empty_message(serve: Serve) -> None:
    server = serve()
    server.llm.enqueue("")
    with server.openai() as client:
        answer = client.responses.create(model="fake", input="hello")
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


def test_a_chain_hits_the_cache_and_its_counts_grow(serve: Serve) -> None:
    with serve().openai() as client:
        cached, previous = [], openai.omit
        for question in ("Why is the sky blue?", "And in the evening?", "And at night?"):
            answer = client.responses.create(
                model="fake",
                input=question,
                instructions="You are a patient teacher. " * 3,
                previous_response_id=previous,  # type: ignore[arg-type]
            )
            previous = answer.id  # type: ignore[assignment]
            assert answer.usage is not None
            details = answer.usage.input_tokens_details
            assert details.cached_tokens + details.cache_write_tokens <= answer.usage.input_tokens
            cached.append(details.cached_tokens)
    assert cached[0] == 0
    assert cached[0] < cached[1] < cached[2]


def test_a_chain_goes_on_after_a_call(harmony: Running) -> None:
    enqueue(harmony, HARMONY_CALL)
    enqueue(harmony, HARMONY_ANSWER)
    with harmony.openai() as client:
        first = client.responses.create(model="fake", input="Zürich?", tools=[TOOL])
        call: Any = first.output[-1]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        client.responses.create(
            model="fake", input=[output], tools=[TOOL], previous_response_id=first.id
        )
    shown = prompt(harmony)
    assert all(part in shown for part in ("Zürich?", ARGUMENTS, "sunny", "They want the weather"))


def test_instructions_are_not_carried_over(serve: Serve) -> None:
    server = serve()
    with server.openai() as client:
        first = client.responses.create(model="fake", input="a", instructions="secret rule")
        client.responses.create(model="fake", input="b", previous_response_id=first.id)
    assert "secret rule" not in prompt(server)


def test_stored_responses_are_the_tenants_own(serve: Serve) -> None:
    server = serve("a=key-a", "b=key-b", admin_key="root")
    with server.openai("key-a") as mine, server.openai("key-b") as theirs:
        kept = mine.responses.create(model="fake", input="hello")
        again = mine.responses.retrieve(kept.id)
        assert (again.output, again.usage) == (kept.output, kept.usage)
        dropped = mine.responses.create(model="fake", input="hello", store=False)
        for client, response_id in ((theirs, kept.id), (mine, dropped.id), (mine, "resp_x")):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                client.responses.retrieve(response_id)
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                client.responses.create(model="fake", input="x", previous_response_id=response_id)
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(response_id)
        mine.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            mine.responses.retrieve(kept.id)


def test_streams_are_stored_and_a_purge_forgets(serve: Serve) -> None:
    server = serve("a=key-a")
    with server.http() as http:
        response_id = stream(http)[-1]["response"]["id"]
        assert http.get(f"{PATH}/{response_id}").json()["status"] == "completed"
        http.post("/cache/purge", json={"scope": "tenant"}).raise_for_status()
        error = check_error(http.get(f"{PATH}/{response_id}"), 404)
    assert error["code"] == "response_not_found"


def test_the_store_is_bounded_in_time_and_bytes() -> None:
    now = 0.0
    one = {"id": "0", "x": "y" * 100}
    size = len(json.dumps(one, separators=(",", ":"))) + 2
    store = ResponseStore(
        seconds=10, max_bytes_of_tenant=3 * size, max_bytes=4 * size, clock=lambda: now
    )
    for number in range(5):
        store.add("a", {**one, "id": str(number)}, [])
    assert store.num_bytes == 3 * size
    assert store.messages("a", "4") == b"[]"
    for gone in ("0", "1"):
        with pytest.raises(UnknownResponse):
            store.body("a", gone)
    for number in range(2):  # the largest tenant gives way
        store.add("b", {**one, "id": str(number)}, [])
    assert store.num_bytes == 4 * size
    assert store.body("b", "0")
    store.add("c", {"id": "big", "x": "y" * 1000}, [])
    with pytest.raises(UnknownResponse):
        store.body("c", "big")
    now = 10
    with pytest.raises(UnknownResponse):
        store.body("b", "1")
    store.add("d", one, [])
    assert store.num_bytes == size


def test_input_tokens_are_those_of_the_answer(harmony: Running) -> None:
    enqueue(harmony, HARMONY_ANSWER)
    with harmony.openai() as client:
        fields: Any = {"model": "fake", "input": "hello", "instructions": "x", "tools": [TOOL]}
        counted = client.responses.input_tokens.count(**fields)
        answer = client.responses.create(**fields)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    assert counted.object == "response.input_tokens"


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
    ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [5]}, "tools[0]", None),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options",
     "unsupported_parameter"),
    ({"input": 5}, "input", None),
    ({"input": []}, "input", None),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"role": "user"}]}, "input[0].content", None),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "c"}]},
     "input[1].name", None),
    ({"input": "x" * 5000}, "input", "context_length_exceeded"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"temperature": 3}, "temperature", None),
    ({"metadata": {"k": "v" * 513}}, "metadata", None),
    ({"text": {"format": 5}}, "text.format", None),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}},
     "text.format.schema", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_refusals_name_the_field_as_it_was_sent(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str | None
) -> None:
    error = check_error(post(http, **fields), 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert param.split("[")[0] in error["message"] or code == "context_length_exceeded"


def test_an_engine_that_dies_fails_the_response(serve: Serve) -> None:
    server = serve()
    server.llm.enqueue("half", then=EngineDied("the engine died"))
    with server.http() as http:
        last = stream(http)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert "died" in last["response"]["error"]["message"]
        server.llm.enqueue("", then=EngineDied("the engine died"))
        assert post(http).status_code == 500
        server.llm.enqueue("half", then=ValueError("canary"))
        last = stream(http)[-1]
    assert (last["type"], last["code"], last["param"]) == ("error", None, None)
    assert "canary" not in last["message"]
