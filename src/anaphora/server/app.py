"""Puts the server together: ``create_app`` is a function of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from anaphora.config import Weights
from anaphora.errors import EngineError, RequestError
from anaphora.server.adapter_schemas import LoadAdapterRequest, UnloadAdapterRequest
from anaphora.server.adapters import adapters_router
from anaphora.server.admin import admin_router, usage_router
from anaphora.server.admin_schemas import NewKey, NewLimits, NewTenant
from anaphora.server.anthropic_schemas import CountTokensRequest, MessagesRequest
from anaphora.server.batches import CreateBatch, batches_router
from anaphora.server.cache import pins_router, purge_router
from anaphora.server.cache_schemas import PinRequest, PurgeRequest
from anaphora.server.chat import chat_router
from anaphora.server.completions import completions_router
from anaphora.server.databricks import databricks_router
from anaphora.server.endpoints import Endpoint, Endpoints, named_after_model
from anaphora.server.envelope import RouteError, error_response
from anaphora.server.files import files_router
from anaphora.server.gate import Gate
from anaphora.server.limits import Limiter
from anaphora.server.messages import messages_router
from anaphora.server.metrics import Metrics
from anaphora.server.models import models_router, tokens_router
from anaphora.server.responses import responses_router
from anaphora.server.responses_schemas import InputTokensRequest, ResponsesRequest
from anaphora.server.schemas import (
    AnyBody,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from anaphora.server.served import ServedLLM
from anaphora.server.service import Service, now
from anaphora.server.store import Store
from anaphora.server.tenants import Tenants
from anaphora.server.tracing import Tracing
from anaphora.server.transport import BODY_TIMEOUT, MAX_BODY_BYTES, BodyReader
from anaphora.server.vllm import vllm_router

MAX_REQUESTS = 4096  # at a time: beyond, waiting only costs memory

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/serving-endpoints/{name}/invocations": AnyBody,
    "/serving-endpoints/chat/completions": ChatRequest,
    "/serving-endpoints/completions": CompletionRequest,
    "/serving-endpoints/responses": ResponsesRequest,
    "/invocations": AnyBody,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/cache/pins": PinRequest,
    "/cache/purge": PurgeRequest,
    "/v1/batches": CreateBatch,
    "/admin/tenants": NewTenant,
    "/admin/keys": NewKey,
    "/admin/limits": NewLimits,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}


def create_app(
    llm: ServedLLM,
    tenants: Tenants,
    *,
    served_model_names: Sequence[str] = (),
    endpoints: Sequence[Endpoint] = (),
    store: Store | None = None,
    weights: Weights | None = None,
    max_requests: int = MAX_REQUESTS,
    metrics_tenants: int = 0,
    cors_origins: Sequence[str] = (),
    tracing: Tracing | None = None,
    strict: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout: float = BODY_TIMEOUT,
) -> FastAPI:
    """An ASGI app that serves ``llm`` to ``tenants``. ``app.state.service`` is its ``Service``.

    ``llm`` must be started; whoever calls this closes it, and the service, after the app has
    stopped. Clients name ``endpoints``; without any, the model goes by ``served_model_names``, or
    by ``llm.info.name`` if there are none. ``store`` keeps keys, limits and usage; without it
    nothing is kept. At most ``max_requests`` run and wait at a time. In ``/metrics`` the first
    ``metrics_tenants`` tenants are labels. Web pages of ``cors_origins`` may read
    answers. A body's unknown fields are refused if ``strict``, else ignored and named in a
    header.
    """
    weights = weights or Weights()
    metrics = Metrics(llm, num_tenants=metrics_tenants)
    service = Service(
        llm,
        Endpoints(llm, endpoints or named_after_model(served_model_names or (llm.info.name,))),
        tenants=tenants,
        limiter=Limiter(cached_weight=weights.cached, max_requests=max_requests),
        metrics=metrics,
        store=store,
        weights=weights,
        bodies=BodyReader(max_bytes=max_body_bytes, timeout=body_timeout),
        created=now(),
        strict=strict,
    )
    app = FastAPI(title="Anaphora", version="1", redirect_slashes=False)
    app.state.service = service
    app.add_middleware(Gate, tenants=tenants, metrics=metrics, drain=service.drain, tracing=tracing)
    if cors_origins:  # outermost: a browser asks before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version"],
            expose_headers=["x-request-id", "x-anaphora-cache", "retry-after"],
        )
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(EngineError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_route_error)
    openai = chat_router, completions_router, responses_router, models_router, tokens_router
    others = messages_router, databricks_router, vllm_router
    kept = files_router, batches_router
    operators = pins_router, purge_router, adapters_router, admin_router, usage_router
    for router in (*openai, *others, *kept, *operators):
        app.include_router(router(service))
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"], request.state.request_id)


async def _answer_route_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        refusal = RouteError(f"{request.method} is not allowed here; use {allowed}", status=405)
        response = await _answer_error(request, refusal)
        response.headers["allow"] = allowed
        return response
    missing = RouteError("there is no such route; see /openapi.json for all of them", status=404)
    return await _answer_error(request, missing)


def _describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI's description, with the bodies that the routes read by hand."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    template = "#/components/schemas/{model}"
    for path, body in _BODIES.items():
        schema = body.model_json_schema(ref_template=template)
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        reference = {"schema": {"$ref": template.format(model=body.__name__)}}
        operations = description["paths"][path]
        operations["put" if "put" in operations else "post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": reference},
        }
    return description
