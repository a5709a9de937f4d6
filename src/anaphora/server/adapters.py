"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: vLLM's routes, for the admin alone."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from anaphora.errors import InvalidRequest, ModelError
from anaphora.server.adapter_schemas import LoadAdapterRequest, UnloadAdapterRequest
from anaphora.server.service import Service


def adapters_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(request: Request) -> Response:
        """Load a PEFT directory of this machine; its name is then a model's name."""
        service.check_admin(request)
        body = await service.read(request, LoadAdapterRequest)
        name = body.lora_name
        if name in service.endpoints.model_names:
            raise InvalidRequest(
                f"lora_name is {name!r}, which is a name of the model; choose another",
                param="lora_name",
            )
        try:
            await service.llm.load_adapter(name, body.lora_path, load_inplace=body.load_inplace)
        except ModelError as error:
            raise InvalidRequest(f"lora_path: {error}", param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(request: Request) -> Response:
        """Take an adapter away; running requests end with it, and all tiers forget it."""
        service.check_admin(request)
        body = await service.read(request, UnloadAdapterRequest)
        await service.llm.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
