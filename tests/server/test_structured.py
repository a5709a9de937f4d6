"""``response_format``, vLLM's fields and forced calls over HTTP; what the model was asked to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from anaphora.constraints import Constraint
from anaphora.fake import FakeLLM
from tests.server.running import HELLO, Running, check_error, serving
from tests.server.test_tools import TOOL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "function", "function": {"name": "time", "description": "Now"}}


def schema_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def post(http: httpx.Client, path: str = CHAT, **fields: Any) -> httpx.Response:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return http.post(path, json={"model": "fake", "max_tokens": 5, **start, **fields})


def asked(server: Running) -> Constraint:
    constraint = server.llm.requests[-1].params.constraint
    assert constraint is not None
    return constraint


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": schema_format()}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": schema_format(strict=True)}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": schema_format(strict=False)}, "json_schema", json.dumps(SCHEMA)),
        ({"response_format": schema_format(None)}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", '["a", "é"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "[a-c]"}, "regex", "[a-c]"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_what_the_engine_is_asked_for(
    shared: Running, http: httpx.Client, path: str, fields: dict[str, Any], kind: str, text: str
) -> None:
    response = post(http, path, **fields)
    assert response.status_code == 200, response.text
    assert (asked(shared).kind, asked(shared).text) == (kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None, "disable_fallback": True}},
        {"guided_json": None, "guided_choice": None},
    ],
)
def test_what_asks_for_nothing(shared: Running, http: httpx.Client, fields: dict[str, Any]) -> None:
    assert post(http, **fields).status_code == 200
    assert shared.llm.requests[-1].params.constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": schema_format(strict="no")}, "response_format.json_schema.strict"),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"$ref": "#"})}, "response_format.json_schema"),
        (
            {"response_format": schema_format({"type": "array", "contains": {}})},
            "response_format.json_schema",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs.nonsense"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"guided_choice": [5]}, "guided_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = check_error(post(http, stream=stream, **fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_both_fields_are_named(http: httpx.Client) -> None:
    response = post(http, guided_regex="a", response_format={"type": "json_object"})
    message = check_error(response, 400)["message"]
    assert "response_format" in message
    assert "guided_regex" in message


@pytest.mark.parametrize("text", ['{"items":' * 200_000 + "{}" + "}" * 200_000, "[" * 10**6])
def test_deep_json_is_refused(http: httpx.Client, text: str) -> None:
    body = f'{{"model": "fake", "messages": [], "guided_json": {text}}}'
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    check_error(response, 400)
    check_error(post(http, guided_json=text), 400)


class Step(BaseModel):
    explanation: str
    output: str | None


class Answer(BaseModel):
    steps: list[Step]
    final: int


def test_parse_with_pydantic(shared: Running) -> None:
    text = '{"steps": [{"explanation": "x", "output": null}], "final": 5}'
    shared.llm.enqueue(text)
    with shared.openai() as client:
        answer = client.chat.completions.parse(
            model="fake",
            messages=HELLO,  # type: ignore[arg-type]
            response_format=Answer,
        )
    parsed = answer.choices[0].message.parsed
    assert parsed == Answer(steps=[Step(explanation="x", output=None)], final=5)
    schema = json.loads(asked(shared).text)
    assert schema["$defs"]["Step"]["required"] == ["explanation", "output"]


@pytest.fixture(scope="module", params=["text", "llama3", "harmony"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving() as serve:
        yield serve(llm=FakeLLM(output_format=request.param))


class TestForcedCalls:
    @pytest.mark.parametrize(
        ("choice", "names", "reason"),
        [
            ("required", ["weather", "time"], "tool_calls"),
            ({"type": "function", "function": {"name": "weather"}}, ["weather"], "stop"),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                },
                ["weather"],
                "tool_calls",
            ),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_grammar_and_the_answer(
        self, server: Running, choice: Any, names: list[str], reason: str, stream: bool
    ) -> None:
        template = server.llm.chat_template
        assert template is not None
        call = '{"name": "weather", "parameters": {"city": "Bern"}}'
        if template.output_format == "harmony":
            call = '<|channel|>commentary to=functions.weather<|message|>{"city": "Bern"}<|call|>'
        server.llm.enqueue(call, parse_special=True)
        with server.openai() as client:
            create: Any = client.chat.completions.create
            fields = {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
            answer = create(model="fake", messages=HELLO, stream=stream, **fields)
            if stream:
                chunks = list(answer)
                calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
                name = calls[0].function.name
                arguments = "".join(c.function.arguments or "" for c in calls)
                end = chunks[-1].choices[0].finish_reason
            else:
                [found] = answer.choices[0].message.tool_calls
                name, arguments = found.function.name, found.function.arguments
                end = answer.choices[0].finish_reason
        assert (name, json.loads(arguments), end) == ("weather", {"city": "Bern"}, reason)
        assert asked(server).kind == "composed"
        grammar = json.loads(asked(server).text)
        assert len(grammar["grammars"]) == 1 + len(names)
        assert ("weather" in str(grammar), "time" in str(grammar)) == (True, "time" in names)
        ids = server.llm.requests[-1].prompt_token_ids
        assert "time" in server.llm.tokenizer.decode(ids)  # the prompt is the same for all choices

    def test_auto_is_free(self, server: Running) -> None:
        with server.http() as http:
            assert post(http, tools=[TOOL, OTHER]).status_code == 200
        assert server.llm.requests[-1].params.constraint is None

    def test_a_format_and_tools(self, server: Running) -> None:
        with server.http() as http:
            response = post(http, tools=[TOOL], response_format=schema_format())
        assert response.status_code == 200, response.text
        grammars = json.loads(asked(server).text)["grammars"]
        assert len(grammars) == 3
        assert grammars[2]["name"] == "content"

    def test_a_format_alone(self, server: Running) -> None:
        with server.http() as http:
            assert post(http, response_format=schema_format()).status_code == 200
        template = server.llm.chat_template
        assert template is not None
        is_framed = template.output_format == "harmony"  # its reasoning stays free
        assert (asked(server).kind == "composed") == is_framed

    def test_allowed_tools_leave_others_out(self, server: Running) -> None:
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        with server.http() as http:
            assert post(http, tools=[TOOL, OTHER], tool_choice=choice).status_code == 200
        params = server.llm.requests[-1].params
        assert params.tool_names == ("time",)
        assert (params.constraint is not None) == (params.output_format == "harmony")


def test_tools_as_text_are_the_same_bytes_each_time(shared: Running, http: httpx.Client) -> None:
    system = {"role": "system", "content": "You help."}
    prompts = []
    for question in ("one", "two"):
        messages = [system, {"role": "user", "content": question}]
        tool = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}  # type: ignore[attr-defined]
        assert post(http, messages=messages, tools=[TOOL if question == "one" else tool]).is_success
        ids = shared.llm.requests[-1].prompt_token_ids
        prompts.append(shared.llm.tokenizer.decode(ids, skip_special_tokens=False))
    head, _, _ = prompts[0].partition("one<|im_end|>")
    assert prompts[1].startswith(head)
    assert "You help.\n\nYou may call one of these functions:\n{" in head
    assert '"name": "weather"' in head


def test_calls_and_results_as_text(shared: Running, http: httpx.Client) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "21 °C"},
        {"role": "tool", "tool_call_id": "2", "content": "22 °C"},
    ]
    assert post(http, messages=messages, tools=[TOOL]).is_success
    ids = shared.llm.requests[-1].prompt_token_ids
    prompt = shared.llm.tokenizer.decode(ids, skip_special_tokens=False)
    written = '{"name": "weather", "parameters": {"city": "Bern"}}'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>" in prompt
    results = "Result of the call:\n21 °C\n\nResult of the call:\n22 °C"
    assert f"<|im_start|>user\n{results}<|im_end|>" in prompt
