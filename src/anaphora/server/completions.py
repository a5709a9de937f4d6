"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import describe, json_response
from anaphora.server.generation import Generation
from anaphora.server.logprobs import CompletionLogprobs, prompt_logprobs
from anaphora.server.schemas import CompletionRequest, Prompt
from anaphora.server.service import MAX_CHOICES_PER_REQUEST, Service, now
from anaphora.server.transport import EventStream, encode_event, unless_disconnected
from anaphora.types import CompletionDelta, TokenLogprob

_SHAPES = "send a string, a list of strings, a list of token ids or a list of such lists"


def completions_router(service: Service) -> APIRouter:
    """The route, bound to ``service``."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create_completion(request: Request) -> Response:
        """Continue one or more raw prompts."""
        body = await service.read(request, CompletionRequest)
        return await answer_completion(service, request, body)

    return router


async def answer_completion(
    service: Service, request: Request, body: CompletionRequest
) -> Response:
    """The whole answer or a stream of chunks, as OpenAI's."""
    endpoint = service.endpoint(request, body.model)
    params = service.sampling_params(body)
    given = parse_prompts(body.prompt)
    encoded = await service.encode_prompts(
        given, add_special_tokens=body.add_special_tokens is not False
    )
    prompts = [body.truncate(prompt, service.llm.info.max_model_len) for prompt in encoded]
    generation = service.generation(
        request,
        endpoint,
        prompts,
        params,
        service.scope(request, body, endpoint),
        body.workload,
        "prompt",
    )
    is_cut = body.truncate_prompt_tokens is not None
    echoes = _echoes(service, prompts if is_cut else given) if body.echo else [""] * len(given)
    answer = _Completion(
        service, body, generation, echoes, request_id=request.state.request_id, n=params.n
    )
    if not body.stream:
        content = await unless_disconnected(request.receive, answer.whole())
        return json_response(content, headers=generation.headers())
    events = answer.events()
    first = await unless_disconnected(request.receive, anext(events))
    return EventStream(
        first, events, request_id=request.state.request_id, headers=generation.headers()
    )


def parse_prompts(prompt: object) -> list[Prompt]:
    """The prompts in any of the four shapes. Raises ``InvalidRequest`` that names the element."""
    if isinstance(prompt, str) or _is_token_list(prompt):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list):
        prompts = prompt
    else:
        raise InvalidRequest(f"prompt is {describe(prompt)}; {_SHAPES}", param="prompt")
    if len(prompts) > MAX_CHOICES_PER_REQUEST:
        raise InvalidRequest(
            f"prompt has {len(prompts)} elements; at most {MAX_CHOICES_PER_REQUEST} are allowed",
            param="prompt",
        )
    for where, value in _faults(prompts):
        raise InvalidRequest(f"{where} is {describe(value)}; {_SHAPES}", param=where)
    if not all(prompts) or not prompts:
        raise InvalidRequest("prompt is empty; send at least one token", param="prompt")
    if any(type(element) is not type(prompts[0]) for element in prompts):
        raise InvalidRequest(f"prompt mixes strings and token ids; {_SHAPES}", param="prompt")
    return prompts


def _faults(prompts: list[Any]) -> Iterator[tuple[str, Any]]:
    """What is neither a text nor a list of token ids, by its place."""
    is_one_list = bool(prompts) and type(prompts[0]) is int  # of token ids, one of them wrong
    for index, element in enumerate(prompts):
        if isinstance(element, list) and element and not is_one_list:
            for position, item in enumerate(element):
                if type(item) is not int:
                    yield f"prompt[{index}][{position}]", item
        elif type(element) is not (int if is_one_list else str):
            yield f"prompt[{index}]", element


def _is_token_list(value: object) -> bool:
    # bool is an int in Python but not in JSON
    return isinstance(value, list) and set(map(type, value)) == {int}


def _echoes(service: Service, prompts: Sequence[Prompt]) -> list[str]:
    decode = service.llm.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


