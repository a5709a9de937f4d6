"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic has them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from anaphora.errors import InvalidRequest
from anaphora.server.anthropic_schemas import (
    MARK_SECONDS,
    NAMES,
    CountTokensRequest,
    MessagesRequest,
    Translation,
    to_chat,
)
from anaphora.server.chat import begin_chat
from anaphora.server.envelope import error_body, json_response
from anaphora.server.generation import Generation
from anaphora.server.marks import MarkedPrefixes
from anaphora.server.service import Service
from anaphora.server.translate import naming
from anaphora.server.transport import EventStream, encode_event, unless_disconnected
from anaphora.types import CompletionDelta

Event = tuple[str, dict[str, Any]]
# Kind of a delta → the field that has what is added. Signatures are empty.
_ADDED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
# As answers of OpenAI name the class → as Anthropic does.
_TIERS = {"priority": "priority", "default": "standard", "flex": "batch"}


def messages_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter()
    marked = MarkedPrefixes(service.llm)

    @router.post("/v1/messages", response_model=None)
    async def create_message(request: Request) -> Response:
        """Answer a chat; what it marks with ``cache_control`` is kept for a while."""
        body = await service.read(request, MessagesRequest)
        translation = await service.translate(request, lambda: to_chat(body))
        with naming(NAMES, translation.places):
            generation = await begin_chat(service, request, translation.chat)
        answer = _Answer(service, body, translation, generation, request.state.request_id)
        events = answer.events(marked)
        if not body.stream:
            with naming(NAMES, translation.places):  # a constraint is tried when work begins
                content = await unless_disconnected(request.receive, _whole(events))
            return json_response(content, headers=generation.headers())
        encoded = _encoded(events)
        with naming(NAMES, translation.places):
            first = await unless_disconnected(request.receive, anext(encoded))
        request_id = request.state.request_id
        return EventStream(
            first,
            encoded,
            request_id=request_id,
            headers=generation.headers(),
            error_event=lambda error: (
                b"event: error\ndata: " + error_body(error, "anthropic", request_id) + b"\n\n"
            ),
            end=b"",
        )

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a message has; nothing is computed."""
        body = await service.read(request, CountTokensRequest)
        service.endpoint(request, body.model)
        translation = await service.translate(request, lambda: to_chat(body))
        with naming(NAMES, translation.places):
            prompt = await service.encode_chat(translation.chat.messages, translation.chat)
        return json_response({"input_tokens": len(prompt)})

    return router


async def _marked_prefixes(
    service: Service, translation: Translation, prompt: Sequence[int]
) -> list[tuple[Sequence[int], int]]:
    """The parts of ``prompt`` up to the last mark of each lifetime, with its seconds, longer first.

    A beginning that the template cannot render by itself is not kept: marks are hints.
    """
    chat = translation.chat
    prefixes = []
    for mark in {mark.seconds: mark for mark in translation.marks}.values():
        fields: dict[str, Any] = {"model": chat.model, "messages": mark.messages}
        beginning = chat.model_copy(
            update={
                "tools": mark.tools or None,
                "tool_choice": None,
                "add_generation_prompt": False,
                "continue_final_message": None,
            }
        )
        try:
            messages = type(chat).model_validate(fields).messages
            alone = await service.encode_chat(messages, beginning)
        except InvalidRequest:
            continue
        num_equal = _num_equal(prompt, alone)
        if num_equal >= service.llm.info.block_size:
            prefixes.append((prompt[:num_equal], mark.seconds))
    return prefixes


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def _whole(events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    """The answer that a stream of ``events`` adds up to."""
    message: dict[str, Any] = {}
    pieces: list[list[str]] = []  # of each block
    async with aclosing(events):
        async for kind, event in events:
            if kind == "message_start":
                message = event["message"]
            elif kind == "content_block_start":
                message["content"].append(event["content_block"])
                pieces.append([])
            elif kind == "content_block_delta":
                field = _ADDED[event["delta"]["type"]]
                pieces[event["index"]].append(event["delta"][field])
            elif kind == "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for block, added in zip(message["content"], pieces, strict=True):
        text = "".join(added)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
    return message


def _arguments(text: str) -> dict[str, Any]:
    """What a call's arguments say, as far as they were written."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for kind, event in events:
            yield encode_event({"type": kind, **event}, kind)


