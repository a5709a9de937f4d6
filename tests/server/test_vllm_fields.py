"""vLLM's smaller fields: token ids in answers, prompts cut, lists of tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.running import HELLO, Running
from tests.server.test_chat import stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    response = http.post(path, json={"model": "fake", "max_tokens": 3, **start, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_token_ids_of_a_chat(shared: Running, http: httpx.Client) -> None:
    body = post(http, CHAT, return_token_ids=True, n=2)
    assert body["prompt_token_ids"] == shared.llm.requests[-1].prompt_token_ids
    assert [choice["token_ids"] for choice in body["choices"]] == [[*b"You"]] * 2
    chunks = stream(http, return_token_ids=True, max_tokens=3)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids", ())]
    assert ids == [*b"You"]


def test_token_ids_of_completions(http: httpx.Client) -> None:
    body = post(http, COMPLETIONS, prompt=["a", "b"], return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[256, 97], [256, 98]]
    assert [choice["token_ids"] for choice in body["choices"]] == [[*b"You"]] * 2
    chunks = stream(http, COMPLETIONS, prompt="a", return_token_ids=True, max_tokens=3)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == [256, 97]
    assert [i for choice in choices for i in choice["token_ids"]] == [*b"You"]


def test_without_the_field_there_are_none(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        assert "token_ids" not in str(post(http, path))


def test_tokens_as_ids(http: httpx.Client) -> None:
    fields = {"return_tokens_as_token_ids": True}
    [choice] = post(http, CHAT, logprobs=True, top_logprobs=1, **fields)["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:89", [89])
    assert first["top_logprobs"][0]["token"] == "token_id:89"
    [choice] = post(http, COMPLETIONS, logprobs=1, **fields)["choices"]
    assert choice["logprobs"]["tokens"][0] == "token_id:89"
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["token_id:89"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [*b"llo"]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [256, *b"he"]),
        ({"truncate_prompt_tokens": 99}, [256, *b"hello"]),
        ({"truncate_prompt_tokens": -1}, [256, *b"hello"]),
    ],
)
def test_a_prompt_is_cut(
    shared: Running, http: httpx.Client, fields: dict[str, Any], expected: list[int]
) -> None:
    body = post(http, COMPLETIONS, echo=True, **fields)
    assert shared.llm.requests[-1].prompt_token_ids == expected
    text = shared.llm.tokenizer.decode(expected)
    assert body["choices"][0]["text"] == text + "You"
    assert body["usage"]["prompt_tokens"] == len(expected)


def test_a_prompt_is_cut_to_what_fits(shared: Running, http: httpx.Client) -> None:
    post(http, COMPLETIONS, prompt="x" * 5000, truncate_prompt_tokens=-1)
    assert len(shared.llm.requests[-1].prompt_token_ids) == shared.llm.info.max_model_len - 3
    post(http, CHAT, truncate_prompt_tokens=5)
    assert len(shared.llm.requests[-1].prompt_token_ids) == 5


def test_lists_of_tokens_reach_the_engine(shared: Running, http: httpx.Client) -> None:
    post(http, CHAT, allowed_token_ids=[5, 6], bad_words=["ab", " c"])
    params = shared.llm.requests[-1].params
    assert params.allowed_token_ids == (5, 6)
    assert params.bad_token_ids == ((*b"ab",), (*b" ab",), (*b"c",), (*b" c",))
