"""Anthropic's Messages API, with the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from anaphora.errors import EngineDied, QuotaExceeded
from anaphora.fake import FakeLLM
from anaphora.server import marks
from anaphora.types import OutputFormat, PinPrefix
from tests.server.running import HELLO, Running, Serve, serving
from tests.server.test_tools import (
    CALLS,
    HARMONY_ANSWER,
    HARMONY_CALL,
    enqueue,
    output_format,
    prompt,
)

PATH = "/v1/messages"
MESSAGES: Any = HELLO
TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module", params=["harmony", "llama3"])
def calling(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format=request.param))


@pytest.fixture(scope="module")
def harmony() -> Iterator[Running]:
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format="harmony"))


def sdk(server: Running, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none"} | options
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=20, **options)


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(PATH, json={"model": "fake", "max_tokens": 40, "messages": HELLO, **fields})


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    blocks = [b.split("\n") for b in post(http, stream=True, **fields).text.split("\n\n")[:-1]]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in found]
    return found


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    """The message; the envelope must be exactly Anthropic's."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] != ""
    message: str = body["error"]["message"]
    return message


def test_a_text_has_anthropics_shape(http: httpx.Client) -> None:
    response = post(http, cache_salt="shape", metadata={"user_id": "u"}, service_tier="auto")
    body = response.json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "You said: hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 25,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 16,
            "service_tier": "standard",
        },
    }
    assert response.headers["x-anaphora-cache"].startswith("cached=0")


def test_system_and_contents_as_strings_or_blocks(serve: Serve) -> None:
    server = serve()
    block = {"type": "text", "text": "hello"}
    with sdk(server) as client:
        for system, content in (("rule", "hello"), ([{"type": "text", "text": "rule"}], [block])):
            client.messages.create(
                model="fake",
                max_tokens=3,
                system=system,  # type: ignore[arg-type]
                messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
            )
    one, other = [request.prompt_token_ids for request in server.llm.requests]
    assert one == other


def test_the_stream_helper_adds_up_to_the_answer(calling: Running) -> None:
    fields: Any = {"model": "fake", "max_tokens": 300, "messages": MESSAGES, "tools": [TOOL]}
    for _ in range(2):
        enqueue(calling, CALLS[output_format(calling)])
    with sdk(calling) as client:
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "tool_use"
    kinds = ["thinking", "tool_use"] if output_format(calling) == "harmony" else ["tool_use"]
    for message in (whole, final):
        assert [block.type for block in message.content] == kinds
        assert message.content[-1].input == {"city": "Zürich"}  # type: ignore[union-attr]
    assert whole.usage.output_tokens == final.usage.output_tokens


def test_a_tools_result_goes_back(calling: Running) -> None:
    enqueue(calling, CALLS[output_format(calling)])
    with sdk(calling) as client:
        first = client.messages.create(
            model="fake", max_tokens=300, messages=MESSAGES, tools=[TOOL]
        )
        call: Any = first.content[-1]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny ☀"}
        more: Any = {"type": "text", "text": "And tomorrow?"}
        history: Any = [
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, more]},
        ]
        client.messages.create(model="fake", max_tokens=3, messages=history, tools=[TOOL])
    shown = prompt(calling)
    parts = ["weather", "Zürich", "sunny ☀", "And tomorrow?"]
    parts += ["They want the weather"] if output_format(calling) == "harmony" else []
    positions = [shown.rindex(part) for part in parts[1:4]]
    assert all(part in shown for part in parts)
    assert positions == sorted(positions)


def test_all_events_in_order(harmony: Running) -> None:
    enqueue(harmony, HARMONY_ANSWER)
    with harmony.http() as http:
        found = events(http, max_tokens=300)
    kinds = list(dict.fromkeys((e["type"], e.get("delta", {}).get("type")) for e in found))
    assert kinds == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_delta", "text_delta"),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert [e["index"] for e in found if e["type"] == "content_block_start"] == [0, 1]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    start, end = found[0]["message"]["usage"], found[-2]["usage"]
    assert {**start, **end} == start | {"output_tokens": end["output_tokens"]}


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
)
def test_thinking_can_be_left_out(harmony: Running, thinking: dict[str, Any]) -> None:
    enqueue(harmony, HARMONY_ANSWER)
    with harmony.http() as http:
        body = post(http, max_tokens=300, thinking=thinking).json()
    assert [block["type"] for block in body["content"]] == ["text"]


