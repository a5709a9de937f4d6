"""Many requests through one client: in process, at a URL, and what goes wrong there."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anaphora import LLM, FakeLLM, SamplingParams
from anaphora.batch import client as client_module
from anaphora.batch.client import Client, Reply
from anaphora.errors import ConfigError, EngineUnavailable

CHAT = "/v1/chat/completions"


def body(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": 8, "temperature": 0, **more}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=1024, kv_cache_memory=2**26) as found:
        yield found


def test_an_llm_answers_rows_as_it_answers_chats(llm: LLM) -> None:
    texts = [f"Tell me about the number {i}." for i in range(12)]
    with Client(llm) as client:
        replies = client.complete([body(text) for text in texts])
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = [llm.chat([{"role": "user", "content": text}], params).text for text in texts]
    assert [reply.text for reply in replies] == expected
    assert all(reply.status == 200 and reply.finish_reason == "length" for reply in replies)


def test_a_bad_row_fails_alone(llm: LLM) -> None:
    rows = [body("one"), body("word " * 3000), {"messages": 3}, body("two", temperature=9)]
    with Client(llm) as client:
        good, long, wrong, hot = client.complete(rows)
    assert good.error is None
    assert long.status == 400
    assert long.error is not None
    assert "1024 tokens" in long.error
    assert wrong.error == "messages is 3; it must be an array"
    assert hot.error is not None
    assert "temperature" in hot.error


def test_equal_rows_are_computed_once_at_temperature_0_alone() -> None:
    fake = FakeLLM()
    with Client(fake) as client:
        done: list[Reply] = []
        replies = client.complete([body("a"), body("b"), body("a"), body("a")], on_done=done.append)
        assert len(fake.requests) == 2
        assert replies[0] == replies[2] == replies[3] != replies[1]
        assert len(done) == 4
        client.complete([body("a", temperature=1), body("a", temperature=1)])
        assert len(fake.requests) == 4
        client.complete([body("a"), body("a")], is_planned=False)
        assert len(fake.requests) == 6


def test_rows_that_begin_alike_run_side_by_side() -> None:
    fake = FakeLLM()
    heads = ["left " * 20, "right " * 20, "middle " * 20]
    with Client(fake, concurrency=1) as client:
        client.complete([body(f"{heads[i % 3]} {i}") for i in range(30)])
    prompts = [fake.tokenizer.decode(request.prompt_token_ids) for request in fake.requests]
    found = [next(h for h in heads if h in prompt) for prompt in prompts]
    changes = sum(a != b for a, b in itertools.pairwise(found))
    assert changes == 2


def test_requests_are_taken_only_as_they_fit(llm: LLM) -> None:
    taken = 0

    def rows() -> Iterator[tuple[int, str, dict[str, Any]]]:
        nonlocal taken
        for taken in range(1, 101):
            yield taken, CHAT, body(f"row {taken}", max_tokens=1)

    with Client(llm, concurrency=4) as client:
        replies = client.run(rows())
        for count, _ in enumerate(replies, start=1):
            assert taken <= count + 4
        assert taken == 100
        next(client.run(rows()))  # the rest is given up
        assert client.complete([body("and on")])[0].error is None


def test_several_threads_use_one_client(llm: LLM) -> None:
    answers: dict[int, list[str]] = {}

    def work(number: int) -> None:
        rows = [body(f"thread {number} row {i}", max_tokens=2) for i in range(8)]
        answers[number] = [reply.text for reply in client.complete(rows)]

    with Client(llm) as client:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        text = llm.generate("meanwhile", SamplingParams(max_tokens=2, temperature=0))[0].text
        for thread in threads:
            thread.join()
        again = [body(f"thread 1 row {i}", max_tokens=2) for i in range(8)]
        assert [reply.text for reply in client.complete(again)] == answers[1]
    assert len(answers) == 3
    assert text


def test_closing_a_client_ends_what_others_wait_for() -> None:
    client = Client(FakeLLM(token_delay=0.05))
    caught: list[BaseException] = []

    def work() -> None:
        try:
            client.complete([body(f"row {i}") for i in range(50)])
        except EngineUnavailable as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    client.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert "was closed while it worked" in str(caught[0])


@pytest.mark.usefixtures("_quick")
def test_a_row_that_kills_the_engine_takes_no_other_with_it() -> None:
    class Fragile(FakeLLM):
        """Loses its engine with a certain row, and has another one a moment later."""

        def generate(self, prompt_token_ids: Any, params: Any, **more: Any) -> Any:
            found = super().generate(prompt_token_ids, params, **more)
            is_poison = b"poison" in bytes(i for i in prompt_token_ids if i < 256)
            return self._dying(found) if is_poison else found

        async def _dying(self, found: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
            async with contextlib.aclosing(found):
                async for delta in found:
                    self.die()
                    self.recover()
                    yield delta

    llm = Fragile(token_delay=0.002)
    rows = [body("poison" if i == 7 else f"row {i}") for i in range(30)]
    with Client(llm) as client:
        replies = client.complete(rows)
    failed = [index for index, reply in enumerate(replies) if reply.error is not None]
    assert failed == [7]
    assert replies[7].status == 500


def test_the_order_of_a_schemas_properties_is_part_of_a_request() -> None:
    llm = FakeLLM()
    schemas = [{"a": {"type": "string"}, "b": {}}, {"b": {}, "a": {"type": "string"}}]
    with Client(llm) as client:
        client.complete(
            [
                body("x", structured_outputs={"json": {"type": "object", "properties": one}})
                for one in schemas
            ]
        )
    assert len(llm.requests) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stream": True}, "stream has no meaning"),
        ({"temperature": float("nan")}, "cannot be written as JSON"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid JSON"),
    ],
)
def test_a_request_that_cannot_be_sent_fails_alone(more: dict[str, Any], said: str) -> None:
    with Client(FakeLLM()) as client:
        good, bad = client.complete([body("x"), body("y", **more)])
    assert good.error is None
    assert bad.status == 400
    assert said in str(bad.error)


@pytest.mark.parametrize("key", ["sk-SECRET\r", "sk-S\u00e9CRET", "sk-SE CRET\x00", ""])
def test_no_error_shows_a_key(key: str) -> None:
    with _Server([GOOD]) as server:
        if key.strip() == "sk-SECRET":  # what is around it is cut off
            Client(server.url, api_key=key).close()
            return
        with pytest.raises(ConfigError) as caught:
            Client(server.url, api_key=key)
    assert "CRET" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Client("http://me:PASSW@127.0.0.1:9/v1")
    assert "PASSW" not in str(caught.value)


class _Server:
    """Answers from a list of (status, headers, body); the last one again and again."""

    def __init__(self, answers: list[tuple[int, dict[str, str], str]]) -> None:
        self.num_posts = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"connection": "close"}, '{"data": [{"id": "m"}]}')

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                answer = answers[min(outer.num_posts, len(answers) - 1)]
                outer.num_posts += 1
                self._send(*answer)

            def _send(self, status: int, headers: dict[str, str], content: str) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content.encode())

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever)

    def __enter__(self) -> _Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


GOOD = (200, {}, '{"choices": [{"message": {"content": "yes"}}]}')


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("answers", "num_posts", "status", "said"),
    [
        ([(503, {}, "{}"), (429, {"retry-after": "0.01"}, "{}"), GOOD], 3, 200, None),
        ([(500, {}, '{"error": {"message": "boom"}}')], 5, 500, "boom"),
        ([(502, {}, "<html>bad gateway"), GOOD], 2, 200, None),
        ([(200, {}, "<html>hello")], 5, 502, "the answer is not OpenAI's: '<html>hello'"),
        ([(200, {}, '{"error": {"message": "over quota"}}')], 1, 200, "over quota"),
        ([(200, {}, "{}")], 1, 200, "no choices"),
        ([(200, {}, '{"choices": [5]}')], 5, 502, "not OpenAI's"),
        ([(200, {}, '{"choices": [{"finish_reason": 7}]}')], 5, 502, "not OpenAI's"),
        ([(200, {}, '{"usage": {"prompt_tokens": "x"}}')], 5, 502, "not OpenAI's"),
        ([(200, {}, "[" * 3000)], 5, 502, "not OpenAI's"),
        ([(503, {"retry-after": "nan"}, "{}"), GOOD], 2, 200, None),
        ([(404, {}, '{"error": {"message": "no such model"}}')], 1, 404, "no such model"),
    ],
)
def test_what_a_server_does_is_tried_again_if_that_can_help(
    answers: list[tuple[int, dict[str, str], str]], num_posts: int, status: int, said: str | None
) -> None:
    with _Server(answers) as server, Client(server.url) as client:
        assert client.model == "m"
        [reply] = client.complete([body("row")])
        assert server.num_posts == num_posts
    assert reply.status == status
    assert (reply.error is None) if said is None else (said in str(reply.error))


@pytest.mark.usefixtures("_quick")
def test_a_server_that_is_gone_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PATIENCE_SECONDS", 0.2)
    with _Server([GOOD]) as server:
        client = Client(server.url)
    with client, pytest.raises(EngineUnavailable, match="has answered nothing for"):
        client.complete([body("row")])


@pytest.mark.parametrize(
    ("target", "more", "said"),
    [
        ("http://127.0.0.1:9/v1", {}, "nobody answers at"),
        ("http://", {}, "URL|nobody"),
        (7, {}, "target is a int"),
        (FakeLLM(), {"model": "other"}, "use fake"),
        (FakeLLM(), {"api_key": "secret"}, "no URL"),
    ],
)
def test_a_target_that_cannot_be_used_is_named(target: Any, more: Any, said: str) -> None:
    with pytest.raises((ConfigError, EngineUnavailable), match=said) as caught:
        Client(target, **more)
    assert "secret" not in str(caught.value)
