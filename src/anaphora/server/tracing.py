"""OpenTelemetry: a span for each request, sent to a collector. No content is ever an attribute.

Attributes have the names of OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import Scope

from anaphora.errors import ConfigError
from anaphora.server.meter import Meter

_SERVICE = "anaphora"


class Tracing:
    """Sends spans to ``endpoint``, an OTLP collector over HTTP. ``close`` it at the end."""

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:
        """Raises ``ConfigError`` without the packages. ``exporter`` is for tests."""
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs the module {error.name}; install it: "
                "pip install 'anaphora[otel]'"
            ) from None
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._extract = propagate.extract
        self._server = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR

    @contextlib.contextmanager
    def span(self, scope: Scope) -> Iterator[Any]:
        """Around one request; continues the trace that its ``traceparent`` header names."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in
                   scope["headers"] if name in (b"traceparent", b"tracestate")}  # fmt: skip
        span = self._tracer.start_span(
            scope["method"][:16], context=self._extract(headers), kind=self._server
        )
        try:
            yield span
        finally:
            span.end()

    def describe(
        self, span: Any, route: str, status: int, request_id: str, meter: Meter | None
    ) -> None:
        """What is known at the end."""
        span.update_name(f"{span.name} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("anaphora.request_id", request_id)
        if status >= 500:
            span.set_status(self._error)
        if meter is not None:
            for name, value in _attributes(meter).items():
                span.set_attribute(name, value)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _attributes(meter: Meter) -> Mapping[str, Any]:
    used, asked = meter.used, meter.asked
    found: dict[str, Any] = {
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": asked.endpoint.name,
        "gen_ai.usage.input_tokens": used.input_tokens,
        "gen_ai.usage.cache_read.input_tokens": used.cached_tokens,
        "gen_ai.usage.output_tokens": used.output_tokens,
        "anaphora.class": asked.workload,
        "anaphora.tenant": asked.caller.tenant,
    }
    if used.ttft is not None:
        found["gen_ai.server.time_to_first_token"] = used.ttft
    return found
