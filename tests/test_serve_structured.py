"""Structured output and tools of the default model, over a real ``anaphora serve``."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.running import wait_until
from tests.serving import TIMEOUT, serving

QUESTION: list[Any] = [{"role": "user", "content": "Invent a person who lives by a river."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


class River(BaseModel):
    name: str = Field(max_length=20)
    length: int = Field(ge=0, le=10_000)
    flows: Literal["north", "south", "east", "west"]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int | None
    rivers: list[River] = Field(max_length=2)


@pytest.fixture(scope="module")
def server(smollm2_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    arguments = [str(smollm2_path), "--served-model-name", "m", "--kv-cache-memory", "64MiB"]
    with serving(folder, *arguments) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai() as sdk:
        yield sdk


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="m", messages=QUESTION, response_format=Person, temperature=0, max_tokens=300
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


def test_choices_of_a_stream(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    stream = client.chat.completions.create(
        model="m",
        messages=QUESTION,
        n=3,
        seed=3,
        temperature=1.5,
        stream=True,
        max_tokens=200,
        extra_body={"structured_outputs": {"regex": r"[A-Z][a-z]{2,8} \d\d?"}},
    )
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    for text in texts:
        name, _, age = text.partition(" ")
        assert name.istitle()
        assert age.isdigit()


def test_cut_by_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=QUESTION,
        max_tokens=4,
        extra_body={"guided_json": {"type": "array", "minItems": 9}},
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_forced_calls(client: openai.OpenAI, choice: Any, reason: str) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "How is the weather in Bern, in celsius?"}],
        tools=TOOLS,
        tool_choice=choice,
        temperature=0,
        max_tokens=100,
    )
    assert answer.choices[0].finish_reason == reason
    assert answer.choices[0].message.tool_calls is not None
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function"
    schemas = {"weather": TOOLS[0]["function"]["parameters"], "now": {"maxProperties": 0}}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_hit_equals_a_miss(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model="m",
            messages=[{"role": "system", "content": "Invent people. " * 20}, *QUESTION],
            response_format={"type": "json_object"},
            temperature=0,
            max_tokens=30,
            logprobs=True,
            top_logprobs=2,
        )
        for _ in range(2)
    ]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]  # type: ignore[union-attr]
    assert cached[0] == 0 < (cached[1] or 0)
    first, second = (a.choices[0].model_dump() for a in answers)
    assert first == second


def test_a_bad_constraint_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot be followed"):
        client.chat.completions.create(
            model="m", messages=QUESTION, extra_body={"guided_regex": "(?=x)"}
        )


def test_a_fresh_engine_learns_the_vocabulary_too(server, client: openai.OpenAI) -> None:
    pid = server.engine_pid
    os.kill(pid, signal.SIGKILL)
    with server.http() as http:
        wait_until(
            lambda: server.engine_pid not in (None, pid) and http.get("/ready").is_success,
            seconds=TIMEOUT,
        )
    answer = client.chat.completions.create(
        model="m", messages=QUESTION, extra_body={"guided_choice": ["left", "right"]}
    )
    assert answer.choices[0].message.content in ("left", "right")
