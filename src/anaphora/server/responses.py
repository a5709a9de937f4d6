"""``/v1/responses``: OpenAI's Responses API, basics, with stored conversations."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from anaphora.errors import EngineError
from anaphora.server.chat import begin_chat
from anaphora.server.envelope import error_object, json_response
from anaphora.server.generation import Generation
from anaphora.server.responses_schemas import (
    NAMES,
    InputTokensRequest,
    ResponsesRequest,
    own_messages,
    to_chat,
)
from anaphora.server.schemas import ChatRequest
from anaphora.server.service import Service, now
from anaphora.server.translate import naming
from anaphora.server.transport import EventStream, encode_event, unless_disconnected
from anaphora.types import CompletionDelta

Event = dict[str, Any]
_MAX_SHOWN_CHARS = 64
_ENDS = ("response.completed", "response.incomplete")
_MESSAGE: dict[str, Any] = {"role": "assistant", "content": []}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # what is in their content


def responses_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter()
    store = service.responses

    @router.post("/v1/responses", response_model=None)
    async def create_response(request: Request) -> Response:
        """Answer, going on from a stored response if one is named."""
        body = await service.read(request, ResponsesRequest)
        return await answer_response(service, request, body)

    @router.post("/v1/responses/input_tokens", response_model=None)
    async def count_input_tokens(request: Request) -> Response:
        """How many tokens the prompt of a response has; nothing is computed."""
        body = await service.read(request, InputTokensRequest)
        service.endpoint(request, body.model)
        chat, places, _ = await _conversation(service, request, body)
        with naming(NAMES, places):
            prompt = await service.encode_chat(chat.messages, chat)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})

    @router.get("/v1/responses/{response_id}", response_model=None)
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response of the key's tenant."""
        return json_response(store.body(request.state.tenant, response_id))

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a stored response. Those that go on from it stay."""
        store.delete(request.state.tenant, response_id)
        gone = {"id": response_id[:_MAX_SHOWN_CHARS], "object": "response", "deleted": True}
        return json_response(gone)

    return router


async def answer_response(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """The whole response or a stream of events; stored at the end unless ``store`` is false."""
    store = service.responses
    chat, places, messages = await _conversation(service, request, body)
    with naming(NAMES, places):
        generation = await begin_chat(service, request, chat)
    block_size = service.llm.info.block_size if service.llm.info.enable_prefix_caching else 0
    answer = _Answer(body, generation, request.state.request_id, block_size)
    if not body.stream:
        with naming(NAMES, places):  # a constraint is tried when work begins
            content = await unless_disconnected(request.receive, _last(answer.events()))
        if body.store is not False:
            store.add(request.state.tenant, content, [*messages, *answer.messages])
        return json_response(content, headers=generation.headers())

    async def stored_at_the_end() -> AsyncGenerator[Event, None]:
        async with aclosing(answer.events()) as events:
            async for event in events:
                if event["type"] in _ENDS and body.store is not False:
                    finished = [*messages, *answer.messages]
                    store.add(request.state.tenant, event["response"], finished)
                yield event

    encoded = _encoded(stored_at_the_end(), answer)
    with naming(NAMES, places):
        first = await unless_disconnected(request.receive, anext(encoded))
    return EventStream(
        first,
        encoded,
        request_id=request.state.request_id,
        headers=generation.headers(),
        error_event=lambda error: _error_event(error, answer.next_number()),
        end=b"",
    )


async def _conversation(
    service: Service, request: Request, body: InputTokensRequest
) -> tuple[ChatRequest, list[str], list[dict[str, Any]]]:
    """The chat, where its messages were in the request, and those without the instructions."""
    stored = b"[]"
    if body.previous_response_id is not None:
        stored = service.responses.messages(request.state.tenant, body.previous_response_id)

    def translate() -> tuple[ChatRequest, list[str], list[dict[str, Any]]]:
        history: list[dict[str, Any]] = msgspec.json.decode(stored)
        messages, places = own_messages(body)
        chat, all_places = to_chat(body, history, messages, places)
        return chat, all_places, [*history, *messages]

    return await service.translate(request, translate, len(stored))


async def _last(events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    """The response at the end of a stream."""
    last: Event = {}
    async with aclosing(events):
        async for event in events:
            last = event
    response: dict[str, Any] = last["response"]
    return response


async def _encoded(
    events: AsyncGenerator[Event, None], answer: _Answer
) -> AsyncGenerator[bytes, None]:
    has_started = False
    async with aclosing(events):
        try:
            async for event in events:
                yield encode_event(event, event["type"])
                has_started = True
        except EngineError as error:
            if not has_started:
                raise
            event = answer.failed(error)
            yield encode_event(event, event["type"])


def _error_event(error: Exception, number: int) -> bytes:
    inner = error_object(error, "openai", "")["error"]
    event = {"type": "error", "sequence_number": number}
    return encode_event(
        event | {name: inner[name] for name in ("code", "message", "param")}, "error"
    )


class _Answer:
    """One generation as the events of a response."""

    def __init__(
        self,
        body: ResponsesRequest,
        generation: Generation,
        request_id: str,
        block_size: int,
    ) -> None:
        self._body = body
        self._generation = generation
        self._request_id = request_id
        self._block_size = block_size  # 0: nothing is cached
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # items; the last one may be open
        self._is_open = False
        self._text: list[str] = []  # of the open item
        self._head = _head(body, generation.service_tier, request_id)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The answer as a chat's messages, for requests that go on from it."""
        messages: list[dict[str, Any]] = []
        reasoning: dict[str, Any] = {}
        for item in self._output:
            if item["type"] == "reasoning":
                reasoning = {"reasoning_content": item["content"][0]["text"]}
                continue
            message: dict[str, Any] = {"role": "assistant", "content": None, **reasoning}
            if item["type"] == "function_call":
                called = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": called}
                message["tool_calls"] = [call]
            else:
                message["content"] = item["content"][0]["text"]
            messages.append(message)
            reasoning = {}
        return messages

    def next_number(self) -> int:
        """The ``sequence_number`` of the next event."""
        self._num_events += 1
        return self._num_events - 1

    def failed(self, error: EngineError) -> Event:
        """The last event of an answer that the engine did not finish."""
        response = self._response("failed")
        response["error"] = {"code": error.code or error.kind, "message": str(error)}
        return self._event("response.failed", response=response)

    async def events(self) -> AsyncGenerator[Event, None]:
        """All events, in order. Raises what the generation raises."""
        end: CompletionDelta | None = None
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if not self._num_events:
                    yield self._event("response.created", response=self._response("in_progress"))
                    response = self._response("in_progress")
                    yield self._event("response.in_progress", response=response)
                for event in self._add(delta):
                    yield event
                if delta.finish_reason is not None:
                    end = delta
        assert end is not None  # else deltas would have raised
        status = "incomplete" if end.finish_reason == "length" else "completed"
        if not any(item["type"] != "reasoning" for item in self._output) and status == "completed":
            for event in self._open("message", _MESSAGE):
                yield event
        for event in self._close(status):
            yield event
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = now()
        response["usage"] = self._usage()
        yield self._event(f"response.{status}", response=response)

    def _add(self, delta: CompletionDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._open("reasoning", {"summary": [], "content": []})
            yield self._delta("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.text:
            yield from self._open("message", _MESSAGE)
            text = "response.output_text.delta"
            yield self._delta(text, delta.text, content_index=0, logprobs=[])
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._close("completed")
                call_id = f"call_{secrets.token_hex(12)}"
                head = {"call_id": call_id, "name": call.name, "arguments": ""}
                yield from self._open("function_call", head)
            if call.arguments:
                yield self._delta("response.function_call_arguments.delta", call.arguments)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        if self._is_open and self._output[-1]["type"] == kind:
            return
        yield from self._close("completed")
        self._is_open, self._text = True, []
        item_id = f"{_PREFIXES[kind]}_{self._request_id}_{len(self._output)}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield self._event("response.output_item.added", **self._place, item=dict(item))
        if kind in _PARTS:
            part = _part(kind, "")
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._text)
        kind = item["type"]
        if kind in _PARTS:
            part = _part(kind, text)
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._of_item(f"response.{_PARTS[kind]}.done", content_index=0, text=text, **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        else:
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
            item["arguments"] = text
        item["status"] = status
        self._is_open = False
        yield self._event("response.output_item.done", **self._place, item=dict(item))

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1}

    def _delta(self, name: str, delta: str, **fields: Any) -> Event:
        self._text.append(delta)
        return self._of_item(name, delta=delta, **fields)

    def _of_item(self, kind: str, /, **fields: Any) -> Event:
        return self._event(kind, item_id=self._output[-1]["id"], **self._place, **fields)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": self.next_number(), **fields}

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [dict(item) for item in self._output]}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        written = 0
        if size := self._block_size:
            written = (usage["prompt_tokens"] // size - -(-cached // size)) * size
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part


def _head(body: ResponsesRequest, service_tier: str, request_id: str) -> dict[str, Any]:
    """What of a response is known before it begins."""
    reasoning, text = body.reasoning, body.text
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": now(),
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "service_tier": service_tier,
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }
