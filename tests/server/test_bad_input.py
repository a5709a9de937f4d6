from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from anaphora.server.fields import ACCEPTED_WITHOUT_EFFECT, UNSUPPORTED
from anaphora.server.schemas import ChatRequest, CompletionRequest
from tests.server.running import HELLO, Serve, check_error

CANARY = "canary-5f1d"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    return http.post(path, json={"model": "fake", **prompt, **fields})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"messages": CANARY}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [CANARY]}, "messages[0]"),
    ({"messages": [{"content": CANARY}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": CANARY, "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": user(None)}, "messages[0].content"),
    ({"messages": user(5)}, "messages[0].content"),
    ({"messages": user({"text": CANARY})}, "messages[0].content"),
    ({"messages": user([CANARY])}, "messages[0].content[0]"),
    ({"messages": user([{"text": CANARY}])}, "messages[0].content[0].type"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0]"),
    ({"messages": user([{"type": "text", "text": 5}])}, "messages[0].content[0].text"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot" + CANARY}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [CANARY, 5]}, "stop[1]"),
    ({"stop": ["x"] * 10**5}, "stop"),
    ({"stop": "x" * 10**5}, "stop"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {CANARY: 1}}, "logit_bias"),
    ({"logit_bias": {"5": CANARY}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"0" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(10**5)}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"prompt_cache_key": "x" * 10**4}, "prompt_cache_key"),
    ({"cache_diagnostics": "yes"}, "cache_diagnostics"),
    ({"cache_diagnostics": 1}, "cache_diagnostics"),
    ({"service_tier": CANARY}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": CANARY}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [{**HELLO[0], "extra": json.loads("[" * 100 + "]" * 100)}]}, "messages"),
]
UNSUPPORTED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": CANARY}]}, "tools[0].type"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"structured_outputs": {"structural_tag": CANARY}}, "structured_outputs.structural_tag"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content", "content": CANARY}}, "prediction"),
    ({"store": True}, "store"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": CANARY}, "chat_template"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"echo": True}, "echo"),
    ({"priority": False}, "priority"),
    (
        {"messages": user([{"type": "image_url", "image_url": {"url": CANARY}}])},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "function", "content": CANARY}]}, "messages[0].role"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": CANARY}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [CANARY, 5]}, "prompt[1]"),
    ({"prompt": [1, CANARY]}, "prompt[1]"),
    ({"prompt": [0, True]}, "prompt[1]"),
    ({"prompt": [CANARY, [5]]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1, 1.5]]}, "prompt[0][1]"),
    ({"prompt": [[1], [2, True]]}, "prompt[1][1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 32}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logprobs": True}, "logprobs"),
]
UNSUPPORTED_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"suffix": CANARY}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"prompt_embeds": CANARY}, "prompt_embeds"),
]


def cases(*groups: tuple[str, list[tuple[dict[str, Any], str]]]) -> list[Any]:
    return [
        pytest.param(path, fields, param, id=f"{path.split('/')[2]}-{param}-{number}")
        for path, group in groups
        for number, (fields, param) in enumerate(group)
    ]


