"""Streams completions from any server that speaks OpenAI's API, and notes when each piece came."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from anaphora.errors import MeasurementError
from anaphora.types import ModelInfo

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
# a connection for each request: a server may close an idle one just when it is used again
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_SHOWN_CHARS = 200  # of a body in an error message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed completion; times are those of ``time.perf_counter``."""

    start: float
    events: tuple[float, ...]  # when text or the end came; never empty
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int | None  # None: the server does not say

    @property
    def ttft(self) -> float:
        """Seconds to the first text, or to the end of an answer without any."""
        return self.events[0] - self.start

    @property
    def end(self) -> float:
        """When the last token came."""
        return self.events[-1]


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Meta(msgspec.Struct):
    n_vocab: int | None = None


class _ModelEntry(msgspec.Struct):
    id: str
    info: ModelInfo | None = None  # ours says what it resolved
    meta: _Meta | None = None  # llama-server


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_models = msgspec.json.Decoder(_ModelList).decode


class CompletionClient:
    """Completions of one model at one base URL; see ``connect``."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, model: _ModelEntry) -> None:
        self._http = http
        self._url = f"{base_url}/completions"
        self.model = model.id
        self.info = model.info
        self.vocab_size = model.meta.n_vocab if model.meta else None  # None: it does not say
        if model.info is not None:
            self.vocab_size = model.info.vocab_size

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """The greedy answer of exactly ``num_tokens`` tokens, streamed to its end."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events: list[float] = []
        usage: _Usage | None = None
        is_finished = False
        start = time.perf_counter()
        with _naming("POST", self._url):
            async with self._http.stream("POST", self._url, json=body) as response:
                await _check_status(response)
                async for data in _events(response):
                    chunk = _decode_chunk(data)
                    if chunk.error is not None:
                        raise MeasurementError(f"POST {self._url}: the stream says {_shown(data)}")
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        is_finished |= choice.finish_reason is not None
                        if choice.text or choice.finish_reason is not None:
                            events.append(time.perf_counter())
        if not is_finished or usage is None:
            missing = "usage" if is_finished else "finish_reason"
            raise MeasurementError(f"POST {self._url}: the stream ended without {missing}")
        details = usage.prompt_tokens_details
        return Answer(
            start=start,
            events=tuple(events),
            num_prompt_tokens=usage.prompt_tokens,
            num_tokens=usage.completion_tokens,
            num_cached_tokens=None if details is None else details.cached_tokens,
        )


@contextlib.asynccontextmanager
async def connect(
    url: str, *, model: str | None = None, api_key: str | None = None
) -> AsyncIterator[CompletionClient]:
    """A client for ``model`` (the first one if None) at the base ``url``, usually ``.../v1``.

    Raises ``MeasurementError``, also when the server has no such model.
    """
    base_url = url.rstrip("/")
    try:
        parts = urlsplit(base_url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise MeasurementError(f"--url is {url!r}; it must be like http://127.0.0.1:8000/v1")
    if not parts.path:
        base_url += "/v1"
    if api_key and not api_key.isascii():
        raise MeasurementError("--api-key has characters that no HTTP header can carry")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # no proxy from the environment: what is measured is this server
    async with httpx.AsyncClient(
        headers=headers, timeout=_TIMEOUT, limits=_LIMITS, trust_env=False
    ) as http:
        entries = await _list_models(http, f"{base_url}/models")
        names = [entry.id for entry in entries]
        if not names or (model is not None and model not in names):
            raise MeasurementError(
                f"GET {base_url}/models: there is no model {model!r}, only {', '.join(names)}"
                if names
                else f"GET {base_url}/models: the list is empty"
            )
        entry = entries[0 if model is None else names.index(model)]
        yield CompletionClient(http, base_url, entry)


async def _list_models(http: httpx.AsyncClient, url: str) -> list[_ModelEntry]:
    with _naming("GET", url):
        async with http.stream("GET", url) as response:
            await _check_status(response)
            body = await response.aread()
        try:
            return _decode_models(body).data
        except msgspec.MsgspecError as error:
            raise MeasurementError(
                f"GET {url}: not a list of models ({error}): {_shown(body)}"
            ) from None


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events; an answer that is none of it is an error."""
    pending = head = b""
    is_stream = False
    async for part in response.aiter_bytes():
        if not is_stream:
            head += part[:_SHOWN_CHARS]
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                is_stream = True
                data = line.removeprefix(b"data:").strip()
                if data != b"[DONE]":
                    yield data
    if not is_stream:
        raise MeasurementError(
            f"POST {response.url}: status {response.status_code}, but not a stream of events: "
            f"{_shown(head)}"
        )


async def _check_status(response: httpx.Response) -> None:
    if response.status_code != 200:
        body = await response.aread()
        request = response.request
        raise MeasurementError(
            f"{request.method} {request.url}: status {response.status_code}: {_shown(body)}"
        )


@contextlib.contextmanager
def _naming(method: str, url: str) -> Iterator[None]:
    """Errors of the network and of JSON say what was asked of whom."""
    try:
        yield
    except (httpx.RequestError, httpx.InvalidURL, OverflowError) as error:
        raise MeasurementError(f"{method} {url}: {type(error).__name__}: {error}") from None
    except msgspec.MsgspecError as error:
        raise MeasurementError(f"{method} {url}: an event cannot be read: {error}") from None


def _shown(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return repr(text[:_SHOWN_CHARS]) if text else "an empty body"
