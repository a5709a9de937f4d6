"""Anaphora serves open-weight language models and computes every prompt prefix once.

The public names load when they are first used, so that ``import anaphora`` and the command line
stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anaphora.async_llm import AsyncLLM
    from anaphora.batch.client import Client
    from anaphora.config import EngineConfig
    from anaphora.constraints import Constraint
    from anaphora.errors import AnaphoraError
    from anaphora.fake import FakeLLM
    from anaphora.llm import LLM, Completion
    from anaphora.types import CacheScope, SamplingParams

_HOMES = {
    "AnaphoraError": "errors",
    "AsyncLLM": "async_llm",
    "CacheScope": "types",
    "Client": "batch.client",
    "Completion": "llm",
    "Constraint": "constraints",
    "EngineConfig": "config",
    "FakeLLM": "fake",
    "LLM": "llm",
    "SamplingParams": "types",
}

__all__ = [
    "LLM",
    "AnaphoraError",
    "AsyncLLM",
    "CacheScope",
    "Client",
    "Completion",
    "Constraint",
    "EngineConfig",
    "FakeLLM",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("anaphora")
    if name not in _HOMES:
        raise AttributeError(f"module 'anaphora' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anaphora.{_HOMES[name]}"), name)
