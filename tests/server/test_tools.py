"""Calls of tools and reasoning over HTTP, with the real client."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest

from anaphora.fake import FakeLLM
from anaphora.types import OutputFormat
from tests.server.running import HELLO, Running, check_error, serving
from tests.server.test_chat import chat, stream

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
ARGUMENTS = '{"city": "Zürich"}'
ANALYSIS = "<|channel|>analysis<|message|>They want the weather. 🌦<|end|><|start|>assistant"
HARMONY_CALL = (
    ANALYSIS
    + "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    + f"{ARGUMENTS}<|call|>"
)
HARMONY_ANSWER = ANALYSIS + "<|channel|>final<|message|>It is sunny ☀.<|return|>"
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>'
TEXT_CALL = LLAMA_CALL.removesuffix("<|eot_id|>")
CALLS: dict[OutputFormat, str] = {
    "harmony": HARMONY_CALL,
    "llama3": LLAMA_CALL,
    "text": TEXT_CALL,
}


@pytest.fixture(scope="module", params=CALLS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A model of each format."""
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format=request.param))


@pytest.fixture(scope="module")
def harmony() -> Iterator[Running]:
    with serving() as serve:
        llm = FakeLLM(output_format="harmony", chat_date=datetime.date(2026, 1, 2))
        yield serve(llm=llm)


@pytest.fixture(scope="module")
def llama() -> Iterator[Running]:
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format="llama3"))


def output_format(server: Running) -> OutputFormat:
    assert server.llm.chat_template is not None
    return server.llm.chat_template.output_format


def enqueue(server: Running, script: str) -> None:
    server.llm.enqueue(script, parse_special=True)


def prompt(server: Running) -> str:
    """What the model was shown last."""
    ids = server.llm.requests[-1].prompt_token_ids
    return server.llm.tokenizer.decode(ids, skip_special_tokens=False)


