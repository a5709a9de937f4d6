"""Runs OpenAI request bodies, many at a time: in this process through the server's own routes, or
against a server's URL. Blocking; the requests' order is the order in which they begin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import httpx
import msgspec

from anaphora.async_llm import AsyncLLM
from anaphora.batch.plan import text_key, token_key
from anaphora.config import EngineConfig
from anaphora.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestError
from anaphora.fake import FakeLLM
from anaphora.llm import LLM
from anaphora.server.app import create_app
from anaphora.server.internal import Answer, Internal, call
from anaphora.server.schemas import ChatRequest, CompletionRequest
from anaphora.server.service import Service
from anaphora.server.tenants import Caller, Tenants
from anaphora.server.translate import validate
from anaphora.thread_llm import ThreadLLM
from anaphora.types import DEFAULT_TENANT, ModelInfo

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/responses")

STEP_TOKENS = 512  # of max_num_batched_tokens: nobody waits for the step that runs
_NUM_TEXTS = 64  # parts of prompts whose tokens are kept
_PAGE = 256  # prompts that are looked at together
_DEFAULT_CONCURRENCY = 64  # at a URL that does not say how many sequences it runs
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_MAX_ATTEMPTS = 5  # of a request on which a server fails
_SETTLE_SECONDS = 0.05  # before it is known that an engine has ended
_RETRY_SECONDS = 1.0  # doubled each time
_MAX_RETRY_SECONDS = 30.0
_PATIENCE_SECONDS = 120.0  # without any answer of a server
_JSON = {"content-type": "application/json"}
_BUSY = (408, 429, 503)  # not the request's fault, however often
_NOBODY = 0  # the status where there was no answer
_SHOWN_CHARS = 200

K = TypeVar("K")
T = TypeVar("T")
Target = str | EngineConfig | LLM | FakeLLM


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back for one request: a response body, or an error's."""

    status: int  # of HTTP; 200 is success
    body: dict[str, Any]
    request_id: str = ""

    @property
    def error(self) -> str | None:
        """What went wrong, None if nothing did."""
        error = self.body.get("error")
        found = error.get("message") if isinstance(error, dict) else error
        if self.status != 200 or found:
            return str(found or f"the server answered with status {self.status}")
        if not self.body.get("choices") and not self.body.get("output"):
            return "the server's answer holds none: no choices, no output"
        return None

    @property
    def text(self) -> str:
        """Content of the first choice; empty if there is none."""
        choice = (self.body.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        content = message.get("content") or choice.get("text") or message.get("refusal") or ""
        if isinstance(content, list):  # of parts, as Databricks has it beside reasoning
            parts = [part for part in content if isinstance(part, dict)]
            content = "".join(str(part.get("text", "")) for part in parts)
        return str(content)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        choice: dict[str, Any] = (self.body.get("choices") or [{}])[0]
        return choice.get("finish_reason")

    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of them cached, and of the completion."""
        usage = self.body.get("usage") or {}
        prompt = usage.get("prompt_tokens", usage.get("input_tokens")) or 0
        completion = usage.get("completion_tokens", usage.get("output_tokens")) or 0
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return prompt, details.get("cached_tokens") or 0, completion


class _Backend(Protocol):
    """Where requests go."""

    @property
    def models(self) -> list[str]:
        """The names that are served, the first one by default."""

    @property
    def info(self) -> ModelInfo | None:
        """What is served, if that is known."""

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """One request. Raises ``EngineUnavailable`` if nobody answers for long."""

    async def key(self, path: str, body: dict[str, Any]) -> tuple[bytes, int]:
        """Where in the prefix tree its prompt is, and how many tokens it has."""

    async def close(self) -> None:
        """Ends what it started."""


class Client:
    """Runs requests against one target. Several threads may use it; ``close`` it."""

    def __init__(
        self,
        target: Target,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        """``target``: a base URL, as http://127.0.0.1:8000/v1; an ``LLM`` of this process, which
        stays yours; or a model's name, path or ``EngineConfig``, for which an engine is started
        (of a name or path with steps of ``STEP_TOKENS``).

        ``model`` is whom requests are for that do not say it, by default the first that is served.
        Raises ``ConfigError``, ``ModelError`` and ``EngineUnavailable``.
        """
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch", daemon=True)
        self._thread.start()
        try:
            self._backend = self._await(_open(target, api_key))
            served = self._backend.models
            if model is not None and model not in served:
                self._await(self._backend.close())
                raise ConfigError(
                    f"model is {model!r}, which is not served there; use {' or '.join(served)}"
                )
        except BaseException:
            self._end_loop()
            raise
        self.models = served
        self.model = model or served[0]
        info = self.info
        self.concurrency = concurrency or (
            _DEFAULT_CONCURRENCY if info is None else 2 * info.max_num_seqs
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo | None:
        """What is served; None at a URL that does not say it."""
        return self._backend.info

    def close(self) -> None:
        """Ends what was started for it. Requests that run end with an error."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._await(self._backend.close())
        finally:
            self._end_loop()

    def run(self, requests: Iterable[tuple[K, str, dict[str, Any]]]) -> Iterator[tuple[K, Reply]]:
        """Replies to requests of (key, path, body), as they come.

        Requests are taken in order, and only as many as fill the engine. A reply is an error's if
        its request failed, also if it failed again and again on a server's account. Raises
        ``EngineUnavailable`` if nobody answers for long.
        """
        if self._is_closed:
            raise EngineUnavailable("the client was closed; open another")
        done: queue.SimpleQueue[tuple[K, Reply | BaseException]] = queue.SimpleQueue()
        running: set[asyncio.Task[Any]] = set()
        left = iter(requests)
        num_running, is_exhausted = 0, False

        async def answer(key: K, path: str, body: dict[str, Any]) -> None:
            try:
                done.put((key, await self._backend.post(path, {"model": self.model, **body})))
            except BaseException as error:
                done.put((key, error))

        def begin(key: K, path: str, body: dict[str, Any]) -> None:
            task = self._loop.create_task(answer(key, path, body))
            running.add(task)
            task.add_done_callback(running.discard)

        try:
            while True:
                while num_running < self.concurrency and not is_exhausted:
                    request = next(left, None)
                    if request is None:
                        is_exhausted = True
                        break
                    self._loop.call_soon_threadsafe(begin, *request)
                    num_running += 1
                if num_running == 0:
                    return
                key, reply = done.get()
                num_running -= 1
                if isinstance(reply, asyncio.CancelledError):
                    raise EngineUnavailable("the client was closed while it worked; open another")
                if isinstance(reply, BaseException):
                    raise reply
                yield key, reply
        finally:
            if num_running and not self._is_closed:
                self._await(_cancel(running))

    def keys(self, requests: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[bytes, int]]:
        """For each (path, body): its place in the prefix tree, and its prompt's tokens.

        In process of token ids; at a URL of text, whose tokens are about so many.
        """
        pages = iter(requests)
        while page := list(itertools.islice(pages, _PAGE)):
            yield from self._await(self._keys(page))

    async def _keys(self, page: list[tuple[str, dict[str, Any]]]) -> list[tuple[bytes, int]]:
        return [await self._backend.key(path, body) for path, body in page]

    def complete(
        self,
        bodies: Sequence[dict[str, Any]],
        *,
        path: str = CHAT,
        is_planned: bool = True,
        on_done: Callable[[Reply], None] | None = None,
    ) -> list[Reply]:
        """Replies in the order of ``bodies``, run as one batch.

        If it is planned, equal ones at temperature 0 are computed once, and those that begin alike
        run side by side. ``on_done`` is called for each as it is there.
        """
        leaders: dict[bytes, int] = {}
        followers: dict[int, list[int]] = {}
        for index, body in enumerate(bodies):
            same = fingerprint(path, body) if is_planned else None
            leader = index if same is None else leaders.setdefault(same, index)
            followers.setdefault(leader, []).append(index)
        order = list(followers)
        if is_planned and len(order) > 1:
            keys = dict(zip(order, self.keys((path, bodies[i]) for i in order), strict=True))
            order.sort(key=lambda index: (keys[index][0], index))
        replies: dict[int, Reply] = {}
        for leader, reply in self.run((index, path, bodies[index]) for index in order):
            for index in followers[leader]:
                replies[index] = reply
                if on_done is not None:
                    on_done(reply)
        return [replies[index] for index in range(len(bodies))]

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._await(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def fingerprint(path: str, body: Mapping[str, Any]) -> bytes | None:
    """Equal for requests whose answers are; None where chance decides."""
    if body.get("temperature") != 0:
        return None
    # Not sorted: the order of a schema's properties is that of the answer's.
    return path.encode() + json.dumps(body).encode()


def _encoded(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. Raises ``InvalidRequest`` for what has none."""
    if body.get("stream"):
        raise InvalidRequest("stream has no meaning in a batch; leave it out", param="stream")
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _refused(error: RequestError) -> Reply:
    return Reply(error.status, {"error": {"message": str(error), "param": error.param}})


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _cancel_others() -> None:
    await _cancel({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})


async def _open(target: Target, api_key: str | None) -> _Backend:
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return await _Remote.connect(target, api_key)
    if api_key is not None:
        raise ConfigError("an API key is given, but the target is no URL; leave it out")
    if isinstance(target, LLM):
        return _Local(ThreadLLM(target))
    if isinstance(target, FakeLLM):
        return _Local(target)
    if not isinstance(target, str | EngineConfig):
        raise ConfigError(
            f"the target is a {type(target).__name__}; give a URL, an LLM or the name of a model"
        )
    if isinstance(target, str):
        target = EngineConfig(model=target, max_num_batched_tokens=STEP_TOKENS)
    llm = AsyncLLM(target)
    await llm.start()
    return _Local(llm)


class _Local:
    """The server's routes without a socket."""

    def __init__(self, llm: AsyncLLM | ThreadLLM | FakeLLM) -> None:
        self._llm = llm
        llm.tokenizer.remember(_NUM_TEXTS)  # there is one tenant here
        name = llm.info.name if isinstance(llm, FakeLLM) else llm.model_name
        self._app = create_app(llm, Tenants(), served_model_names=(name,))
        self._service: Service = self._app.state.service
        self._internal = Internal(Caller(DEFAULT_TENANT), None)
        self._retrying = asyncio.Lock()

    @property
    def models(self) -> list[str]:
        return [endpoint.name for endpoint in self._service.endpoints.all()]

    @property
    def info(self) -> ModelInfo:
        return self._llm.info

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        try:
            content = _encoded(body)
        except InvalidRequest as error:
            return _refused(error)
        answer = await call(self._app, path, content, self._internal)
        if answer.status >= 500:
            answer = await self._again(path, content)
        if answer.status >= 500:
            # One of those that ran kills the engine, it seems. They are tried again one by one, so
            # that it takes none of the others with it.
            async with self._retrying:
                for _ in range(2, _MAX_ATTEMPTS):
                    answer = await self._again(path, content)
                    if answer.status < 500:
                        break
        request_id = answer.headers.get("x-request-id", "")
        return Reply(answer.status, msgspec.json.decode(answer.body), request_id)

    async def _again(self, path: str, content: bytes) -> Answer:
        """The same once more, as soon as there is an engine."""
        end = time.monotonic() + _PATIENCE_SECONDS
        await asyncio.sleep(_SETTLE_SECONDS)
        while not self._llm.is_ready and time.monotonic() < end:
            await asyncio.sleep(_SETTLE_SECONDS)
        return await call(self._app, path, content, self._internal)

    async def key(self, path: str, body: dict[str, Any]) -> tuple[bytes, int]:
        try:
            token_ids = await self._encode(path, {"model": self.models[0], **body})
        except RequestError:  # it says why when it runs
            return b"", 0
        if token_ids is None:
            return text_key(prompt_text(body))
        return token_key(token_ids, self.info.block_size), len(token_ids)

    async def _encode(self, path: str, body: dict[str, Any]) -> list[int] | None:
        if path == CHAT:
            chat = validate(ChatRequest, body)
            return await self._service.encode_chat(chat.messages, chat)
        if path == "/v1/completions" and isinstance(body.get("prompt"), str):
            completion = validate(CompletionRequest, body)
            [ids] = await self._service.encode_prompts(
                [body["prompt"]], add_special_tokens=completion.add_special_tokens is not False
            )
            return ids
        return None

    async def close(self) -> None:
        self._service.close()
        if not isinstance(self._llm, FakeLLM):
            await self._llm.close()


class _Remote:
    """A server at a base URL."""

    def __init__(
        self, http: httpx.AsyncClient, base: str, models: list[str], info: ModelInfo | None
    ) -> None:
        self._http = http
        self._base = base
        self.models = models
        self.info = info
        self._heard_at = time.monotonic()

    @classmethod
    async def connect(cls, url: str, api_key: str | None) -> _Remote:
        """Asks what is served there. Raises ``ConfigError``, ``EngineUnavailable``."""
        if "@" in url:
            raise ConfigError("the URL holds a user's name or password; give an API key instead")
        base = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {_checked_key(api_key)}"}
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=limits)
        try:
            served, info = await cls._ask(http, url, base)
        except BaseException:
            await http.aclose()
            raise
        return cls(http, base, served, info)

    @staticmethod
    async def _ask(
        http: httpx.AsyncClient, url: str, base: str
    ) -> tuple[list[str], ModelInfo | None]:
        try:
            answer = await http.get(f"{base}/v1/models")
        except httpx.InvalidURL as error:
            raise ConfigError(f"the URL {url!r} cannot be used: {error}") from None
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"nobody answers at {url}: {_why(error)}") from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"the server at {url} refuses the API key; give one that it knows")
        try:
            found = msgspec.json.decode(answer.content, type=_Models)
        except msgspec.DecodeError:
            raise ConfigError(
                f"{base}/v1/models answers with status {answer.status_code} and no list of models; "
                "give the base URL of a server that speaks OpenAI's API"
            ) from None
        if not found.data:
            raise ConfigError(f"the server at {url} serves no model that this key may use")
        info = None
        with contextlib.suppress(msgspec.ValidationError):
            info = msgspec.convert(found.data[0].info, ModelInfo)
        return [model.id for model in found.data], info

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        if self.info is not None:  # one of ours: nobody who waits is to wait for rows
            body = {"service_tier": "flex", **body}
        attempt, delay = 0, _RETRY_SECONDS
        while True:
            reply, wait = await self._try(path, body)
            is_failure = reply.status >= 500 and reply.status not in _BUSY
            if not is_failure and reply.status not in (_NOBODY, *_BUSY):
                self._heard_at = time.monotonic()
                return reply
            attempt += is_failure
            if attempt == _MAX_ATTEMPTS:
                return reply
            if time.monotonic() - self._heard_at > _PATIENCE_SECONDS:
                raise EngineUnavailable(
                    f"{self._base} has answered nothing for {_PATIENCE_SECONDS:.0f} s, at last: "
                    f"{reply.error}"
                )
            await asyncio.sleep(max(wait, delay * random.uniform(0.75, 1.25)))
            delay = min(2 * delay, _MAX_RETRY_SECONDS)

    async def _try(self, path: str, body: dict[str, Any]) -> tuple[Reply, float]:
        """A reply, and the seconds after which the server wants to be asked again."""
        try:
            content = _encoded(body)
        except InvalidRequest as error:
            return _refused(error), 0.0
        try:
            answer = await self._http.post(f"{self._base}{path}", content=content, headers=_JSON)
        except httpx.HTTPError as error:
            return Reply(_NOBODY, {"error": {"message": _why(error)}}), 0.0
        try:
            if answer.status_code == 200:
                msgspec.json.decode(answer.content, type=_Shape)
            decoded = msgspec.json.decode(answer.content, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            start = answer.text[:_SHOWN_CHARS]
            status = answer.status_code if answer.status_code >= 400 else 502
            message = f"status {answer.status_code}, and the answer is not OpenAI's: {start!r}"
            return Reply(status, {"error": {"message": message}}), 0.0
        wait = 0.0
        with contextlib.suppress(ValueError):
            asked = float(answer.headers.get("retry-after", 0))
            wait = min(asked, _MAX_RETRY_SECONDS) if asked > 0 else 0.0  # it may be NaN
        return Reply(answer.status_code, decoded, answer.headers.get("x-request-id", "")), wait

    async def key(self, path: str, body: dict[str, Any]) -> tuple[bytes, int]:  # noqa: ARG002
        return text_key(prompt_text(body))

    async def close(self) -> None:
        await self._http.aclose()


def _checked_key(key: str) -> str:
    """Raises ``ConfigError``, which does not show it, for what no header can hold."""
    if not key.strip() or not key.strip().isascii() or not key.strip().isprintable():
        raise ConfigError(
            "the API key is empty or holds characters that no header can; see how it was copied"
        )
    return key.strip()


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Shape(msgspec.Struct):
    """What is read of an answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    output: list[Any] | None = None


class _Model(msgspec.Struct):
    id: str
    info: Any = None  # ours says what it resolved


class _Models(msgspec.Struct):
    data: list[_Model]


def prompt_text(body: Mapping[str, Any]) -> str:
    """All that a prompt is made of, in the order in which templates write it."""
    parts = [body.get(name) for name in ("instructions", "tools", "messages", "prompt", "input")]
    return json.dumps([part for part in parts if part is not None], ensure_ascii=False)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
