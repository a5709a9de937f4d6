"""Databricks' serving endpoints: each name of the model, and each adapter, is one.

Bodies are OpenAI's, with a few fields more, and unknown fields are always refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from anaphora.errors import InvalidRequest, UnknownModel
from anaphora.server.chat import answer_chat
from anaphora.server.completions import answer_completion
from anaphora.server.endpoints import Endpoint
from anaphora.server.envelope import describe, json_response, unsupported
from anaphora.server.responses import answer_response
from anaphora.server.responses_schemas import ResponsesRequest
from anaphora.server.schemas import ChatRequest, CompletionRequest
from anaphora.server.service import Service
from anaphora.server.translate import validate
from anaphora.server.unknown import note_unknown

SERVED_MODEL_HEADER = "served-model-name"
_MAX_SHOWN_CHARS = 64
# Of models that are not language models.
_OTHER_INPUTS = ("dataframe_records", "dataframe_split", "inputs", "instances", "input")
# Field → its type. They name a request for its sender's records.
_LABELS: dict[str, type] = {"client_request_id": str, "usage_context": dict}


def databricks_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter()

    @router.post("/serving-endpoints/{name:path}/invocations", response_model=None)
    async def invoke(request: Request, name: str) -> Response:
        """Answer a chat, or complete a prompt, whichever the body has."""
        fields = await _read(service, request)
        if fields.get("model", name) != name:
            raise InvalidRequest("model is not the endpoint's name; leave it out", param="model")
        fields["model"] = name
        return await _answer(service, request, fields, kind_of(fields))

    @router.post("/serving-endpoints/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """A chat whose ``model`` is an endpoint's name."""
        return await _answer(service, request, await _read(service, request), ChatRequest)

    @router.post("/serving-endpoints/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """A completion whose ``model`` is an endpoint's name."""
        return await _answer(service, request, await _read(service, request), CompletionRequest)

    @router.post("/serving-endpoints/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """A response whose ``model`` is an endpoint's name."""
        body = await service.read(request, ResponsesRequest, strict=True)
        return await answer_response(service, request, body)

    @router.post("/serving-endpoints/embeddings", response_model=None)
    async def embeddings() -> Response:
        """Refused: no endpoint here embeds."""
        raise InvalidRequest("no endpoint here is an embedding model; send a chat or a prompt")

    @router.get("/serving-endpoints", response_model=None)
    @router.get("/api/2.0/serving-endpoints/", response_model=None, include_in_schema=False)
    @router.get("/api/2.0/serving-endpoints", response_model=None)
    async def list_endpoints(request: Request) -> Response:
        """All endpoints."""
        return json_response({"endpoints": endpoints(service, request.state.tenant)})

    @router.get("/api/2.0/serving-endpoints/{name:path}", response_model=None)
    async def get_endpoint(request: Request, name: str) -> Response:
        """One endpoint."""
        mine = endpoints(service, request.state.tenant)
        found = [endpoint for endpoint in mine if endpoint["name"] == name]
        if not found:
            raise UnknownModel(f"Endpoint with name '{name[:_MAX_SHOWN_CHARS]}' does not exist.")
        return json_response(found[0])

    return router


def endpoints(service: Service, tenant: str) -> list[dict[str, Any]]:
    """The endpoints that ``tenant`` may use, as Databricks describes them."""
    return [_endpoint(service, endpoint) for endpoint in service.endpoints.visible(tenant)]


def _endpoint(service: Service, endpoint: Endpoint) -> dict[str, Any]:
    name = endpoint.name
    milliseconds = service.created * 1000
    is_ready, units = service.llm.is_ready, endpoint.model_units
    entity = {
        "name": name,
        "entity_name": service.llm.info.name,
        "entity_version": "1",
        **({} if units is None else {"provisioned_model_units": units}),
        "state": {"deployment": "DEPLOYMENT_READY" if is_ready else "DEPLOYMENT_RECOVERING"},
    }
    return {
        "id": name,
        "name": name,
        "task": "llm/v1/chat" if service.llm.chat_template else "llm/v1/completions",
        "creation_timestamp": milliseconds,
        "last_updated_timestamp": milliseconds,
        "state": {"ready": "READY" if is_ready else "NOT_READY", "config_update": "NOT_UPDATING"},
        "config": {"served_entities": [entity]},
        "permission_level": "CAN_QUERY",
    }


def kind_of(fields: Mapping[str, Any]) -> type[ChatRequest] | type[CompletionRequest]:
    """What a body is. Raises ``InvalidRequest`` if it is neither a chat nor a completion."""
    for field, kind in (("messages", ChatRequest), ("prompt", CompletionRequest)):
        if field in fields:
            return kind
    raise InvalidRequest("messages is missing; send messages or a prompt", param="messages")


async def read_as(
    service: Service,
    request: Request,
    fields: Mapping[str, Any],
    kind: type[ChatRequest] | type[CompletionRequest],
    *,
    strict: bool,
) -> ChatRequest | CompletionRequest:
    """The checked body of what ``kind_of`` found. Unknown fields are refused if ``strict``."""
    body: ChatRequest | CompletionRequest
    body = await service.translate(request, lambda: validate(kind, fields))
    note_unknown(request, body, strict=strict)
    return body


async def answer_either(
    service: Service, request: Request, body: ChatRequest | CompletionRequest, **options: bool
) -> Response:
    """Answer a chat or a completion; ``options`` are those of chats."""
    if isinstance(body, ChatRequest):
        return await answer_chat(service, request, body, **options)
    return await answer_completion(service, request, body)


async def _read(service: Service, request: Request) -> dict[str, Any]:
    """The fields of a chat or a completion, without those that are Databricks' own."""
    fields = await service.read_fields(request)
    for field in _OTHER_INPUTS:
        if field in fields:
            raise unsupported(field, "send messages or a prompt")
    for field, kind in _LABELS.items():
        value = fields.pop(field, None)
        if value is not None and not isinstance(value, kind):
            what = "a string" if kind is str else "an object"
            raise InvalidRequest(f"{field} is {describe(value)}; it must be {what}", param=field)
    return _extra_params(fields.pop("extra_params", None)) | fields


def _extra_params(params: Any) -> dict[str, Any]:
    """Further fields as strings: one that is JSON stands for its value."""
    if params is None:
        return {}
    if not isinstance(params, dict) or not all(isinstance(v, str) for v in params.values()):
        raise InvalidRequest("extra_params must be an object of strings", param="extra_params")
    return {name: _value(text) for name, text in params.items()}


def _value(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return text


async def _answer(
    service: Service,
    request: Request,
    fields: Mapping[str, Any],
    kind: type[ChatRequest] | type[CompletionRequest],
) -> Response:
    body = await read_as(service, request, fields, kind, strict=True)
    response = await answer_either(service, request, body, reasoning_in_content=True)
    response.headers[SERVED_MODEL_HEADER] = body.model
    return response