class _Answer:
    """One generation as Anthropic's events."""

    def __init__(
        self,
        service: Service,
        body: MessagesRequest,
        translation: Translation,
        generation: Generation,
        request_id: str,
    ) -> None:
        self._service = service
        self._body = body
        self._translation = translation
        self._tier = _TIERS[generation.service_tier]
        self._generation = generation
        self._id = f"msg_{request_id}"
        self._shows_thinking = body.thinking is None or not (
            body.thinking.type == "disabled" or body.thinking.display == "omitted"
        )
        self._written = {"5m": 0, "1h": 0}
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that is being written
        self._has_calls = False

    async def events(self, marked: MarkedPrefixes) -> AsyncGenerator[Event, None]:
        """All events of a stream."""
        has_started = False
        end: CompletionDelta | None = None
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if not has_started:
                    has_started = True
                    await self._keep(marked)  # what was marked is computed by now
                    yield self._start()
                    yield "ping", {}
                if self._body.max_tokens:
                    for event in self._content(delta):
                        yield event
                if delta.finish_reason is not None:
                    end = delta
        for event in self._close():
            yield event
        assert end is not None  # else deltas would have raised
        yield self._end(end)
        yield "message_stop", {}

    async def _keep(self, marked: MarkedPrefixes) -> None:
        """Pin what was marked, and count what of it was not cached before."""
        [prompt], block_size = self._generation.prompts, self._service.llm.info.block_size
        cached = self._generation.usage()["prompt_tokens_details"]["cached_tokens"]
        num_known = -(-cached // block_size) * block_size
        for prefix, seconds in await _marked_prefixes(self._service, self._translation, prompt):
            num_kept = await marked.keep(prefix, self._generation.scope, seconds)
            ttl = next(name for name, value in MARK_SECONDS.items() if value == seconds)
            self._written[ttl] = max(0, num_kept - num_known)
            num_known = max(num_known, num_kept)

    def _usage(self) -> dict[str, Any]:
        """Anthropic's counts add up to the prompt; OpenAI's cached tokens are part of it."""
        usage = self._generation.usage()
        read = usage["prompt_tokens_details"]["cached_tokens"]
        written = sum(self._written.values())
        return {
            "input_tokens": usage["prompt_tokens"] - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": usage["completion_tokens"] if self._body.max_tokens else 0,
        }

    def _start(self) -> Event:
        created = {f"ephemeral_{ttl}_input_tokens": num for ttl, num in self._written.items()}
        usage = {**self._usage(), "cache_creation": created, "service_tier": self._tier}
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return "message_start", {"message": message}

    def _content(self, delta: CompletionDelta) -> Iterator[Event]:
        if delta.reasoning and self._shows_thinking:
            yield from self._block("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.text:
            yield from self._block("text", {"text": ""})
            yield self._delta("text_delta", text=delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._close()
                self._has_calls = True
                call_id = f"toolu_{secrets.token_hex(12)}"
                head = {"id": call_id, "name": call.name, "input": {}}
                yield from self._block("tool_use", head)
            yield self._delta("input_json_delta", partial_json=call.arguments)

    def _block(self, kind: str, head: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        block = {"index": self._num_blocks, "content_block": {"type": kind, **head}}
        self._num_blocks += 1
        yield "content_block_start", block

    def _delta(self, kind: str, **fields: str) -> Event:
        index = self._num_blocks - 1
        return "content_block_delta", {"index": index, "delta": {"type": kind, **fields}}

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature="")
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._num_blocks - 1}

    def _end(self, last: CompletionDelta) -> Event:
        reason, sequence = "end_turn", None
        if last.finish_reason == "length" or not self._body.max_tokens:
            reason = "max_tokens"
        elif self._has_calls:
            reason = "tool_use"
        elif isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        change = {"stop_reason": reason, "stop_sequence": sequence}
        return "message_delta", {"delta": change, "usage": self._usage()}
