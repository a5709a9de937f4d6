"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from anaphora.server.envelope import json_response
from anaphora.server.generation import Generation
from anaphora.server.logprobs import chat_logprobs, prompt_logprobs
from anaphora.server.schemas import ChatRequest
from anaphora.server.service import Service, now
from anaphora.server.tools import ToolCalls
from anaphora.server.transport import EventStream, encode_event, unless_disconnected
from anaphora.types import CompletionDelta, FinishReason, TokenLogprob


def chat_router(service: Service) -> APIRouter:
    """The route, bound to ``service``."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(request: Request) -> Response:
        """Answer a chat."""
        return await answer_chat(service, request, await service.read(request, ChatRequest))

    return router


async def begin_chat(service: Service, request: Request, body: ChatRequest) -> Generation:
    """Check a chat, in whichever dialect it came, and make it ready to run.

    Raises ``RequestError`` that names the field of ``body``.
    """
    endpoint = service.endpoint(request, body.model)
    params = service.sampling_params(body)
    prompt = await service.encode_chat(body.messages, body)
    prompt = body.truncate(prompt, service.llm.info.max_model_len)
    params = service.reading(body, params)
    scope = service.scope(request, body, endpoint)
    return service.generation(request, endpoint, [prompt], params, scope, body.workload, "messages")


async def answer_chat(
    service: Service, request: Request, body: ChatRequest, *, reasoning_in_content: bool = False
) -> Response:
    """The whole answer or a stream of chunks, as OpenAI's.

    ``reasoning_in_content``: as Databricks has it, content is then a list of parts.
    """
    generation = await begin_chat(service, request, body)
    request_id = request.state.request_id
    answer = _ChatAnswer(service, body, generation, request_id, reasoning_in_content)
    if not body.stream:
        content = await unless_disconnected(request.receive, answer.whole())
        return json_response(content, headers=generation.headers())
    events = answer.events()
    first = await unless_disconnected(request.receive, anext(events))
    return EventStream(first, events, request_id=request_id, headers=generation.headers())


class _ChatAnswer:
    """Formats one generation, whole or as chunks."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        generation: Generation,
        request_id: str,
        reasoning_in_content: bool,
    ) -> None:
        self._prompt = generation.prompts[0]
        self._reasoning_in_content = reasoning_in_content
        self._tokenizer = service.llm.tokenizer
        self._body = body
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "created": now(),
            "model": body.model,
            "system_fingerprint": service.fingerprint(generation.endpoint),
            "service_tier": generation.service_tier,
        }

    async def whole(self) -> dict[str, Any]:
        """The complete response body."""
        choices = [
            _Choice(i, self._body, self._reasoning_in_content)
            for i in range(self._generation.num_choices)
        ]
        of_prompt: tuple[TokenLogprob, ...] = ()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].add(delta, self._logprobs(delta))
                of_prompt = of_prompt or delta.prompt_logprobs
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, of_prompt)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice.whole() for choice in choices],
            "usage": self._generation.usage(),
            **more,
            **self._diagnostics(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, each as an event."""
        calls: dict[int, ToolCalls] = {}
        returns_ids = self._body.return_token_ids
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in calls:
                    more: dict[str, Any] = {}
                    if returns_ids and not calls:
                        more["prompt_token_ids"] = self._prompt
                    calls[delta.index] = ToolCalls()
                    role = {"role": "assistant", "content": "", "refusal": None}
                    yield self._chunk([_chunk_choice(delta.index, role)], **more)
                if returns_ids and delta.token_ids:
                    ids = _chunk_choice(delta.index, {})
                    yield self._chunk([{**ids, "token_ids": delta.token_ids}])
                logprobs = None
                if self._body.logprobs:
                    logprobs = {"content": self._logprobs(delta), "refusal": None}
                if delta.reasoning:
                    added = _reasoning(delta.reasoning)
                    if self._reasoning_in_content:
                        added = {"content": [_reasoning_part(delta.reasoning)]}
                    yield self._chunk([_chunk_choice(delta.index, added)])
                if delta.text or (logprobs and logprobs["content"]):
                    text = {"content": delta.text}
                    yield self._chunk([_chunk_choice(delta.index, text, logprobs=logprobs)])
                if delta.tool_calls:
                    pieces = [calls[delta.index].add(call) for call in delta.tool_calls]
                    yield self._chunk([_chunk_choice(delta.index, {"tool_calls": pieces})])
                if delta.finish_reason is not None:
                    reason = _finish_reason(delta.finish_reason, calls[delta.index], self._body)
                    last = _chunk_choice(delta.index, {}, finish_reason=reason)
                    yield self._chunk([{**last, "stop_reason": delta.stop_reason}])
        if self._body.includes_usage or self._body.cache_diagnostics:
            yield self._chunk([], usage=self._generation.usage(), **self._diagnostics())

    def _logprobs(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """Those of content, of which OpenAI's field is."""
        if delta.part != "content":
            return []
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(self._tokenizer, delta.logprobs, as_ids=as_ids)

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


class _Choice:
    """Puts one whole choice together."""

    def __init__(self, index: int, body: ChatRequest, reasoning_in_content: bool) -> None:
        self._reasoning_in_content = reasoning_in_content
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = ToolCalls()
        self._body = body
        self._logprobs: list[dict[str, Any]] | None = [] if body.logprobs else None
        self._head: dict[str, Any] = {"index": index}
        self._end: dict[str, Any] = {"finish_reason": None}

    def add(self, delta: CompletionDelta, logprobs: list[dict[str, Any]]) -> None:
        self._token_ids += delta.token_ids
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            self._calls.add(call)
        if self._logprobs is not None:
            self._logprobs += logprobs
        reason = _finish_reason(delta.finish_reason, self._calls, self._body)
        self._end = {"finish_reason": reason, "stop_reason": delta.stop_reason}

    def whole(self) -> dict[str, Any]:
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls.whole()}
        if reasoning and self._reasoning_in_content:
            parts = [{"type": "text", "text": text}] if text else []
            message["content"] = [_reasoning_part(reasoning), *parts]
        elif reasoning:
            message |= _reasoning(reasoning)
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        more = {"token_ids": self._token_ids} if self._body.return_token_ids else {}
        return {**self._head, "message": message, "logprobs": logprobs, **self._end, **more}


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def _finish_reason(reason: FinishReason | None, calls: ToolCalls, body: ChatRequest) -> str | None:
    """As OpenAI: a call that the request itself named is no choice of the model's."""
    return "tool_calls" if reason == "stop" and calls and not body.names_function else reason


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
