"""Tenants, their keys and their limits, as the database keeps them."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import delete, insert, select, update

from anaphora.errors import Conflict, InvalidRequest, NotFound
from anaphora.server import batch_store, file_store
from anaphora.server.store import Store, bump_revision
from anaphora.server.tables import API_KEYS, LIMITS, TENANTS
from anaphora.server.tenants import (
    ADMIN_TENANT,
    Caller,
    KnownKey,
    check_tenant_name,
    digest_of,
)

ANY = "*"
KEY_PREFIX = "sk-anaphora-"
_HINT_CHARS = 4
_ENDPOINT = re.compile(r"[!-~]{1,128}")


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key without its secret."""

    id: str
    tenant: str
    hint: str
    is_admin: bool
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitTerms:
    """What one tenant may do at one endpoint, or at all together. None: as much as it likes."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Registry:
    """Reads and changes what decides who may do how much. All methods block."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def add_tenant(self, name: str) -> None:
        """Raises ``InvalidRequest`` for the name and ``Conflict`` if there is one."""
        check_tenant_name(name)
        with self._store.write() as connection:
            if connection.execute(select(TENANTS).where(TENANTS.c.name == name)).first():
                raise Conflict(f"there is a tenant {name!r} already; choose another name")
            connection.execute(insert(TENANTS), {"name": name, "created_at": self._clock()})
            bump_revision(connection)

    def remove_tenant(self, name: str) -> None:
        """Ends its keys, limits, files and batches; its usage stays. Raises ``NotFound``."""
        with self._store.write() as connection:
            if connection.execute(delete(TENANTS).where(TENANTS.c.name == name)).rowcount == 0:
                raise NotFound(f"there is no tenant {name!r}; 'anaphora tenants list' has all")
            connection.execute(delete(API_KEYS).where(API_KEYS.c.tenant == name))
            connection.execute(delete(LIMITS).where(LIMITS.c.tenant == name))
            batch_store.delete_of_tenant(connection, name)
            file_store.delete_of_tenant(connection, name)
            bump_revision(connection)

    def tenants(self) -> list[dict[str, Any]]:
        """All of them with the number of keys that work now, by name."""
        usable = dict.fromkeys(self._names(), 0)
        for key in self.usable_keys():
            if key.tenant in usable:
                usable[key.tenant] += 1
        with self._store.read() as connection:
            rows = connection.execute(select(TENANTS).order_by(TENANTS.c.name)).mappings()
            return [{**row, "num_keys": usable[row["name"]]} for row in rows]

    def since(self, name: str) -> float | None:
        """When the tenant of this name was added: an earlier one of the name was somebody else."""
        with self._store.read() as connection:
            query = select(TENANTS.c.created_at).where(TENANTS.c.name == name)
            return connection.execute(query).scalar()

    def _names(self) -> list[str]:
        with self._store.read() as connection:
            return list(connection.execute(select(TENANTS.c.name)).scalars())

    def create_key(
        self, tenant: str, *, is_admin: bool = False, seconds: float | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is shown this once; usable for ``seconds``.

        Raises ``NotFound`` and ``InvalidRequest``.
        """
        if seconds is not None and not 0 < seconds < 1e10:
            raise InvalidRequest(
                f"expires_in_seconds is {seconds:g}; it must be above 0 and below 1e10",
                param="expires_in_seconds",
            )
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        key = ApiKey(
            id=f"key_{secrets.token_hex(8)}",
            tenant=ADMIN_TENANT if is_admin else tenant,
            hint=secret[-_HINT_CHARS:],
            is_admin=is_admin,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
            revoked_at=None,
        )
        with self._store.write() as connection:
            known = select(TENANTS).where(TENANTS.c.name == tenant)
            if not is_admin and not connection.execute(known).first():
                raise NotFound(
                    f"there is no tenant {tenant!r}; 'anaphora tenants add {tenant}' makes it"
                )
            row = {**dataclasses.asdict(key), "digest": digest_of(secret).hex()}
            connection.execute(insert(API_KEYS), row)
            bump_revision(connection)
        return key, secret

    def revoke_key(self, key_id: str) -> None:
        """From now on it opens nothing. Raises ``NotFound``."""
        with self._store.write() as connection:
            change = update(API_KEYS).where(
                API_KEYS.c.id == key_id, API_KEYS.c.revoked_at.is_(None)
            )
            if connection.execute(change.values(revoked_at=self._clock())).rowcount == 0:
                raise NotFound(
                    f"there is no key {key_id!r} that could be revoked; 'anaphora keys list' "
                    "has all"
                )
            bump_revision(connection)

    def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """All keys, also those that work no more, the oldest first."""
        columns = [API_KEYS.c[field.name] for field in dataclasses.fields(ApiKey)]
        query = select(*columns).order_by(API_KEYS.c.created_at, API_KEYS.c.id)
        if tenant is not None:
            query = query.where(API_KEYS.c.tenant == tenant)
        with self._store.read() as connection:
            return [ApiKey(*row) for row in connection.execute(query)]

    def usable_keys(self) -> list[ApiKey]:
        """Those that are neither revoked nor expired."""
        now = self._clock()
        return [
            key
            for key in self.keys()
            if key.revoked_at is None and (key.expires_at is None or key.expires_at > now)
        ]

    def digests(self) -> dict[str, bytes]:
        """Key id → SHA-256 of its secret."""
        with self._store.read() as connection:
            rows = connection.execute(select(API_KEYS.c.id, API_KEYS.c.digest))
            return {key_id: bytes.fromhex(digest) for key_id, digest in rows}

    def set_limits(self, tenant: str, endpoint: str, terms: LimitTerms) -> None:
        """Replaces what held for the two; without any limit in ``terms`` nothing holds any more.

        Each may be ``*``: every tenant without limits of its own, all endpoints together.
        """
        if tenant != ANY:
            check_tenant_name(tenant)
        if not _ENDPOINT.fullmatch(endpoint):
            raise InvalidRequest(
                "endpoint must be 1 to 128 printable characters without spaces, or *",
                param="endpoint",
            )
        values = dataclasses.asdict(terms)
        for name, value in values.items():
            if value is not None and not 0 <= value < 2**53:
                raise InvalidRequest(
                    f"{name} is {value}; it must be 0 or more and below 2^53", param=name
                )
        with self._store.write() as connection:
            same = (LIMITS.c.tenant == tenant) & (LIMITS.c.endpoint == endpoint)
            connection.execute(delete(LIMITS).where(same))
            if any(value is not None for value in values.values()):
                row = {"tenant": tenant, "endpoint": endpoint, **values}
                connection.execute(insert(LIMITS), row)
            bump_revision(connection)

    def limits(self) -> dict[tuple[str, str], LimitTerms]:
        """All limits by tenant and endpoint."""
        with self._store.read() as connection:
            rows = connection.execute(select(LIMITS).order_by(LIMITS.c.tenant, LIMITS.c.endpoint))
            return {
                (row.pop("tenant"), row.pop("endpoint")): LimitTerms(**row)
                for row in map(dict, rows.mappings())
            }


def stored_keys(registry: Registry) -> list[KnownKey]:
    """The keys of the database that open the server."""
    digests = registry.digests()
    return [
        KnownKey(digests[key.id], Caller(key.tenant, key.id), key.expires_at)
        for key in registry.usable_keys()
        if key.id in digests
    ]
