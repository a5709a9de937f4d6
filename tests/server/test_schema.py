"""Whatever our own OpenAPI document allows: no 5xx, and the envelope of the route's dialect."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings

from anaphora.fake import FakeLLM
from anaphora.server.app import create_app
from anaphora.server.envelope import dialect_of
from anaphora.server.store import MEMORY, Store
from anaphora.server.tenants import Tenants
from tests.server.test_fuzz import ENVELOPES

app = create_app(FakeLLM(output_format="harmony"), Tenants.from_flags([]), store=Store(MEMORY))
config = schemathesis.Config.from_dict(
    {
        "generation": {"mode": "positive"},  # test_fuzz.py has what is not allowed, in less time
        "phases": {"coverage": {"enabled": False}},
    }
)
schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)


@schema.hook
def map_body(context: Any, body: Any) -> Any:
    """A model that is served: what comes after that check is what matters here."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "fake"
    return body


@schema.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if path_parameters and isinstance(path_parameters.get("name"), str):
        path_parameters["name"] = "fake"
    return path_parameters


@schema.parametrize()
@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()) == ENVELOPES[dialect_of(case.path)], response.text


def test_every_route_that_reads_a_body_describes_it() -> None:
    described = app.openapi()["paths"]
    without = {"/serving-endpoints/embeddings", "/reset_prefix_cache", "/ping"}
    without |= {"/v1/files", "/v1/batches/{batch_id}/cancel"}  # a form; nothing
    posts = {path for path, methods in described.items() if "post" in methods}
    assert {path for path in posts if "requestBody" not in described[path]["post"]} == without