@pytest.mark.parametrize(
    ("path", "fields", "param"), cases((CHAT, WRONG_CHATS), (COMPLETIONS, WRONG_COMPLETIONS))
)
def test_wrong_values_name_the_field(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    response = post(http, path, **fields)
    error = check_error(response, 400)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert CANARY not in response.text
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    cases((CHAT, UNSUPPORTED_CHATS), (COMPLETIONS, UNSUPPORTED_COMPLETIONS)),
)
def test_what_is_not_built_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    response = post(http, path, **fields)
    error = check_error(response, 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert CANARY not in response.text


def test_every_refused_field_accepts_its_neutral_values(http: httpx.Client) -> None:
    for field, values in UNSUPPORTED.items():
        for value in values:
            response = post(http, CHAT, max_tokens=1, **{field: value})
            assert response.status_code == 200, (field, value, response.text)


def test_no_field_is_in_two_tables() -> None:
    declared = set(ChatRequest.model_fields)
    # refused where the model's format has no calls
    assert declared & set(UNSUPPORTED) == {"tools", "tool_choice"}
    assert not declared & set(ACCEPTED_WITHOUT_EFFECT)
    # completions declare a few that are refused in chats
    shared = {"echo", "best_of", "suffix", "add_special_tokens"}
    assert set(CompletionRequest.model_fields) & set(UNSUPPORTED) == shared


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/cache/pins", "/cache/purge"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"a": NaN,}',
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "fake", "prompt": "\\ud800", "messages": []}',
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
    ],
    ids=range(12),
)
def test_broken_json_is_a_400(http: httpx.Client, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    check_error(http.post(path, content=content, headers=headers), 400)


def test_the_bodys_type_must_be_json(http: httpx.Client) -> None:
    content = json.dumps({"model": "fake", "messages": HELLO})
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": media_type}
        error = check_error(http.post(CHAT, content=content, headers=headers), 415)
        assert "application/json" in error["message"]
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(CHAT, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_a_404(http: httpx.Client, path: str) -> None:
    error = check_error(post(http, path, model=CANARY), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert CANARY in error["message"]
    assert "use fake" in error["message"]
    assert len(check_error(post(http, path, model="x" * 10**5), 404)["message"]) < 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": user("x" * 5000)}, "messages"),
        (CHAT, {"messages": user("x" * 5000), "stream": True}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": [[97], [97] * 5000]}, "prompt"),
        (COMPLETIONS, {"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_a_prompt_beyond_the_context_says_so(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = check_error(post(http, path, **fields), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_tokenize_and_detokenize_check_their_bodies(http: httpx.Client) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ):
        assert check_error(http.post(path, json=body), 400)["param"] == param
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        check_error(http.post(path, json={"model": "none", **body}), 404)


def test_unknown_routes_and_methods_have_the_envelope(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/chat/completions/", "/v2/models", "/%00", "/..%2f"):
        check_error(http.get(path), 404)
    for method, path in (("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", "/v1/models/fake")):
        response = http.request(method, path)
        assert "not allowed" in check_error(response, 405)["message"]
        assert response.headers["allow"]
    assert http.post("/health").status_code == 405


def test_bodies_over_the_limit_are_refused(serve: Serve) -> None:
    limit = 100_000
    fits = json.dumps({"model": "fake", "messages": HELLO, "user": "x" * (limit - 200)}).encode()
    headers = {"content-type": "application/json"}

    def in_chunks(size: int) -> Iterator[bytes]:
        for _ in range(size // 1000):
            yield b"x" * 1000

    with serve(max_body_bytes=limit).http() as http:
        assert http.post(CHAT, content=fits, headers=headers).status_code == 200
        for content in (b"x" * (limit + 1), in_chunks(limit + 1000), in_chunks(3 * limit)):
            error = check_error(http.post(CHAT, content=content, headers=headers), 413)
            assert str(limit) in error["message"]


def test_a_body_that_does_not_come_is_given_up(serve: Serve) -> None:
    server = serve(body_timeout=0.05)
    with server.connect() as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_huge_headers_are_refused(serve: Serve) -> None:
    server = serve()
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        answer = b""
        sock.settimeout(0.01)
        deadline = time.monotonic() + 10
        while not answer and time.monotonic() < deadline:
            try:
                sock.sendall(b"x-filler: " + b"y" * 8000 + b"\r\n")
                answer = sock.recv(1000)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (CHAT, {"messages": HELLO * 5000}, "messages", None),
        (
            CHAT,
            {"messages": user([{"type": "text", "text": ""}] * 5000)},
            "messages[0].content",
            None,
        ),
        (CHAT, {"messages": user("x" * 500_000)}, "messages", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x" * 500_000}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [5] * 500_000}, "prompt", "context_length_exceeded"),
        (CHAT, {"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias", None),
        (CHAT, {"logit_bias": {"1": 1, "01": 2}}, "logit_bias", None),
        (CHAT, {"seed": 10**400}, "seed", None),
        ("/tokenize", {"prompt": "x" * 500_000}, "prompt", "context_length_exceeded"),
        ("/detokenize", {"tokens": [5] * 500_000}, "tokens", "context_length_exceeded"),
    ],
)
def test_what_is_too_much_is_refused_before_the_work(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, code: str | None
) -> None:
    response = http.post(
        path, json={"model": "fake", **({"messages": HELLO} if path == CHAT else {}), **fields}
    )
    error = check_error(response, 400)
    assert (error["param"], error["code"]) == (param, code)
    assert len(error["message"]) < 500


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = check_error(http.post(CHAT, content=b"{}", headers=headers), 415)
    assert "without an encoding" in error["message"]


def test_unknown_fields_do_not_stay_in_memory() -> None:
    body = {"model": "m", "messages": HELLO, "zzz": [[]] * 100}
    assert not ChatRequest.model_validate(body).model_extra
