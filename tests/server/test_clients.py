"""Clients that leave, that do not read, and engines that die, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

import httpx
import openai
import pytest

from anaphora.fake import FakeLLM
from tests.server.running import HELLO, Running, Serve, wait_until

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 100_000, "ignore_eos": True}


def slow_llm() -> FakeLLM:
    return FakeLLM(token_delay=0.005, max_model_len=200_000)


def bodies() -> list[Any]:
    chat = {"model": "fake", "messages": HELLO, **LONG}
    raw = {"model": "fake", **LONG}
    return [
        pytest.param(CHAT, chat, id="chat"),
        pytest.param(CHAT, {**chat, "stream": True, "n": 2}, id="chat-stream"),
        pytest.param("/v1/completions", {**raw, "prompt": ["a", "b"]}, id="completions"),
        pytest.param("/v1/completions", {**raw, "prompt": ["a", "b"], "stream": True}, id="stream"),
    ]


@pytest.mark.parametrize("is_rude", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(("path", "body"), bodies())
def test_a_client_that_leaves_is_aborted_within_a_second(
    serve: Serve, path: str, body: dict[str, Any], is_rude: bool
) -> None:
    server = serve(llm=slow_llm())
    sock = server.send(path, body)
    num_prompts = len(body.get("prompt", [1]))
    wait_until(lambda: server.llm.stats().num_running == num_prompts)
    if is_rude:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left = time.monotonic()
    sock.close()
    wait_until(lambda: server.llm.stats().num_running == 0)
    assert time.monotonic() - left < 1
    assert len(server.llm.aborted) == num_prompts
    assert len(set(server.llm.aborted)) == num_prompts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/responses", "/serving-endpoints/fake/invocations"]
)
def test_in_every_dialect(serve: Serve, path: str, stream: bool) -> None:
    server = serve(llm=slow_llm())
    server.llm.enqueue("x" * 100_000)
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 100_000}
    if path == "/v1/responses":
        body = {"input": "hello"}
    sock = server.send(path, {"model": "fake", **body, "stream": stream})
    wait_until(lambda: server.llm.stats().num_running == 1)
    sock.close()
    wait_until(lambda: server.llm.stats().num_running == 0)
    assert len(server.llm.aborted) == 1


def test_a_client_that_leaves_before_the_first_token_is_aborted(serve: Serve) -> None:
    server = serve(llm=FakeLLM(token_delay=3600))
    for stream in (True, False):
        sock = server.send(CHAT, {"model": "fake", "messages": HELLO, "stream": stream})
        wait_until(lambda: server.llm.stats().num_running == 1)
        sock.close()
        wait_until(lambda: server.llm.stats().num_running == 0)
    assert len(server.llm.aborted) == 2
    with server.http() as http:
        assert f'{{route="{CHAT}",status="499"}} 2.0' in http.get("/metrics").text


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(serve: Serve) -> None:
    server = serve()
    for num_bytes in range(0, 120, 7):
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 50\r\n\r\n" + "{" * 50
        )
        with server.connect() as sock:
            sock.sendall(head.encode()[:num_bytes])
    with server.http() as http:
        assert http.get("/health").status_code == 200
    assert not server.llm.requests


def test_an_sdk_stream_that_is_closed_is_aborted(serve: Serve) -> None:
    server = serve(llm=slow_llm())
    with server.openai() as sdk:
        messages: Any = HELLO
        with sdk.chat.completions.create(
            model="fake", messages=messages, stream=True, max_tokens=1000, extra_body=LONG
        ) as stream:
            next(iter(stream))
    wait_until(lambda: len(server.llm.aborted) == 1)


def test_a_reader_that_does_not_read_stalls_nobody(serve: Serve) -> None:
    llm = FakeLLM(max_model_len=300_000)
    server = serve(llm=llm)
    sleepy = server.send(
        CHAT, {"model": "fake", "messages": HELLO, "stream": True, **LONG, "logprobs": True}
    )
    wait_until(lambda: llm.stats().num_computed_tokens > 2000)

    async def ask_all() -> list[str | None]:
        async with server.async_openai() as sdk:
            messages: Any = HELLO
            answers = await asyncio.gather(
                *(sdk.chat.completions.create(model="fake", messages=messages) for _ in range(20))
            )
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_all()) == ["You said: hello"] * 20
    # what was not read did not pile up either: the stream waits for its reader
    wait_until(lambda: is_still(llm))
    assert llm.stats().num_running == 1
    sleepy.close()
    wait_until(lambda: llm.stats().num_running == 0)


def is_still(llm: FakeLLM) -> bool:
    before = llm.stats().num_computed_tokens
    time.sleep(0.1)
    return llm.stats().num_computed_tokens == before


def test_when_the_engine_dies_everyone_is_told(serve: Serve) -> None:
    server = serve(llm=slow_llm())
    whole = server.send(CHAT, {"model": "fake", "messages": HELLO, **LONG})
    streamed = server.send(CHAT, {"model": "fake", "messages": HELLO, "stream": True, **LONG})
    wait_until(lambda: server.llm.stats().num_computed_tokens > 100)
    server.llm.die()
    assert read_all(whole).startswith(b"HTTP/1.1 500 ")
    answer = read_all(streamed)
    assert answer.startswith(b"HTTP/1.1 200 ")
    error = json.loads(answer.split(b"data: ")[-1].split(b"\n")[0])["error"]
    assert "died" in error["message"]
    with server.openai() as sdk:
        with pytest.raises(openai.InternalServerError) as caught:
            sdk.completions.create(model="fake", prompt="a")
        assert caught.value.status_code == 503
        server.llm.recover()
        assert sdk.completions.create(model="fake", prompt="a").choices[0].text == "You said: a"
    assert server.llm.stats().num_engine_restarts == 1


def read_all(sock: socket.socket) -> bytes:
    """The answer up to its end; the server keeps the connection open."""
    data = b""
    with sock:
        while not (data.endswith(b"0\r\n\r\n") or b"content-length" in data):
            chunk = sock.recv(65536)
            assert chunk, data
            data += chunk
    return data


def test_small_writes_are_sent_at_once(shared: Running) -> None:
    """Without TCP_NODELAY each answer took 40 ms: the client delays what the server waits for."""
    with shared.http() as http:
        http.get("/health")
        durations = []
        for _ in range(20):
            started = time.perf_counter()
            http.get("/health")
            durations.append(time.perf_counter() - started)
    assert min(durations) < 0.035


def test_a_stream_arrives_token_by_token(serve: Serve) -> None:
    server = serve(llm=FakeLLM(token_delay=0.02))
    body = {"model": "fake", "messages": HELLO, "stream": True}
    with server.http() as http, http.stream("POST", CHAT, json=body) as response:
        num_arrivals = sum(1 for _ in response.iter_raw())
    assert num_arrivals >= 10


def test_requests_share_one_connection(serve: Serve) -> None:
    server = serve()
    limits = httpx.Limits(max_connections=1)
    with server.http(limits=limits) as http:
        for stream in (True, False, True):
            body = {"model": "fake", "messages": HELLO, "stream": stream}
            assert http.post(CHAT, json=body).status_code == 200
            assert http.get("/nowhere").status_code == 404


def test_shutting_down_lets_running_requests_end(serve: Serve) -> None:
    server = serve(llm=FakeLLM(token_delay=0.02))
    body = {"model": "fake", "messages": HELLO, "stream": True}
    with server.http() as http, http.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.shut_down()
        wait_until(lambda: not is_listening(server))
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert not server.llm.aborted


def is_listening(server: Running) -> bool:
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return False
    return True
