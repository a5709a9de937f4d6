"""Frameworks above the clients: LangChain and LiteLLM, as their users call them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from tests.server.running import HELLO, Running, serving

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched when it is imported
import litellm

pytestmark = pytest.mark.usefixtures("let_go_of_sockets")


LONG = "Why is the sky blue, and why is it red in the evening?"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as serve:
        yield serve("a=key-a")


@pytest.mark.parametrize("use_responses_api", [False, True])
class TestLangChain:
    def model(self, server: Running, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="key-a",  # type: ignore[arg-type]
            model="fake",
            max_retries=0,
            stream_usage=True,
            **options,
        )

    def test_invoke_counts_what_was_cached(self, server: Running, use_responses_api: bool) -> None:
        model = self.model(server, use_responses_api=use_responses_api)
        for _ in range(2):
            answer = model.invoke(LONG)
        assert answer.text == f"You said: {LONG}"
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] > 32
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    def test_stream(self, server: Running, use_responses_api: bool) -> None:
        model = self.model(server, use_responses_api=use_responses_api)
        chunks = list(model.stream("hello"))
        assert "".join(chunk.text for chunk in chunks) == "You said: hello"
        [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert usage["output_tokens"] == 16
        assert "cache_read" in usage["input_token_details"]


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("openai/fake", "/v1"),
        ("hosted_vllm/fake", "/v1"),
        ("anthropic/fake", ""),
        ("databricks/fake", "/serving-endpoints"),
    ],
)
class TestLiteLLM:
    def complete(self, server: Running, model: str, base: str, **fields: Any) -> Any:
        return litellm.completion(
            model=model,
            api_base=server.url + base,
            api_key="key-a",
            messages=HELLO,
            max_tokens=30,
            num_retries=0,
            **fields,
        )

    def test_whole(self, server: Running, model: str, base: str) -> None:
        for _ in range(2):
            answer = self.complete(server, model, base)
        assert answer.choices[0].message.content == "You said: hello"
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        # Anthropic's counts are additive, and LiteLLM makes OpenAI's of them
        assert (usage.prompt_tokens, usage.completion_tokens) == (25, 16)
        assert usage.prompt_tokens_details.cached_tokens == 16

    def test_stream(self, server: Running, model: str, base: str) -> None:
        chunks = list(self.complete(server, model, base, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "You said: hello"

    def test_errors_are_its_own(self, server: Running, model: str, base: str) -> None:
        with pytest.raises(litellm.exceptions.NotFoundError):
            self.complete(server, model.replace("fake", "other"), base)
