"""``/v1/files``: what batches read and write."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from anaphora.errors import InvalidRequest
from anaphora.server.envelope import json_response, unsupported
from anaphora.server.file_store import File, FileStore
from anaphora.server.service import Service
from anaphora.server.upload import receive

MAX_LISTED = 10_000
_DEFAULT_SECONDS = 30 * 86400.0  # of a batch's input, as at OpenAI
_MIN_SECONDS, _MAX_SECONDS = 3600, 30 * 86400
_EXPIRES_AFTER = "expires_after"


def files_router(service: Service) -> APIRouter:
    """The routes, bound to ``service``."""
    router = APIRouter(prefix="/v1/files")

    def files() -> FileStore:
        return FileStore(service.store)

    @router.post("", response_model=None)
    async def create_file(request: Request) -> Response:
        """Upload a batch's input."""
        found = files()
        file_id, upload = await receive(request, found)
        try:
            purpose = upload.fields.get("purpose")
            if purpose is None:
                raise InvalidRequest('purpose is missing; send "batch"', param="purpose")
            if purpose != "batch":
                raise unsupported("purpose", 'files are for batches here: send "batch"')
            seconds = _seconds(upload.fields)
        except InvalidRequest:
            await service.store.run(found.discard, file_id)
            raise
        file = await service.store.run(
            found.complete,
            file_id,
            upload.num_bytes,
            purpose=purpose,
            filename=upload.filename or "",
            seconds=seconds,
        )
        return json_response(describe_file(file))

    @router.get("", response_model=None)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: str = str(MAX_LISTED),
        order: str = "desc",
    ) -> Response:
        """The tenant's files, the newest first."""
        if order not in ("asc", "desc"):
            raise InvalidRequest('order must be "asc" or "desc"', param="order")
        size = parse_limit(limit, MAX_LISTED)
        page = await service.store.run(
            files().list,
            request.state.tenant,
            purpose=purpose,
            after=after,
            limit=size,
            ascending=order == "asc",
        )
        return json_response(list_page(list(map(describe_file, page)), size))

    @router.get("/{file_id}", response_model=None)
    async def get_file(request: Request, file_id: str) -> Response:
        """One of them."""
        file = await service.store.run(files().get, request.state.tenant, file_id)
        return json_response(describe_file(file))

    @router.get("/{file_id}/content", response_model=None)
    async def get_content(request: Request, file_id: str) -> Response:
        """Its bytes."""
        found = files()
        file = await service.store.run(found.get, request.state.tenant, file_id)
        headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(
            service.store.iterate(found.read(file.id)),
            headers=headers,
            media_type="application/octet-stream",
        )

    @router.delete("/{file_id}", response_model=None)
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete it, unless a batch still needs it."""
        await service.store.run(files().delete, request.state.tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return router


def describe_file(file: File) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_page(data: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """OpenAI's page of ``data``, which has one element more than ``size`` if there are more."""
    page = data[:size]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(data) > size,
    }


def parse_limit(text: str, most: int) -> int:
    """The size of a page. Raises ``InvalidRequest``."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}", param="limit")
    return int(text)


def _seconds(fields: dict[str, str]) -> float:
    anchor = fields.get(f"{_EXPIRES_AFTER}[anchor]")
    text = fields.get(f"{_EXPIRES_AFTER}[seconds]")
    if anchor is None and text is None:
        return _DEFAULT_SECONDS
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) < 10
    if anchor != "created_at" or not is_number or text is None:
        raise InvalidRequest(
            f"{_EXPIRES_AFTER} needs the anchor created_at and whole seconds", param=_EXPIRES_AFTER
        )
    return check_seconds(int(text), _EXPIRES_AFTER)


def check_seconds(seconds: int, field: str) -> float:
    """How long a file is kept. Raises ``InvalidRequest``."""
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise InvalidRequest(
            f"{field}.seconds is {seconds}; it must be from {_MIN_SECONDS} to {_MAX_SECONDS}",
            param=f"{field}.seconds",
        )
    return float(seconds)
