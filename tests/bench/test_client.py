"""The client against servers that do well and servers that do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from anaphora.bench.client import Answer, connect
from anaphora.errors import MeasurementError
from anaphora.fake import FakeLLM
from tests.server.running import serving

PROMPT = list(range(100, 140))
MODELS = b'{"object": "list", "data": [{"id": "m"}]}'
TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def scripted(
    answer: bytes, *, models: bytes = MODELS, status: int = 200
) -> AsyncIterator[str]:
    """A server that says ``answer`` to every completion and then hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_list = head.startswith(b"GET")
        code, body = (200, models) if is_list else (status, answer)
        # a stream without a length, so that hanging up early is seen as such
        length = b"transfer-encoding: chunked\r\n"
        parts = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        end = b"" if answer.endswith(TOKEN) and not is_list else b"0\r\n\r\n"
        writer.write(b"HTTP/1.1 %d X\r\n%sconnection: close\r\n\r\n" % (code, length))
        writer.write(parts + end)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def ask(answer: bytes, **options: Any) -> Answer:
    async def run() -> Answer:
        async with scripted(answer, **options) as url, connect(url) as client:
            return await client.complete(PROMPT, 2)

    return asyncio.run(run())


def test_an_answer_and_its_times() -> None:
    answer = ask(TOKEN + LAST + USAGE + DONE)
    assert (answer.num_prompt_tokens, answer.num_tokens, answer.num_cached_tokens) == (40, 2, None)
    assert len(answer.events) == 2
    assert answer.start < answer.events[0] <= answer.end
    assert answer.ttft > 0
    assert ask((TOKEN + LAST + USAGE).replace(b"\n", b"\r\n")).num_tokens == 2


@pytest.mark.parametrize(
    ("answer", "options", "words"),
    [
        (b'{"error": "out of order"}', {"status": 500}, ["status 500", "out of order"]),
        (b"", {"status": 503}, ["status 503", "empty body"]),
        (b"<html>hello</html>", {}, ["not a stream of events", "<html>"]),
        (b"", {}, ["not a stream of events", "empty body"]),
        (b"data: {nonsense\n\n", {}, ["an event cannot be read"]),
        (TOKEN, {}, ["RemoteProtocolError"]),
        (TOKEN + DONE, {}, ["ended without finish_reason"]),
        (LAST + DONE, {}, ["ended without usage"]),
        (TOKEN + b'data: {"error": {"message": "lost"}}\n\n', {}, ["the stream says", "lost"]),
    ],
)
def test_what_goes_wrong_is_named(answer: bytes, options: Any, words: list[str]) -> None:
    with pytest.raises(MeasurementError) as caught:
        ask(answer, **options)
    for word in ("POST http://127.0.0.1:", "/v1/completions", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("models", "word"),
    [(b"<html>", "not a list of models"), (b"{}", "data"), (b'{"data": []}', "the list is empty")],
)
def test_a_list_of_models_that_is_none(models: bytes, word: str) -> None:
    with pytest.raises(MeasurementError, match=word):
        ask(DONE, models=models)


def test_nobody_listens() -> None:
    async def run() -> None:
        async with scripted(DONE) as url:
            pass
        async with connect(url):
            pass

    with pytest.raises(MeasurementError, match=r"GET http://127\.0\.0\.1:\d+/v1/models: Connect"):
        asyncio.run(run())


def test_our_server_tells_what_it_is_and_what_was_cached() -> None:
    async def run(url: str) -> None:
        async with connect(url, model="fake", api_key="k") as client:  # /v1 is understood
            assert client.model == "fake"
            assert client.vocab_size == 260
            assert client.info is not None
            assert client.info.kernels == "none"
            assert (await client.complete(PROMPT, 3)).num_cached_tokens == 0
            assert (await client.complete(PROMPT, 3)).num_cached_tokens == 32
        with pytest.raises(MeasurementError, match=r"no model 'gpt', only fake"):
            async with connect(url, model="gpt", api_key="k"):
                pass
        with pytest.raises(MeasurementError, match="status 401"):
            async with connect(url):
                pass

    with serving() as serve:
        asyncio.run(run(serve("k", llm=FakeLLM()).url))


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:99999", "http://", "ftp://127.0.0.1/v1", "x", ""]
)
def test_a_url_that_is_none_is_named(url):
    async def run():
        async with connect(url):
            pass

    with pytest.raises(MeasurementError, match="--url is"):
        asyncio.run(run())


def test_a_model_list_with_odd_sizes_is_an_error():
    models = b'{"data": [{"id": "m", "meta": {"n_vocab": "many"}}]}'

    async def run():
        async with scripted(LAST, models=models) as url, connect(url):
            pass

    with pytest.raises(MeasurementError, match="not a list of models"):
        asyncio.run(run())
