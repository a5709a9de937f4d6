"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from anaphora.server.envelope import json_response
from anaphora.server.generation import Generation
from anaphora.server.logprobs import chat_logprobs
from anaphora.server.schemas import ChatRequest
from anaphora.server.service import Service, now
from anaphora.server.transport import EventStream, encode_event, unless_disconnected


def chat_router(service: Service) -> APIRouter:
    """The route, bound to ``service``."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(request: Request) -> Response:
        """Answer a chat."""
        body = await service.read(request, ChatRequest)
        service.check_model(body.model)
        params = body.sampling_params(service.llm.info.vocab_size)
        prompt = await service.encode_chat(body.messages, body)
        generation = service.generation(
            request,
            [prompt],
            params,
            service.scope(request, body, body.model),
            body.workload,
            "messages",
        )
        answer = _ChatAnswer(service, body, generation, request.state.request_id)
        if not body.stream:
            content = await unless_disconnected(request.receive, answer.whole())
            return json_response(content, headers=generation.headers())
        events = answer.events()
        first = await unless_disconnected(request.receive, anext(events))
        return EventStream(
            first, events, request_id=request.state.request_id, headers=generation.headers()
        )

    return router


class _ChatAnswer:
    """Formats one generation, whole or as chunks."""

    def __init__(
        self, service: Service, body: ChatRequest, generation: Generation, request_id: str
    ) -> None:
        self._tokenizer = service.llm.tokenizer
        self._body = body
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "created": now(),
            "model": body.model,
            "system_fingerprint": service.fingerprint(body.model),
            "service_tier": body.served_tier,
        }

    async def whole(self) -> dict[str, Any]:
        """The complete response body."""
        choices = [_new_choice(i, self._body) for i in range(self._generation.num_choices)]
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choice = choices[delta.index]
                choice["message"]["content"].append(delta.text)
                if choice["logprobs"] is not None:
                    choice["logprobs"]["content"] += chat_logprobs(self._tokenizer, delta.logprobs)
                choice["finish_reason"] = delta.finish_reason
                choice["stop_reason"] = delta.stop_reason
        for choice in choices:
            choice["message"]["content"] = "".join(choice["message"]["content"])
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._generation.usage(),
            **self._diagnostics(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, each as an event."""
        started: set[int] = set()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in started:
                    started.add(delta.index)
                    role = {"role": "assistant", "content": "", "refusal": None}
                    yield self._chunk([_chunk_choice(delta.index, role)])
                logprobs = None
                if self._body.logprobs:
                    content = chat_logprobs(self._tokenizer, delta.logprobs)
                    logprobs = {"content": content, "refusal": None}
                if delta.text or delta.logprobs:
                    text = {"content": delta.text}
                    yield self._chunk([_chunk_choice(delta.index, text, logprobs=logprobs)])
                if delta.finish_reason is not None:
                    last = _chunk_choice(delta.index, {}, finish_reason=delta.finish_reason)
                    yield self._chunk([{**last, "stop_reason": delta.stop_reason}])
        if self._body.includes_usage or self._body.cache_diagnostics:
            yield self._chunk([], usage=self._generation.usage(), **self._diagnostics())

    def _diagnostics(self) -> dict[str, Any]:
        if not self._body.cache_diagnostics:
            return {}
        [of_prompt] = self._generation.diagnostics()
        return {"cache_diagnostics": of_prompt}

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        **more: object,
    ) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}
        if self._body.includes_usage:
            chunk["usage"] = usage
        return encode_event(chunk)


def _new_choice(index: int, body: ChatRequest) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": [], "refusal": None},
        "logprobs": {"content": [], "refusal": None} if body.logprobs else None,
        "finish_reason": None,
    }


def _chunk_choice(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
