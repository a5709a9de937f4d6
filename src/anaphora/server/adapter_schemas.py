"""Bodies of the routes that load and unload adapters. Named as in vLLM."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from anaphora.server.schemas import Body

_MAX_PATH_CHARS = 4096


class LoadAdapterRequest(Body):
    """The body of ``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, max_length=_MAX_PATH_CHARS)
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """The body of ``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1)
