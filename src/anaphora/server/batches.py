"""``/v1/batches``: a file of requests, answered when there is time."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from anaphora.errors import InvalidRequest, NotFound, RateLimited
from anaphora.server.batch_input import ENDPOINTS
from anaphora.server.batch_store import Batch, BatchStore, Progress
from anaphora.server.envelope import json_response
from anaphora.server.file_store import FileStore
from anaphora.server.files import check_seconds, list_page, parse_limit
from anaphora.server.schemas import Body
from anaphora.server.service import Service

MAX_OPEN = 100  # batches of one tenant
_MAX_LISTED, _DEFAULT_LISTED = 100, "20"
_WINDOW = re.compile(r"(\d{1,4})([mhd])")
_WINDOW_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_MIN_WINDOW = 600.0  # less would not be batch work
_MAX_WINDOW = 14 * 86400.0
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


class OutputExpiresAfter(Body):
    """``output_expires_after``."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Body):
    """The body of ``POST /v1/batches``."""

    input_file_id: str = Field(max_length=128)
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None

    def values(self) -> dict[str, Any]:
        """Columns of the batch. Raises ``InvalidRequest``."""
        if self.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        match = _WINDOW.fullmatch(self.completion_window)
        window = int(match[1]) * _WINDOW_SECONDS[match[2]] if match else 0.0
        if not _MIN_WINDOW <= window <= _MAX_WINDOW:
            raise InvalidRequest(
                'completion_window must be a time such as "24h" or "30m", from 10m to 14d',
                param="completion_window",
            )
        metadata = self.metadata or {}
        if len(metadata) > _MAX_METADATA or any(
            len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS
            for key, value in metadata.items()
        ):
            raise InvalidRequest(
                f"metadata may have {_MAX_METADATA} pairs, of {_MAX_KEY_CHARS} and "
                f"{_MAX_VALUE_CHARS} characters",
                param="metadata",
            )
        keep = self.output_expires_after
        return {
            "input_file_id": self.input_file_id,
            "endpoint": self.endpoint,
            "completion_window": self.completion_window,
            "window_seconds": window,
            "metadata": json.dumps(metadata) if metadata else None,
            "output_expires_after": None
            if keep is None
            else check_seconds(keep.seconds, "output_expires_after"),
        }


def batches_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter(prefix="/v1/batches")

    async def answer(batch: Batch) -> Response:
        progress = await service.store.run(BatchStore(service.store).progress, [batch.id])
        return json_response(describe_batch(batch, progress[batch.id]))

    @router.post("", response_model=None)
    async def create_batch(request: Request) -> Response:
        """Begin one; its input is checked afterwards, see its state."""
        store = BatchStore(service.store)
        body = await service.read(request, CreateBatch)
        values, caller = body.values(), request.state.caller
        try:
            file = await service.store.run(
                FileStore(service.store).get, caller.tenant, body.input_file_id
            )
        except NotFound as error:
            raise InvalidRequest(f"input_file_id: {error}", param="input_file_id") from None
        if file.purpose != "batch":
            raise InvalidRequest(
                f"input_file_id is a file of the purpose {file.purpose}; upload one for batch",
                param="input_file_id",
            )
        if await service.store.run(store.num_open, caller.tenant) >= MAX_OPEN:
            raise RateLimited(
                f"you have {MAX_OPEN} batches that have not ended; wait for one", retry_after=60.0
            )
        batch = await service.store.run(
            lambda: store.create(tenant=caller.tenant, key_id=caller.key_id, **values)
        )
        return await answer(batch)

    @router.get("", response_model=None)
    async def list_batches(
        request: Request, after: str | None = None, limit: str = _DEFAULT_LISTED
    ) -> Response:
        """The tenant's batches, the newest first."""
        size = parse_limit(limit, _MAX_LISTED)
        store = BatchStore(service.store)
        page = await service.store.run(store.page, request.state.tenant, after, size)
        progress = await service.store.run(store.progress, [batch.id for batch in page])
        data = [describe_batch(batch, progress[batch.id]) for batch in page]
        return json_response(list_page(data, size))

    @router.get("/{batch_id}", response_model=None)
    async def get_batch(request: Request, batch_id: str) -> Response:
        """One of them."""
        store = BatchStore(service.store)
        return await answer(await service.store.run(store.get, request.state.tenant, batch_id))

    @router.post("/{batch_id}/cancel", response_model=None)
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """No further line begins; those that run end."""
        store = BatchStore(service.store)
        return await answer(await service.store.run(store.cancel, request.state.tenant, batch_id))

    return router


def describe_batch(batch: Batch, progress: Progress) -> dict[str, Any]:
    """OpenAI's batch object."""
    times = {
        name: None if getattr(batch, name) is None else int(getattr(batch, name))
        for name in (
            *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
            *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
        )
    }
    errors = None
    if batch.errors is not None:
        errors = {"object": "list", "data": json.loads(batch.errors)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **times,
        "request_counts": {
            "total": batch.total,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "usage": {
            "input_tokens": progress.input_tokens,
            "input_tokens_details": {"cached_tokens": progress.cached_tokens},
            "output_tokens": progress.output_tokens,
            "output_tokens_details": {"reasoning_tokens": progress.reasoning_tokens},
            "total_tokens": progress.input_tokens + progress.output_tokens,
        },
        "metadata": None if batch.metadata is None else json.loads(batch.metadata),
    }
