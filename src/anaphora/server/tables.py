"""The database as SQLAlchemy sees it. ``migrations.py`` makes it; a test holds the two equal."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Integer,
    LargeBinary,
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

FILES = Table(
    "files",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("is_complete", Boolean, nullable=False),  # false while it is being uploaded
)

FILE_CHUNKS = Table(
    "file_chunks",
    METADATA,
    Column("file_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True),  # from 0
    Column("data", LargeBinary, nullable=False),  # files.CHUNK_BYTES, the last one less
)

BATCHES = Table(
    "batches",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),  # a route, such as /v1/chat/completions
    Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("completion_window", Text, nullable=False),
    Column("output_expires_after", Double),  # seconds
    Column("status", Text, nullable=False),
    Column("model", Text),
    Column("metadata", Text),  # JSON
    Column("errors", Text),  # JSON, of a batch that is not valid
    Column("total", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("claimed_by", Text),  # the server that works on it
    Column("claimed_until", Double, nullable=False),
)

BATCH_LINES = Table(
    "batch_lines",
    METADATA,
    Column("batch_id", Text, primary_key=True),
    Column("line", Integer, primary_key=True),  # in the input file, from 1
    Column("custom_id", Text, nullable=False),
    Column("start", BigInteger, nullable=False),  # its place in the input file, in bytes
    Column("length", Integer, nullable=False),
    Column("position", Integer, nullable=False),  # in the order of work: by shared prefix
    Column("result", Text),  # the output line; null as long as there is none
    Column("is_error", Boolean),
    Column("input_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
)