def test_why_it_stopped(http: httpx.Client) -> None:
    stopped = post(http, stop_sequences=["hel", "zzz"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "hel")
    assert stopped["content"][0]["text"] == "You said: "
    assert post(http, max_tokens=3).json()["stop_reason"] == "max_tokens"


def test_a_last_assistant_turn_is_continued(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        post(http, messages=[*HELLO, {"role": "assistant", "content": "Well,"}]).raise_for_status()
    assert prompt(server).endswith("<|im_start|>assistant\nWell,")


def test_count_tokens_is_the_whole_prompt(calling: Running) -> None:
    enqueue(calling, CALLS[output_format(calling)])
    fields: Any = {"model": "fake", "messages": MESSAGES, "system": "s" * 40, "tools": [TOOL]}
    with sdk(calling) as client:
        counted = client.messages.count_tokens(**fields).input_tokens
        usage = client.messages.create(**fields, max_tokens=300).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


class TestMarks:
    def usage(self, http: httpx.Client, **fields: Any) -> tuple[int, int, int]:
        """Tokens that were new, written and read; they must add up."""
        usage = post(http, **fields).raise_for_status().json()["usage"]
        counts = (
            usage["input_tokens"],
            usage["cache_creation_input_tokens"],
            usage["cache_read_input_tokens"],
        )
        assert sum(usage["cache_creation"].values()) == counts[1]
        return counts

    def pins(self, http: httpx.Client) -> list[int]:
        return [pin["pinned_tokens"] for pin in http.get("/cache/pins").json()["data"]]

    def test_a_system_prompt_is_written_once_and_then_read(self, serve: Serve) -> None:
        with serve().http() as http:
            system = [{"type": "text", "text": "r" * 200, "cache_control": MARK}]
            first = self.usage(http, system=system)
            [pinned] = self.pins(http)
            assert 200 <= pinned <= 240
            assert pinned % 16 == 0
            assert first[1:] == (pinned, 0)
            other = [{"role": "user", "content": "something else"}]
            second = self.usage(http, system=system, messages=other)
            assert second[1] == 0
            assert second[2] >= pinned
            assert self.pins(http) == [pinned]

    def test_marks_on_tools_and_messages(self, calling: Running) -> None:
        with calling.http() as http:
            http.post("/cache/purge", json={"scope": "all"}).raise_for_status()
            for _ in range(2):
                enqueue(calling, CALLS[output_format(calling)])
            tool = {**TOOL, "description": "x" * 100, "cache_control": HOUR}
            text = {"type": "text", "text": "y" * 100, "cache_control": MARK}
            body = post(
                http, tools=[tool], messages=[{"role": "user", "content": [text]}]
            ).raise_for_status()
            created = body.json()["usage"]["cache_creation"]
            assert created["ephemeral_1h_input_tokens"] >= 96
            assert created["ephemeral_5m_input_tokens"] >= 96
            assert len(self.pins(http)) == 2

    def test_a_mark_for_the_whole_request(self, serve: Serve) -> None:
        with serve().http() as http:
            new, written, read = self.usage(http, cache_control=MARK, system="s" * 100)
        assert (read, written % 16) == (0, 0)
        assert written > 100
        assert new < 40

    def test_nothing_is_produced_for_no_tokens(self, serve: Serve) -> None:
        server = serve()
        system = [{"type": "text", "text": "r" * 200, "cache_control": MARK}]
        with server.http() as http:
            body = post(http, system=system, max_tokens=0).json()
            assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
            assert body["usage"]["output_tokens"] == 0
            assert body["usage"]["cache_creation_input_tokens"] > 200
            kinds = [event["type"] for event in events(http, system=system, max_tokens=0)]
        assert kinds == ["message_start", "ping", "message_delta", "message_stop"]

    def test_what_is_too_short_or_over_the_quota_is_silently_not_kept(self, serve: Serve) -> None:
        server = serve()
        with server.http() as http:
            short = [{"type": "text", "text": "r", "cache_control": MARK}]
            salted = {"cache_salt": "x", "messages": [{"role": "user", "content": short}]}
            assert post(http, **salted).status_code == 200

            async def refuse(command: Any) -> Any:
                assert isinstance(command, PinPrefix)
                raise QuotaExceeded("over the quota")

            server.llm.command = refuse  # type: ignore[method-assign]
            long = [{"type": "text", "text": "r" * 200, "cache_control": MARK}]
            assert self.usage(http, system=long)[1] == 0

    def test_a_prefix_has_one_pin_and_a_tenant_a_bounded_number(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(marks, "MAX_MARKS_OF_TENANT", 2)
        monkeypatch.setattr(marks, "_RENEWED_AFTER", -1)  # always renewed
        with serve().http() as http:
            for letter in "abca":
                for _ in range(2):
                    self.usage(http, cache_control=MARK, system=letter * 100)
                assert len(self.pins(http)) <= 2
            http.post("/cache/purge", json={"scope": "all"}).raise_for_status()
            assert self.pins(http) == []
            self.usage(http, cache_control=MARK, system="a" * 100)
            assert len(self.pins(http)) == 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"system": [{"type": "text", "text": "x", "cache_control": MARK}] * 5},
            {
                "system": [{"type": "text", "text": "x", "cache_control": MARK}],
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x", "cache_control": HOUR}],
                    }
                ],
            },
        ],
    )
    def test_too_many_or_in_the_wrong_order(
        self, http: httpx.Client, fields: dict[str, Any]
    ) -> None:
        assert "cache_control" in check_error(post(http, **fields), 400, "invalid_request_error")


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "cache_control": 5}]}, "tools[0].cache_control"),
        ({"tools": [{**TOOL, "cache_control": {"type": "x"}}]}, "tools[0].cache_control.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
         "output_config.format"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_as_it_was_sent(
    http: httpx.Client, fields: dict[str, Any], named: str
) -> None:
    message = check_error(post(http, **fields), 400, "invalid_request_error")
    assert named in message


def test_refusals_of_the_gate_and_of_the_engine_have_the_envelope(serve: Serve) -> None:
    server = serve("a=key-a", max_body_bytes=10_000)
    with sdk(server, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model="fake", max_tokens=3, messages=MESSAGES)
        assert refused.value.request_id
    with server.http() as http:
        check_error(post(http, system="x" * 10_000), 413, "request_too_large")
        check_error(http.get(PATH), 405, "invalid_request_error")
        check_error(http.post(f"{PATH}/batches"), 404, "not_found_error")
        assert "use fake" in check_error(post(http, model="no"), 404, "not_found_error")
        server.llm.enqueue("x", then=EngineDied("the engine died"))
        check_error(post(http), 500, "api_error")
        server.llm.enqueue("x", then=EngineDied("the engine died"))
        last = events(http)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        server.llm.die()
        response = post(http)
        check_error(response, 529, "overloaded_error")
        assert response.headers["retry-after"]


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_either_header_opens_every_route(serve: Serve, header: str) -> None:
    server = serve("a=key-a", "b=key-b")
    good = {header: "key-a" if header == "x-api-key" else "Bearer key-a"}
    other = {"authorization": "Bearer key-b", "x-api-key": "key-b"}
    with httpx.Client(base_url=server.url) as http:
        for path in ("/v1/models", "/load", "/api/2.0/serving-endpoints"):
            assert http.get(path, headers=good).status_code == 200
            both = {"x-api-key": "key-a", "authorization": "Bearer key-a"}
            assert http.get(path, headers=both).status_code == 200
            assert http.get(path, headers={**other, **good}).status_code == 401
            assert http.get(path, headers={"x-api-key": "Bearer key-a"}).status_code == 401


@pytest.mark.parametrize("kind", ["harmony", "llama3"])
def test_what_cannot_be_rendered_alone_is_not_kept(serve: Serve, kind: OutputFormat) -> None:
    """A marked call without its result, which some templates refuse: a hint may fail."""
    server = serve(llm=FakeLLM(output_format=kind))
    enqueue(server, HARMONY_CALL if kind == "harmony" else CALLS["llama3"])
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}, "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
    history = [*HELLO, {"role": "assistant", "content": [call]}, *user(result)["messages"]]
    with server.http() as http:
        assert post(http, messages=history, tools=[TOOL], max_tokens=300).status_code == 200
