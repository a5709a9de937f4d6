"""``/v1/models``, ``/health``, ``/ready``, ``/metrics``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from anaphora.errors import ContextTooLong, EngineUnavailable
from anaphora.server.endpoints import Endpoint
from anaphora.server.envelope import json_response
from anaphora.server.schemas import DetokenizeRequest, TokenizeRequest, check_token_id
from anaphora.server.service import Service


def models_router(service: Service) -> APIRouter:
    """What is served, and whether it is well."""
    router = APIRouter()

    @router.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        """The endpoints that the key may use, then adapters."""
        tenant = request.state.tenant
        data = [_model(service, endpoint, tenant) for endpoint in service.endpoints.visible(tenant)]
        return json_response({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def get_model(request: Request, name: str) -> Response:
        """One of them."""
        endpoint = service.endpoint(request, name)
        return json_response(_model(service, endpoint, request.state.tenant))

    @router.head("/health", response_model=None, include_in_schema=False)
    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200: the server lives. Needs no key."""
        return json_response({"status": "ok"})

    @router.head("/ready", response_model=None, include_in_schema=False)
    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 while new requests are taken; 503 without an engine, and when the server is ending.

        Needs no key.
        """
        if service.drain.is_draining:
            raise EngineUnavailable("the server is ending", retry_after=1)
        if not service.llm.is_ready:
            raise EngineUnavailable("no engine is ready; one is starting, try again soon")
        return json_response({"status": "ok"})

    @router.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        """Prometheus' text format; for the admin key alone, if there is one."""
        if service.tenants.has_admin_key:
            service.check_admin(request)
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _model(service: Service, endpoint: Endpoint, tenant: str) -> dict[str, Any]:
    adapter = service.llm.adapters.get(endpoint.adapter or "")
    root, parent = service.llm.info.name, None
    if adapter is not None:
        # As in vLLM; where things lie on this machine is for the admin alone.
        is_admin = service.tenants.is_admin(tenant)
        root = adapter.path if is_admin else PurePath(adapter.path).name
        parent = service.endpoints.model_names[0]
    return {
        "id": endpoint.name,
        "object": "model",
        "created": service.created,
        "owned_by": "anaphora",
        "root": root,
        "parent": parent,
        "max_model_len": service.llm.info.max_model_len,
        "info": msgspec.to_builtins(service.llm.info),
    }


def tokens_router(service: Service) -> APIRouter:
    """Text to token ids and back, as the model sees it."""
    router = APIRouter()
    info, tokenizer = service.llm.info, service.llm.tokenizer

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a chat, exactly as the completion routes would compute them."""
        body = await service.read(request, TokenizeRequest)
        if body.model is not None:
            service.endpoint(request, body.model)
        if body.messages is not None:
            ids = await service.encode_chat(body.messages, body)
        else:
            [ids] = await service.encode_prompts(
                [body.prompt or ""], add_special_tokens=body.add_special_tokens is not False
            )
        pieces = None
        if body.return_token_strs:
            pieces = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids]
        return json_response(
            {
                "count": len(ids),
                "max_model_len": info.max_model_len,
                "tokens": ids,
                "token_strs": pieces,
            }
        )

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        """Text of token ids, control tokens included."""
        body = await service.read(request, DetokenizeRequest)
        if body.model is not None:
            service.endpoint(request, body.model)
        if len(body.tokens) > info.max_model_len:
            raise ContextTooLong(
                f"tokens has {len(body.tokens)} ids, but the context holds {info.max_model_len}; "
                "send fewer",
                param="tokens",
            )
        for token_id in body.tokens:
            check_token_id("tokens", token_id, info.vocab_size)
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return router
