"""``/cache/pins``, ``/cache/purge`` and ``/reset_prefix_cache``: keep prefixes, and forget them.

A tenant rules over what is its own; everything else takes the admin key.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from anaphora.errors import Forbidden, InvalidRequest, UnknownModel
from anaphora.server.cache_schemas import PinRequest, PrefixBody, PurgeRequest
from anaphora.server.completions import parse_prompts
from anaphora.server.endpoints import Endpoint
from anaphora.server.envelope import json_response, unsupported
from anaphora.server.service import Service
from anaphora.server.transport import unless_disconnected
from anaphora.types import (
    CacheAnswer,
    CacheScope,
    EndPin,
    ListPins,
    PinInfo,
    PinPrefix,
    PurgeCache,
    SamplingParams,
)

_MAX_SHOWN_CHARS = 64
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
# One token is generated, because a prompt is computed only for what comes after it.
_WARM_PARAMS = SamplingParams(max_tokens=1, temperature=0)


def pins_router(service: Service) -> APIRouter:
    """Prefixes that a tenant keeps."""
    router = APIRouter()

    @router.post("/cache/pins", response_model=None)
    async def create_pin(request: Request) -> Response:
        """Keep a prefix for a while, computing it first if need be."""
        body = await service.read(request, PinRequest)
        endpoint = service.endpoint(request, body.model)
        if not service.llm.info.enable_prefix_caching:
            raise InvalidRequest("prefix caching is off on this server; there is nothing to keep")
        prompt = await _encode(service, body)
        scope = service.scope(request, body, endpoint)
        await unless_disconnected(
            request.receive, _warm(service, request, endpoint, prompt, scope, body)
        )
        keep = PinPrefix(token_ids=prompt, scope=scope, seconds=body.ttl_seconds)
        [pin] = (await service.llm.command(keep)).pins
        return json_response({**_describe(pin), "ttl_seconds": body.ttl_seconds})

    @router.get("/cache/pins", response_model=None)
    async def list_pins(request: Request) -> Response:
        """What the key's tenant keeps, the oldest first."""
        answer = await service.llm.command(ListPins(tenant=request.state.tenant))
        return json_response({"object": "list", "data": [_describe(pin) for pin in answer.pins]})

    @router.delete("/cache/pins/{pin_id}", response_model=None)
    async def delete_pin(request: Request, pin_id: str) -> Response:
        """Keep a prefix no longer."""
        pin_id = pin_id[:_MAX_SHOWN_CHARS]
        await service.llm.command(EndPin(tenant=request.state.tenant, pin_id=pin_id))
        return json_response({"object": "cache.pin.deleted", "id": pin_id, "deleted": True})

    return router


def purge_router(service: Service) -> APIRouter:
    """Forgetting, in all tiers at once."""
    router = APIRouter()

    @router.post("/cache/purge", response_model=None)
    async def purge(request: Request) -> Response:
        """Forget and erase everything, a tenant's blocks or what begins with a prefix."""
        body = await service.read(request, PurgeRequest)
        command = await _purge_command(service, request, body)
        if body.kind in ("all", "tenant"):  # what was said is as private as what was computed
            service.responses.forget(command.tenant)
        return _purged(await service.llm.command(command))

    @router.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache(
        request: Request,
        reset_running_requests: str = "false",
        reset_external: str = "false",
    ) -> Response:
        """Forget and erase everything; vLLM's name for it."""
        if "origin" in request.headers:  # no JSON body here that would keep foreign pages out
            raise Forbidden("a web page may not reset the cache; send the request without Origin")
        service.check_admin(request)
        _read_flag("reset_external", reset_external)
        if _read_flag("reset_running_requests", reset_running_requests):
            raise unsupported(
                "reset_running_requests",
                "running requests go on, and their blocks are erased when they end; leave it out",
            )
        return _purged(await service.llm.command(PurgeCache()))

    return router


async def _encode(service: Service, body: PrefixBody) -> list[int]:
    """Token ids of a prefix. Raises ``InvalidRequest`` if it does not fill a block."""
    if body.messages is not None:
        field, prefix = "messages", await service.encode_chat(body.messages, body)
    else:
        prompts = parse_prompts(body.prompt)
        if len(prompts) > 1:
            raise InvalidRequest(
                f"prompt holds {len(prompts)} prompts; send one at a time", param="prompt"
            )
        field = "prompt"
        [prefix] = await service.encode_prompts(
            prompts, add_special_tokens=body.add_special_tokens is not False
        )
    block_size = service.llm.info.block_size
    if len(prefix) < block_size:
        raise InvalidRequest(
            f"{field} has {len(prefix)} tokens, but only full blocks of {block_size} tokens are "
            f"cached; send at least {block_size} tokens",
            param=field,
        )
    return prefix


async def _warm(
    service: Service,
    request: Request,
    endpoint: Endpoint,
    prompt: list[int],
    scope: CacheScope,
    body: PinRequest,
) -> None:
    """Have ``prompt`` computed, or found, so that its blocks are in the first tier."""
    field = "prompt" if body.messages is None else "messages"
    generation = service.generation(
        request, endpoint, [prompt], _WARM_PARAMS, scope, "interactive", field
    )
    async for _ in generation.deltas():
        pass


async def _purge_command(service: Service, request: Request, body: PurgeRequest) -> PurgeCache:
    """What the engine is to do. Raises ``Forbidden`` for what is not the caller's."""
    own = request.state.tenant
    endpoint = None if body.model is None else service.endpoint(request, body.model)
    if body.kind == "all" or body.tenant not in (None, own):
        service.check_admin(request)
    tenant = body.tenant or own
    match body.kind:
        case "all":
            return PurgeCache()
        case "tenant":
            return PurgeCache(tenant=tenant)
        case "adapter":
            return _purge_adapter(service, body, tenant)
    # The tenant is given as well: what others have after a public prefix is theirs.
    prefix = await _encode(service, body)
    adapter = "" if endpoint is None else service.endpoints.digest(endpoint)
    scope = msgspec.structs.replace(body.scope(tenant), adapter=adapter)
    return PurgeCache(tenant=tenant, prefix=prefix, scope=scope)


def _purge_adapter(service: Service, body: PurgeRequest, tenant: str) -> PurgeCache:
    adapter = service.llm.adapters.get(body.adapter or "")
    if adapter is None:
        raise UnknownModel(
            f"adapter is {(body.adapter or '')[:_MAX_SHOWN_CHARS]!r}; loaded are: "
            f"{', '.join(service.llm.adapters) or 'none'}",
            param="adapter",
        )
    return PurgeCache(tenant=tenant, adapter=adapter.digest)


def _purged(answer: CacheAnswer) -> Response:
    purged = {
        tier: {"blocks": counts.blocks, "in_use": counts.in_use}
        for tier, counts in answer.purged.items()
    }
    return json_response({"object": "cache.purge", "purged": purged})


def _describe(pin: PinInfo) -> dict[str, Any]:
    return {
        "object": "cache.pin",
        "id": pin.pin_id,
        "pinned_tokens": pin.num_tokens,
        "expires_at": round(time.time() + pin.seconds_left),
    }


def _read_flag(name: str, value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() not in _FALSE:
        raise InvalidRequest(f"{name} is not a flag; write true or false", param=name)
    return False
