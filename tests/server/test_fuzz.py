"""No body, however odd, may end in a 5xx or in an error without the envelope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from anaphora.fake import FakeLLM
from anaphora.server.adapter_schemas import LoadAdapterRequest, UnloadAdapterRequest
from anaphora.server.anthropic_schemas import MessagesRequest
from anaphora.server.cache_schemas import PinRequest, PurgeRequest
from anaphora.server.envelope import dialect_of
from anaphora.server.fields import UNSUPPORTED
from anaphora.server.responses_schemas import ResponsesRequest
from anaphora.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.server.running import Running, serving

SCHEMAS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/serving-endpoints/fake/invocations": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/cache/pins": PinRequest,
    "/cache/purge": PurgeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
ENVELOPES = {
    "openai": {"error"},
    "anthropic": {"type", "error", "request_id"},
    "databricks": {"error_code", "message"},
}
GOOD: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "tokens": [1],
    "max_tokens": 2,
    "scope": "prefix",
    "lora_name": "x",
    "lora_path": "/x",
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "fake", "user", "text", "é\0", "<|im_end|>"])
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 300).map(str), inner, max_size=3)
    ),
    max_leaves=6,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]) | scalars},
    optional={
        "arguments": st.sampled_from(['{"a": 1}', "{}", "[", ""]) | values,
        "description": values,
        "parameters": values,
    },
)
calls = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}))
marks = st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": scalars})
blocks = st.lists(
    st.fixed_dictionaries(
        {
            "type": scalars
            | st.sampled_from(
                [
                    *("text", "tool_use", "tool_result", "thinking", "input_text", "output_text"),
                    *("function_call", "function_call_output", "reasoning", "message"),
                ]
            )
        },
        optional={
            "text": st.text(max_size=5),
            "role": st.sampled_from(["user", "assistant"]),
            "name": st.sampled_from(["f", "g"]),
            "content": st.text(max_size=5) | values,
            "output": st.text(max_size=5) | values,
            "input": st.dictionaries(st.text(max_size=3), values, max_size=2) | values,
            "arguments": st.sampled_from(['{"a": 1}', "[", ""]),
            "cache_control": marks | values,
            **dict.fromkeys(["id", "call_id", "tool_use_id"], st.just("i") | scalars),
        },
    ),
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | scalars,
            "content": st.text(max_size=5) | blocks | values,
            "name": values,
            "tool_calls": values | calls,
            "reasoning_content": values,
        },
    ),
    max_size=3,
)
KNOWN = {
    "messages": messages,
    "tools": calls,
    "input": st.text(max_size=5) | blocks,
    "system": blocks,
    "cache_control": marks,
    "stream": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(SCHEMAS)))
    names = sorted({*SCHEMAS[path].model_fields, *UNSUPPORTED, "unknown"})
    body = {name: GOOD[name] for name in SCHEMAS[path].model_fields if name in GOOD}
    if path == "/cache/purge":
        body["scope"] = draw(st.sampled_from(["all", "tenant", "adapter", "prefix"]) | values)
    if path in ("/tokenize", "/cache/pins", "/cache/purge"):
        body.pop(draw(st.sampled_from(["prompt", "messages"])))
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        body[name] = draw(KNOWN.get(name, values))
    return path, body


def check(response: httpx.Response) -> None:
    assert "the server failed" not in response.text  # at the end of a stream
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        assert set(response.json()) == ENVELOPES[dialect_of(response.url.path)], response.text


# the server is shared by all examples on purpose: it keeps no state that could matter
quick = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def fuzzed(shared: Running) -> Any:
    with shared.http() as http:
        yield http


@quick
@given(requests())
@example(("/v1/completions", {**GOOD, "seed": -(2**63), "stream": True}))
@example(("/v1/completions", {**GOOD, "seed": 2**64 - 1, "logit_bias": {"5": 1e-320}}))
def test_odd_values_in_good_bodies(fuzzed: httpx.Client, request: tuple[str, Any]) -> None:
    path, body = request
    check(fuzzed.post(path, json=body))


@pytest.fixture(scope="module", params=["harmony", "llama3"])
def calling(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with serving() as serve, serve(llm=FakeLLM(output_format=request.param)).http() as http:
        yield http


@quick
@given(requests())
def test_odd_values_for_models_that_call_tools(
    calling: httpx.Client, request: tuple[str, Any]
) -> None:
    path, body = request
    check(calling.post(path, json=body))


@quick
@given(st.sampled_from(sorted(SCHEMAS)), values)
def test_any_json(fuzzed: httpx.Client, path: str, body: Any) -> None:
    check(fuzzed.post(path, json=body))


@quick
@given(st.sampled_from(sorted(SCHEMAS)), st.binary(max_size=40))
def test_any_bytes(fuzzed: httpx.Client, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    check(fuzzed.post(path, content=content, headers=headers))
