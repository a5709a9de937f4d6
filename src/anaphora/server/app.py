"""Puts the server together: ``create_app`` is a function of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from anaphora.errors import ConfigError, EngineError, RequestError
from anaphora.server.adapter_schemas import LoadAdapterRequest, UnloadAdapterRequest
from anaphora.server.adapters import adapters_router
from anaphora.server.anthropic_schemas import CountTokensRequest, MessagesRequest
from anaphora.server.cache import pins_router, purge_router
from anaphora.server.cache_schemas import PinRequest, PurgeRequest
from anaphora.server.chat import chat_router
from anaphora.server.completions import completions_router
from anaphora.server.databricks import databricks_router
from anaphora.server.envelope import RouteError, error_response
from anaphora.server.gate import Gate
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
from anaphora.server.tenants import Tenants
from anaphora.server.transport import BODY_TIMEOUT, MAX_BODY_BYTES, BodyReader
from anaphora.server.vllm import vllm_router

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
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}


def create_app(
    llm: ServedLLM,
    tenants: Tenants,
    *,
    served_model_names: Sequence[str] = (),
    metrics_tenants: int = 0,
    strict: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout: float = BODY_TIMEOUT,
) -> FastAPI:
    """An ASGI app that serves ``llm`` to ``tenants``.

    ``llm`` must be started; whoever calls this closes it after the app has stopped. The model goes
    by ``served_model_names``, or by ``llm.info.name`` if there are none. In ``/metrics`` the first
    ``metrics_tenants`` tenants are labels. A body's unknown fields are refused if ``strict``, else
    ignored and named in a header.
    """
    names = tuple(served_model_names) or (llm.info.name,)
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            f"--served-model-name is {', '.join(map(repr, names))}; give each name once, none empty"
        )
    if taken := sorted(set(names) & set(llm.adapters)):
        raise ConfigError(
            f"--lora-modules has {taken[0]!r}, which is a name of the model; choose another"
        )
    metrics = Metrics(llm, num_tenants=metrics_tenants)
    service = Service(
        llm,
        names,
        tenants=tenants,
        metrics=metrics,
        bodies=BodyReader(max_bytes=max_body_bytes, timeout=body_timeout),
        created=now(),
        strict=strict,
    )
    app = FastAPI(title="Anaphora", version="1", redirect_slashes=False)
    app.add_middleware(Gate, tenants=tenants, metrics=metrics)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(EngineError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_route_error)
    openai = chat_router, completions_router, responses_router, models_router, tokens_router
    others = messages_router, databricks_router, vllm_router
    for router in (*openai, *others, pins_router, purge_router, adapters_router):
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
        description["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": reference},
        }
    return description
