from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from anaphora.errors import EngineDied
from tests.server.running import Serve
from tests.server.test_chat import stream

PATH = "/v1/completions"


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"model": "fake", "prompt": "ab", **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def test_the_body_has_exactly_openais_shape(http: httpx.Client) -> None:
    body = complete(http)
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1.7e9
    assert body.pop("system_fingerprint").startswith("fp_")
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "text": "You said: ab",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 13,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_the_four_shapes_of_a_prompt(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, n=2, echo=True)
    expected = [text + "You said: " + text for text in texts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_a_stream_joins_to_the_whole_answer(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2, "logprobs": 1, "max_tokens": 4}
    whole = complete(http, **fields)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream(http, PATH, **fields, stream_options={"include_usage": True}):
        for new in chunk["choices"]:
            old = choices.setdefault(new["index"], {**new, "text": "", "logprobs": {}})
            old["text"] += new["text"]
            old["finish_reason"], old["stop_reason"] = new["finish_reason"], new["stop_reason"]
            for name, values in new["logprobs"].items():
                old["logprobs"].setdefault(name, []).extend(values)
    assert [choices[index] for index in range(4)] == whole["choices"]
    assert chunk["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    assert chunk["usage"]["prompt_tokens"] == 6


def test_echo_comes_first_in_a_stream(http: httpx.Client) -> None:
    chunks = stream(http, PATH, prompt="ab", echo=True, max_tokens=2)
    assert chunks[0]["choices"][0]["text"] == "abY"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abYo"


def test_logprobs_are_four_parallel_lists(serve: Serve) -> None:
    server = serve()
    server.llm.enqueue("aé!")
    with server.http() as http:
        logprobs = complete(http, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "<|end_of_text|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"][0] == -1 / 9
    assert logprobs["top_logprobs"][0] == {"a": -1 / 9, "b": -1 / 9 - 0.6931471805599453}
    assert len(logprobs["top_logprobs"]) == 5


def test_logprobs_zero_reports_the_chosen_token(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"Y": logprobs["token_logprobs"][0]}]


def test_sixteen_tokens_unless_asked(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        complete(http)
        complete(http, max_tokens=None)
        complete(http, max_tokens=3)
    assert [request.params.max_tokens for request in server.llm.requests] == [16, 16, 3]


def test_control_tokens_in_a_raw_prompt_count(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        complete(http, prompt="<|im_start|>a")
        complete(http, prompt="<|im_start|>a", add_special_tokens=False)
    prompts = [request.prompt_token_ids for request in server.llm.requests]
    assert prompts == [[256, 257, 97], [257, 97]]


def test_a_long_prompt_is_encoded_off_the_event_loop_alike(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        response = http.post(PATH, json={"model": "fake", "prompt": "x" * 5000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "5001 tokens" in response.json()["error"]["message"]


def test_one_lost_prompt_ends_the_request_and_aborts_the_others(serve: Serve) -> None:
    server = serve()
    server.llm.enqueue("a", then=EngineDied("the engine process died"))
    server.llm.enqueue("b" * 1000)
    with server.http() as http:
        body = {"model": "fake", "prompt": ["x", "y"], "max_tokens": 2000}
        assert http.post(PATH, json=body).status_code == 500
    assert server.llm.stats().num_running == 0
    assert len(server.llm.aborted) == 1


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(
    serve: Serve, is_stream: bool, max_tokens: int
) -> None:
    server = serve()
    fields = {"prompt": "aé", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    with server.http() as http:
        if is_stream:
            chunks = [c["choices"][0] for c in stream(http, PATH, **fields) if c["choices"]]
            text = "".join(chunk["text"] for chunk in chunks)
            logprobs: dict[str, Any] = {}
            for chunk in chunks:
                for name, values in chunk["logprobs"].items():
                    logprobs.setdefault(name, []).extend(values)
        else:
            body = complete(http, **fields)
            text, logprobs = body["choices"][0]["text"], body["choices"][0]["logprobs"]
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert body["usage"]["completion_tokens"] == max_tokens
    answer = "Y" * max_tokens
    assert text == f"aé{answer}"
    prompt = ["<|begin_of_text|>", "a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"] == [*prompt, *answer]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2][: 4 + max_tokens]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -1 / 9
    assert logprobs["top_logprobs"][1] == {"a": -1 / 9}
    assert all(len(values) == 4 + max_tokens for values in logprobs.values())


def test_what_an_evaluation_harness_sends(serve: Serve) -> None:
    server = serve()
    prompts = [[256, 97, 98, 99], [256, 97, 100]]
    with server.http() as http:
        body = complete(http, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        scores = choice["logprobs"]["token_logprobs"][1:-1]
        assert len(scores) == len(prompt) - 1
        assert all(score <= 0 for score in scores)


def test_prompt_logprobs_as_vllm_writes_them(http: httpx.Client) -> None:
    [choice] = complete(http, prompt="ab", prompt_logprobs=2, max_tokens=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["97"] == {
        "logprob": -1 / 9,
        "rank": 1,
        "decoded_token": "a",
    }
    assert len(choice["prompt_logprobs"]) == 3
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
    body = http.post("/v1/chat/completions", json=chat).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
