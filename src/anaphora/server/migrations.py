"""How the database came to its present form, step by step. A step is never changed, only added.

``{id}`` and ``{bytes}`` stand for what SQLite and PostgreSQL call differently.
"""

from __future__ import annotations

from collections.abc import Mapping

DIALECTS: Mapping[str, Mapping[str, str]] = {
    "sqlite": {"id": "INTEGER PRIMARY KEY AUTOINCREMENT", "bytes": "BLOB"},
    "postgresql": {"id": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "bytes": "BYTEA"},
}

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE tenants (
            name TEXT PRIMARY KEY,
            created_at DOUBLE PRECISION NOT NULL)""",
        """CREATE TABLE api_keys (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            digest TEXT NOT NULL UNIQUE,
            hint TEXT NOT NULL,
            is_admin BOOLEAN NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            expires_at DOUBLE PRECISION,
            revoked_at DOUBLE PRECISION)""",
        """CREATE TABLE limits (
            tenant TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            requests_per_minute BIGINT,
            input_tokens_per_minute BIGINT,
            output_tokens_per_minute BIGINT,
            concurrent_requests BIGINT,
            PRIMARY KEY (tenant, endpoint))""",
        """CREATE TABLE usage (
            id {id},
            at DOUBLE PRECISION NOT NULL,
            request_id TEXT NOT NULL,
            tenant TEXT NOT NULL,
            key_id TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            workload TEXT NOT NULL,
            adapter TEXT NOT NULL,
            input_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            cached_host_tokens BIGINT NOT NULL,
            cached_disk_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL,
            reasoning_tokens BIGINT NOT NULL,
            charged_tokens DOUBLE PRECISION NOT NULL,
            ttft DOUBLE PRECISION,
            duration DOUBLE PRECISION NOT NULL,
            finish_reason TEXT NOT NULL,
            status INTEGER NOT NULL)""",
        "CREATE INDEX usage_at ON usage (at)",
        "CREATE INDEX usage_tenant_at ON usage (tenant, at)",
    ),
)