class TestCalls:
    def test_whole(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        with server.openai() as client:
            answer = client.chat.completions.create(
                model="fake",
                messages=HELLO,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                tool_choice="auto",
                parallel_tool_calls=True,
            )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert call.id.startswith("call_")
        assert '"weather"' in prompt(server)

    def test_stream(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        with server.openai() as client:
            chunks = list(
                client.chat.completions.create(
                    model="fake",
                    messages=HELLO,  # type: ignore[arg-type]
                    tools=[TOOL],  # type: ignore[list-item]
                    stream=True,
                )
            )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.index for call in calls] == [0] * len(calls)
        assert (calls[0].id or "").startswith("call_")
        assert [call.id for call in calls[1:]] == [None] * (len(calls) - 1)
        functions = [call.function for call in calls if call.function is not None]
        assert [function.name for function in functions if function.name] == ["weather"]
        assert "".join(function.arguments or "" for function in functions) == ARGUMENTS
        assert "".join(delta.content or "" for delta in deltas) == ""
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    def test_the_sdks_own_accumulation(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        tool = {**TOOL, "function": {**TOOL["function"], "strict": False}}  # type: ignore[dict-item]
        with (
            server.openai() as client,
            client.chat.completions.stream(
                model="fake",
                messages=HELLO,  # type: ignore[arg-type]
                tools=[tool],  # type: ignore[list-item]
            ) as events,
        ):
            final = events.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.arguments == ARGUMENTS

    def test_a_round_trip(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        with server.openai() as client:
            messages: list[Any] = list(HELLO)
            first = client.chat.completions.create(
                model="fake",
                messages=messages,
                tools=[TOOL],  # type: ignore[list-item]
            )
            message = first.choices[0].message
            assert message.tool_calls is not None
            messages.append(message.model_dump(exclude_none=True))
            messages.append(
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 °C"}
            )
            second = client.chat.completions.create(
                model="fake",
                messages=messages,
                tools=[TOOL],  # type: ignore[list-item]
            )
        assert second.choices[0].message.content is not None
        assert second.choices[0].finish_reason == "stop"
        shown = prompt(server)
        assert ARGUMENTS in shown
        assert "21 °C" in shown
        if output_format(server) == "harmony":
            assert "<|channel|>analysis<|message|>They want the weather. 🌦<|end|>" in shown

    def test_the_choice_none_shows_no_tools(self, server: Running) -> None:
        with server.http() as http:
            chat(http, tools=[TOOL], tool_choice="none")
        assert "weather" not in prompt(server)

    def test_two_choices(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        with server.http() as http:
            body = chat(http, tools=[TOOL], n=2)
        ids = set()
        for choice in body["choices"]:
            [call] = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
            ids.add(call["id"])
        assert len(ids) == 2

    def test_tokenize_counts_tools(self, server: Running) -> None:
        enqueue(server, CALLS[output_format(server)])
        with server.http() as http:
            usage = chat(http, tools=[TOOL])["usage"]
            body = {"messages": HELLO, "tools": [TOOL]}
            assert http.post("/tokenize", json=body).json()["count"] == usage["prompt_tokens"]

    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"tool_choice": "required"}, "tool_choice", None),
            (
                {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
                "tool_choice",
                None,
            ),
            ({"tool_choice": ["auto"]}, "tool_choice", None),
            ({"tool_choice": "any"}, "tool_choice", None),
            ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "unsupported_parameter"),
            (
                {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
                "tool_choice",
                None,
            ),
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", None),
            (
                {
                    "tools": [TOOL],
                    "tool_choice": "required",
                    "messages": [*HELLO, {"role": "assistant", "content": "It is"}],
                    "continue_final_message": True,
                },
                "tool_choice",
                None,
            ),
            (
                {
                    "tools": [
                        {
                            "type": "function",
                            "function": {"name": "a", "parameters": {"type": "array"}},
                        }
                    ],
                    "tool_choice": "required",
                },
                "tools[0].function.parameters",
                None,
            ),
            ({"tools": {}}, "tools", None),
            ({"tools": [TOOL] * 129}, "tools", None),
            ({"tools": [TOOL, TOOL]}, "tools", None),
            ({"tools": [5]}, "tools[0]", None),
            ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
            ({"tools": [{"type": "function"}]}, "tools[0].function", None),
            (
                {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                "tools[0].function.name",
                None,
            ),
            (
                {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
                "tools[0].function.parameters",
                None,
            ),
            (
                {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
                "messages[0].tool_calls",
                None,
            ),
            (
                {"messages": [{"role": "assistant", "content": None, "tool_calls": 5}]},
                "messages[0].tool_calls",
                None,
            ),
            (
                {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
                "messages[0].tool_calls[0].function.name",
                None,
            ),
            ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content", None),
            ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", None),
        ],
    )
    def test_bad_values_are_named(
        self, server: Running, fields: dict[str, Any], param: str, code: str | None
    ) -> None:
        with server.http() as http:
            response = http.post(PATH, json={"model": "fake", "messages": HELLO, **fields})
        error = check_error(response, 400)
        assert error["param"] == param
        assert code is None or error["code"] == code


class TestReasoning:
    def test_whole(self, harmony: Running) -> None:
        enqueue(harmony, HARMONY_ANSWER)
        with harmony.openai() as client:
            answer = client.chat.completions.create(model="fake", messages=HELLO)  # type: ignore[arg-type]
        message: Any = answer.choices[0].message
        assert message.content == "It is sunny ☀."
        assert message.reasoning_content == message.reasoning == "They want the weather. 🌦"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == len("They want the weather. 🌦".encode())

    def test_stream(self, harmony: Running) -> None:
        enqueue(harmony, HARMONY_ANSWER)
        with harmony.openai() as client:
            chunks = list(
                client.chat.completions.create(
                    model="fake",
                    messages=HELLO,  # type: ignore[arg-type]
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        deltas: list[Any] = [c.choices[0].delta for c in chunks if c.choices]
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        assert reasoning == "They want the weather. 🌦"
        assert "".join(delta.content or "" for delta in deltas) == "It is sunny ☀."
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == len(reasoning.encode())

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_cut_off_while_it_reasons(self, harmony: Running, is_stream: bool) -> None:
        enqueue(harmony, HARMONY_ANSWER)
        with harmony.http() as http:
            if is_stream:
                events = stream(http, max_tokens=20)
                deltas = [event["choices"][0]["delta"] for event in events]
                reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
                content = "".join(delta.get("content", "") for delta in deltas)
                reason = events[-1]["choices"][0]["finish_reason"]
            else:
                [choice] = chat(http, max_tokens=20)["choices"]
                reasoning, content = choice["message"]["reasoning"], choice["message"]["content"]
                reason = choice["finish_reason"]
        assert (reasoning, content, reason) == ("They want ", "", "length")

    def test_a_cut_call_keeps_its_reason(self, harmony: Running) -> None:
        enqueue(harmony, HARMONY_CALL)
        with harmony.http() as http:
            num_tokens = len(harmony.llm.tokenizer.encode(HARMONY_CALL, parse_special=True)) - 4
            [choice] = chat(http, tools=[TOOL], max_tokens=num_tokens)["choices"]
        assert choice["finish_reason"] == "length"
        assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])

    def test_stop_strings_and_logprobs_are_of_content(self, harmony: Running) -> None:
        enqueue(harmony, HARMONY_ANSWER)
        with harmony.http() as http:
            [choice] = chat(http, stop=["want", "sunny"], logprobs=True)["choices"]
        assert choice["message"]["content"] == "It is "
        assert choice["message"]["reasoning"] == "They want the weather. 🌦"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "sunny")
        tokens = [item["token"] for item in choice["logprobs"]["content"]]
        assert "".join(tokens) == "It is sunny"

    def test_logprobs_in_a_stream_belong_to_content(self, harmony: Running) -> None:
        enqueue(harmony, HARMONY_ANSWER)
        with harmony.http() as http:
            events = stream(http, logprobs=True)
        data = bytes(
            byte
            for event in events
            for choice in event["choices"]
            for item in (choice["logprobs"] or {}).get("content", ())
            for byte in item["bytes"]
        )
        assert data.decode() == "It is sunny ☀."

    def test_the_effort_and_the_date_are_in_the_prompt(self, harmony: Running) -> None:
        with harmony.http() as http:
            chat(http)
            assert "Reasoning: medium\nDate: 2026-01-02" in prompt(harmony)
            chat(http, reasoning_effort="high")
            assert "Reasoning: high\n" in prompt(harmony)
            response = http.post(
                PATH, json={"model": "fake", "messages": HELLO, "reasoning_effort": "none"}
            )
        assert check_error(response, 400)["param"] == "reasoning_effort"

    def test_where_no_template_reads_it_the_effort_changes_nothing(self, llama: Running) -> None:
        with llama.http() as http:
            chat(http, reasoning_effort="minimal")

    def test_earlier_reasoning_is_in_no_prompt(self, harmony: Running) -> None:
        said = {"role": "assistant", "content": "Fine.", "reasoning_content": "A secret."}
        with harmony.http() as http:
            chat(http, messages=[*HELLO, said, *HELLO])
        assert "secret" not in prompt(harmony)
        assert "<|channel|>final<|message|>Fine.<|end|>" in prompt(harmony)

    def test_reasoning_of_a_wrong_type_is_named(self, harmony: Running) -> None:
        call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
        said = {"role": "assistant", "content": "x", "tool_calls": [call], "reasoning": {"a": 1}}
        with harmony.http() as http:
            response = http.post(PATH, json={"model": "fake", "messages": [*HELLO, said]})
        assert check_error(response, 400)["param"] == "messages[1].reasoning"

    def test_a_continued_message_is_text(self, harmony: Running) -> None:
        enqueue(harmony, " and warm.<|return|>")
        messages = [*HELLO, {"role": "assistant", "content": "It is sunny"}]
        with harmony.http() as http:
            [choice] = chat(http, messages=messages, continue_final_message=True)["choices"]
        assert choice["message"]["content"] == " and warm."


class TestLlama:
    @pytest.mark.parametrize("script", ['{"name": "Ada", "age": 36}', "Sure.", '{"name": "wea'])
    def test_text_that_is_no_call(self, llama: Running, script: str) -> None:
        with llama.http() as http:
            enqueue(llama, script)
            [choice] = chat(http, tools=[TOOL])["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (script, "stop")
            assert "tool_calls" not in choice["message"]
            enqueue(llama, script)
            events = stream(http, tools=[TOOL])
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == script

    def test_without_tools_json_is_an_answer(self, llama: Running) -> None:
        enqueue(llama, LLAMA_CALL)
        with llama.http() as http:
            [choice] = chat(http)["choices"]
        assert json.loads(choice["message"]["content"])["name"] == "weather"
        assert choice["finish_reason"] == "stop"


def test_pins_render_tools(harmony: Running) -> None:
    system = [{"role": "system", "content": "You know the weather. " * 5}]
    with harmony.http() as http:
        pin = {"model": "fake", "messages": system, "tools": [TOOL]}
        response = http.post("/cache/pins", json=pin)
        assert response.status_code == 200, response.text
        pinned = response.json()["pinned_tokens"]
        usage = chat(http, messages=[*system, *HELLO], tools=[TOOL])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pinned > 100
