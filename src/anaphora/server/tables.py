"""The database as SQLAlchemy sees it. ``migrations.py`` makes it; a test holds the two equal."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Integer,
    MetaData,
    Table,
    Text,
)

METADATA = MetaData()
_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only as INTEGER

META = Table(
    "meta",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

TENANTS = Table(
    "tenants",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("created_at", Double, nullable=False),  # seconds since 1970, like all times here
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("digest", Text, nullable=False, unique=True),  # SHA-256 of the key, in hex
    Column("hint", Text, nullable=False),  # its last characters
    Column("is_admin", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

LIMITS = Table(
    "limits",
    METADATA,
    Column("tenant", Text, primary_key=True),  # "*": each tenant without limits of its own
    Column("endpoint", Text, primary_key=True),  # "*": all endpoints together
    Column("requests_per_minute", BigInteger),  # null: no limit
    Column("input_tokens_per_minute", BigInteger),
    Column("output_tokens_per_minute", BigInteger),
    Column("concurrent_requests", BigInteger),
)

USAGE = Table(
    "usage",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("at", Double, nullable=False),  # when the request ended
    Column("request_id", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("workload", Text, nullable=False),
    Column("adapter", Text, nullable=False),  # its digest, empty for the model itself
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),  # of input_tokens, from all tiers
    Column("cached_host_tokens", BigInteger, nullable=False),  # of cached_tokens
    Column("cached_disk_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),  # of output_tokens
    Column("charged_tokens", Double, nullable=False),  # weighted, as bought capacity counts them
    Column("ttft", Double),  # seconds; null if no token came
    Column("duration", Double, nullable=False),  # seconds
    Column("finish_reason", Text, nullable=False),
    Column("status", Integer, nullable=False),  # 499: the client left
)
