"""vLLM's operational routes, where they have a meaning here."""

from __future__ import annotations

import importlib.metadata

import msgspec
from fastapi import APIRouter, Request, Response

from anaphora.errors import EngineUnavailable
from anaphora.server.databricks import answer_either, kind_of, read_as
from anaphora.server.envelope import json_response
from anaphora.server.service import Service


def vllm_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter()

    @router.get("/ping", response_model=None)
    @router.post("/ping", response_model=None)
    async def ping() -> Response:
        """200 while an engine takes requests, as SageMaker asks; with a key, unlike /health."""
        if not service.llm.is_ready:
            raise EngineUnavailable("no engine is ready; one is starting, try again soon")
        return json_response({"status": "ok"})

    @router.get("/version", response_model=None)
    async def version() -> Response:
        """The version of Anaphora."""
        return json_response({"version": importlib.metadata.version("anaphora")})

    @router.get("/load", response_model=None)
    async def load(request: Request) -> Response:
        """Sequences that are computed or wait; for the admin key alone, if there is one."""
        if service.tenants.has_admin_key:  # as for /metrics
            service.check_admin(request)
        stats = service.llm.stats()
        load = stats.num_running + stats.num_loading + stats.num_waiting
        return json_response({"server_load": load})

    @router.get("/server_info", response_model=None)
    async def server_info(request: Request) -> Response:
        """What the server resolved, and the engine's counters; for the admin key."""
        service.check_admin(request)
        info = msgspec.to_builtins(service.llm.info)
        return json_response({"info": info, "stats": service.llm.stats()})

    @router.post("/invocations", response_model=None)
    async def invoke(request: Request) -> Response:
        """A chat or a completion, whichever the body is, as SageMaker sends them."""
        fields = await service.read_fields(request)
        kind = kind_of(fields)
        body = await read_as(service, request, fields, kind, strict=service.strict)
        return await answer_either(service, request, body)

    return router