class _Completion:
    """Formats one generation, whole or as chunks."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        generation: Generation,
        echoes: Sequence[str],
        *,
        request_id: str,
        n: int,
    ) -> None:
        self._body = body
        self._echoed: set[int] = set()  # choices whose prompt has its log-probabilities
        self._generation = generation
        self._tokenizer = service.llm.tokenizer
        self._echo_of_choice = [echo for echo in echoes for _ in range(n)]
        self._prompt_of_choice = [prompt for prompt in generation.prompts for _ in range(n)]
        self._logprobs = [
            CompletionLogprobs(service.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
            for _ in range(generation.num_choices)
        ]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": now(),
            "model": body.model,
            "system_fingerprint": service.fingerprint(generation.endpoint),
            "service_tier": generation.service_tier,
        }

    async def whole(self) -> dict[str, Any]:
        """The complete response body."""
        texts = [[echo] for echo in self._echo_of_choice]
        logprobs: list[dict[str, Any] | None] = [None] * len(texts)
        ends: dict[int, CompletionDelta] = {}
        token_ids: list[list[int]] = [[] for _ in texts]
        of_prompts: list[tuple[TokenLogprob, ...]] = [()] * len(texts)
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.index].append(delta.text)
                logprobs[delta.index] = _joined(logprobs[delta.index], self._new_logprobs(delta))
                token_ids[delta.index] += delta.token_ids
                of_prompts[delta.index] = of_prompts[delta.index] or delta.prompt_logprobs
                if delta.finish_reason is not None:
                    ends[delta.index] = delta
        choices = [
            self._choice(ends[index], "".join(pieces), logprobs[index])
            for index, pieces in enumerate(texts)
        ]
        if self._body.return_token_ids:
            for choice, prompt, ids in zip(choices, self._prompt_of_choice, token_ids, strict=True):
                choice |= {"prompt_token_ids": prompt, "token_ids": ids}
        if self._body.prompt_logprobs is not None:
            for choice, found in zip(choices, of_prompts, strict=True):
                choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, found)
        usage = self._generation.usage()
        return {**self._head, "choices": choices, "usage": usage, **self._diagnostics()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, each as an event."""
        started: set[int] = set()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                text = delta.text
                more: dict[str, Any] = {}
                if self._body.return_token_ids:
                    more["token_ids"] = delta.token_ids
                    if delta.index not in started:
                        more["prompt_token_ids"] = self._prompt_of_choice[delta.index]
                if delta.index not in started:
                    started.add(delta.index)
                    text = self._echo_of_choice[delta.index] + text
                if text or delta.logprobs or more or delta.finish_reason is not None:
                    choice = self._choice(delta, text, self._new_logprobs(delta))
                    yield self._chunk([{**choice, **more}])
        if self._body.includes_usage or self._body.cache_diagnostics:
            yield self._chunk([], usage=self._generation.usage(), **self._diagnostics())

    def _diagnostics(self) -> dict[str, Any]:
        if not self._body.cache_diagnostics:
            return {}
        return {"cache_diagnostics": self._generation.diagnostics()}

    def _new_logprobs(self, delta: CompletionDelta) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        lists = self._logprobs[delta.index]
        of_prompt = None
        if self._body.echo and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            of_prompt = lists.add_prompt(
                self._prompt_of_choice[delta.index][0],
                delta.prompt_logprobs,
                self._body.logprobs,
                self._echo_of_choice[delta.index],
            )
        return _joined(of_prompt, lists.add(delta.logprobs))

    def _choice(
        self, delta: CompletionDelta, text: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        **more: object,
    ) -> bytes:
        chunk = {**self._head, "choices": choices, **more}
        if self._body.includes_usage:
            chunk["usage"] = usage
        return encode_event(chunk)


def _joined(before: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or new is None:
        return before or new
    return {name: before[name] + new[name] for name in new}
