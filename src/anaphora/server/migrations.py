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
    (
        """CREATE TABLE files (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            bytes BIGINT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            expires_at DOUBLE PRECISION,
            is_complete BOOLEAN NOT NULL)""",
        "CREATE INDEX files_tenant ON files (tenant, created_at)",
        """CREATE TABLE file_chunks (
            file_id TEXT NOT NULL,
            number INTEGER NOT NULL,
            data {bytes} NOT NULL,
            PRIMARY KEY (file_id, number))""",
        """CREATE TABLE batches (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            key_id TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file_id TEXT NOT NULL,
            output_file_id TEXT,
            error_file_id TEXT,
            completion_window TEXT NOT NULL,
            output_expires_after DOUBLE PRECISION,
            status TEXT NOT NULL,
            model TEXT,
            metadata TEXT,
            errors TEXT,
            total INTEGER NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            expires_at DOUBLE PRECISION NOT NULL,
            in_progress_at DOUBLE PRECISION,
            finalizing_at DOUBLE PRECISION,
            completed_at DOUBLE PRECISION,
            failed_at DOUBLE PRECISION,
            expired_at DOUBLE PRECISION,
            cancelling_at DOUBLE PRECISION,
            cancelled_at DOUBLE PRECISION,
            claimed_by TEXT,
            claimed_until DOUBLE PRECISION NOT NULL)""",
        "CREATE INDEX batches_tenant ON batches (tenant, created_at)",
        """CREATE TABLE batch_lines (
            batch_id TEXT NOT NULL,
            line INTEGER NOT NULL,
            custom_id TEXT NOT NULL,
            start BIGINT NOT NULL,
            length INTEGER NOT NULL,
            position INTEGER NOT NULL,
            result TEXT,
            is_error BOOLEAN,
            input_tokens BIGINT,
            cached_tokens BIGINT,
            output_tokens BIGINT,
            reasoning_tokens BIGINT,
            PRIMARY KEY (batch_id, line))""",
        "CREATE INDEX batch_lines_position ON batch_lines (batch_id, position)",
    ),
)
