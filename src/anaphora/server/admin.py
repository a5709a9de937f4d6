"""``/admin/…``: tenants, keys and limits, for the admin key; ``/usage``, for every key its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import tempfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, StreamingResponse

from anaphora.errors import ConfigError, InvalidRequest, NotKept, StoreUnavailable
from anaphora.server.admin_schemas import NewKey, NewLimits, NewTenant
from anaphora.server.envelope import json_response
from anaphora.server.registry import ApiKey, Registry
from anaphora.server.service import Service
from anaphora.server.usage_report import Filter, csv_chunks, rows, totals, write_parquet

_FLUSH_SECONDS = 5.0
_FORMATS = ("json", "csv", "parquet")


def admin_router(service: Service) -> APIRouter:
    """The routes that change who may do how much."""
    router = APIRouter(prefix="/admin")

    def registry(request: Request) -> Registry:
        service.check_admin(request)
        return Registry(service.store)

    @router.get("/tenants", response_model=None)
    async def list_tenants(request: Request) -> Response:
        """All tenants of the database."""
        found = registry(request)
        data = await service.store.run(found.tenants)
        return json_response({"object": "list", "data": data})

    @router.post("/tenants", response_model=None)
    async def add_tenant(request: Request) -> Response:
        """A new tenant, as yet without a key."""
        found = registry(request)
        body = await service.read(request, NewTenant)
        await service.store.run(found.add_tenant, body.name)
        await service.take_over()
        return json_response({"object": "tenant", "name": body.name})

    @router.delete("/tenants/{name}", response_model=None)
    async def remove_tenant(request: Request, name: str) -> Response:
        """Ends its keys and limits and erases what is cached for it; its usage stays."""
        found = registry(request)
        await service.store.run(found.remove_tenant, name)
        await service.take_over()
        return json_response({"object": "tenant.deleted", "name": name, "deleted": True})

    @router.get("/keys", response_model=None)
    async def list_keys(request: Request, tenant: str | None = None) -> Response:
        """Keys without their secrets."""
        found = registry(request)
        keys = await service.store.run(found.keys, tenant)
        return json_response({"object": "list", "data": list(map(describe_key, keys))})

    @router.post("/keys", response_model=None)
    async def create_key(request: Request) -> Response:
        """A new key; its secret is in this answer and nowhere else."""
        found = registry(request)
        body = await service.read(request, NewKey)
        if body.admin == bool(body.tenant):
            raise InvalidRequest(
                "tenant is missing; send it, or admin: true for a key of the administrator",
                param="tenant",
            )
        key, secret = await service.store.run(
            found.create_key, body.tenant, is_admin=body.admin, seconds=body.expires_in_seconds
        )
        await service.take_over()
        return json_response({**describe_key(key), "secret": secret})

    @router.delete("/keys/{key_id}", response_model=None)
    async def revoke_key(request: Request, key_id: str) -> Response:
        """The key opens nothing from now on; requests that run end as they would."""
        found = registry(request)
        await service.store.run(found.revoke_key, key_id)
        await service.take_over()
        return json_response({"object": "key.deleted", "id": key_id, "deleted": True})

    @router.get("/limits", response_model=None)
    async def list_limits(request: Request) -> Response:
        """The limits of the database; those of endpoints are in the operator's file."""
        found = registry(request)
        limits = await service.store.run(found.limits)
        data = [
            {"tenant": tenant, "endpoint": endpoint, **dataclasses.asdict(terms)}
            for (tenant, endpoint), terms in limits.items()
        ]
        return json_response({"object": "list", "data": data})

    @router.put("/limits", response_model=None)
    async def set_limits(request: Request) -> Response:
        """Replaces the limits of a tenant at an endpoint; without any, nothing limits it there."""
        found = registry(request)
        body = await service.read(request, NewLimits)
        await service.store.run(found.set_limits, body.tenant, body.endpoint, body.terms)
        await service.take_over()
        return json_response({"object": "limits", **body.model_dump()})

    return router


def usage_router(service: Service) -> APIRouter:
    """What was used."""
    router = APIRouter()

    @router.get("/usage", response_model=None)
    async def usage(
        request: Request,
        by: str = "endpoint",
        tenant: str | None = None,
        since: str | None = None,
        until: str | None = None,
        format: str = "json",  # noqa: A002  as the client writes it
    ) -> Response:
        """Totals by columns, or as csv or parquet every row. Without the admin key one's own."""
        own = request.state.tenant
        if not service.tenants.is_admin(own):
            if tenant not in (None, own):
                service.check_admin(request)
            tenant = own
            begin = await service.store.run(Registry(service.store).since, own)
        else:
            begin = None
        start = parse_time("since", since)
        which = Filter(
            tenant=tenant,
            since=start if begin is None else max(begin, start or begin),
            until=parse_time("until", until),
        )
        if format not in _FORMATS:
            raise InvalidRequest(f"format must be one of {', '.join(_FORMATS)}", param="format")
        log = service.usage_log
        if log is not None and not await service.store.run(log.flush, _FLUSH_SECONDS):
            raise StoreUnavailable("usage rows wait until the database can be written")
        if format == "json":
            names = [name for name in by.split(",") if name]
            prices = service.endpoints.prices()
            data = await service.store.run(totals, service.store, names, which, prices)
            return json_response({"object": "list", "data": data})
        batches = rows(service.store, which)
        if format == "csv":
            return StreamingResponse(
                service.store.iterate(csv_chunks(batches)), media_type="text/csv"
            )
        with tempfile.NamedTemporaryFile(suffix=".parquet", delete=False) as file:
            path = Path(file.name)
        try:
            await service.store.run(write_parquet, batches, path)
        except BaseException as error:
            path.unlink()
            if isinstance(error, ConfigError):
                raise NotKept(f"format: {error}", param="format", code="no_parquet") from None
            raise
        media_type = "application/vnd.apache.parquet"
        return FileResponse(path, media_type=media_type, background=BackgroundTask(path.unlink))

    return router


def describe_key(key: ApiKey) -> dict[str, Any]:
    """A key for people: no secret, no digest."""
    return {"object": "key", **dataclasses.asdict(key)}


def parse_time(field: str, text: str | None) -> float | None:
    """Seconds since 1970 of such a number, a date or a date with time (UTC unless it says else).

    Raises ``InvalidRequest``.
    """
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(text)):
            return seconds
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{field} is no time; write 2026-11-30, 2026-11-30T12:00 or seconds since 1970",
            param=field,
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
