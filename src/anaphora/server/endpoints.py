"""What clients name as model: an endpoint is the model or an adapter, on the terms of its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from anaphora.errors import ConfigError, UnknownModel
from anaphora.server.registry import ANY, LimitTerms
from anaphora.server.served import ServedLLM
from anaphora.types import Workload

_MAX_SHOWN_NAME_CHARS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """Of a million tokens each, in whatever currency the operator counts in."""

    input: float = 0.0
    cached_input: float = 0.0
    output: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One name that clients send, and on which terms it is served."""

    name: str
    adapter: str | None = None  # the name of a loaded one; None: the model itself
    workload: Workload = "interactive"
    model_units: int | None = None  # bought, for the class provisioned
    max_output_tokens: int | None = None  # of an answer; without max_tokens it is so many
    tenants: frozenset[str] | None = None  # who may use it; None: all
    limits: LimitTerms | None = None  # of each tenant here
    price: Price | None = None

    def workload_of(self, asked: Workload) -> Workload:
        """A client may lower its request to batch work, never raise it."""
        return "batch" if asked == "batch" else self.workload


class Endpoints:
    """All endpoints: those that the operator configured, and loaded adapters by their own names."""

    def __init__(self, llm: ServedLLM, configured: Iterable[Endpoint]) -> None:
        """Raises ``ConfigError`` for a name that is empty, or stands for two things."""
        self._llm = llm
        endpoints = list(configured)
        self._configured = {endpoint.name: endpoint for endpoint in endpoints}
        if not all(self._configured) or len(self._configured) < len(endpoints):
            names = ", ".join(repr(endpoint.name) for endpoint in endpoints)
            raise ConfigError(f"--served-model-name is {names}; give each name once, none empty")
        for endpoint in endpoints:
            is_lost = endpoint.adapter is not None and endpoint.adapter not in llm.adapters
            if is_lost and len(llm.adapters) >= llm.info.max_loras:
                raise ConfigError(
                    f"the endpoint {endpoint.name!r} has the adapter {endpoint.adapter!r}, which "
                    "is not loaded and cannot be later; give it to --lora-modules, or raise "
                    "--max-loras"
                )
            if endpoint.adapter is None and endpoint.name in llm.adapters:
                raise ConfigError(
                    f"--lora-modules has {endpoint.name!r}, which is a name of the model; choose "
                    "another"
                )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of endpoints that an adapter may not take."""
        return tuple(self._configured)

    def all(self) -> list[Endpoint]:
        """Configured ones, then adapters that none of them serves."""
        shadowed = {e.adapter for e in self._configured.values()}
        adapters = [name for name in self._llm.adapters if name not in shadowed]
        return [*self._configured.values(), *[Endpoint(name=n, adapter=n) for n in adapters]]

    def visible(self, tenant: str) -> list[Endpoint]:
        """What ``tenant`` may use."""
        return [endpoint for endpoint in self.all() if _may_use(endpoint, tenant)]

    def get(self, name: str, tenant: str) -> Endpoint:
        """The endpoint of that name. Raises ``UnknownModel``, also for what is not the tenant's."""
        endpoint = self._configured.get(name)
        if endpoint is None and name in self._llm.adapters and not self._has_endpoint(name):
            endpoint = Endpoint(name=name, adapter=name)
        if endpoint is None or not _may_use(endpoint, tenant):
            raise UnknownModel(
                f"model is {name[:_MAX_SHOWN_NAME_CHARS]!r}, which is not served here; "
                f"use {' or '.join(e.name for e in self.visible(tenant)) or 'another key'}",
                param="model",
            )
        return endpoint

    def digest(self, endpoint: Endpoint) -> str:
        """Of the endpoint's adapter as it is now, empty for the model. Raises ``UnknownModel``."""
        if endpoint.adapter is None:
            return ""
        adapter = self._llm.adapters.get(endpoint.adapter)
        if adapter is None:
            raise UnknownModel(
                f"model is {endpoint.name!r}, whose adapter is not loaded now; use another",
                param="model",
            )
        return adapter.digest

    def prices(self) -> Mapping[str, Price]:
        """Of the endpoints that have one."""
        return {e.name: e.price for e in self._configured.values() if e.price is not None}

    def limits(self) -> Mapping[tuple[str, str], LimitTerms]:
        """Those that the endpoints themselves set for each tenant."""
        with_limits = [e for e in self._configured.values() if e.limits is not None]
        return {(ANY, e.name): e.limits for e in with_limits if e.limits is not None}

    def _has_endpoint(self, adapter: str) -> bool:
        """Whether an adapter is served under an endpoint's terms, and not under its own name."""
        return any(endpoint.adapter == adapter for endpoint in self._configured.values())


def named_after_model(names: Sequence[str]) -> list[Endpoint]:
    """Without a configuration: interactive endpoints of the model, one for each of its names."""
    return [Endpoint(name=name) for name in names]


def _may_use(endpoint: Endpoint, tenant: str) -> bool:
    return endpoint.tenants is None or tenant in endpoint.tenants
