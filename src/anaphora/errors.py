"""Every error Anaphora raises on purpose.

AnaphoraError
├── ConfigError            an option or file given by the operator          → exit status 2
│   └── WorkFileInUse      of a batch that another process runs
├── ModelError             a checkpoint that cannot be served as it is      → exit status 2
│   ├── ModelNotFound      no such alias, file, directory or hub id
│   ├── LicenceNotAccepted a model whose terms must be accepted before it is fetched
│   ├── UnsupportedModel   an architecture, tensor type or field we lack
│   ├── CorruptCheckpoint  truncated, mis-shaped or damaged files
│   └── UnusableAdapter    a LoRA adapter that this model cannot take      → 400 over HTTP
├── RequestError           the client's mistake, with an HTTP status        → 4xx
│   ├── InvalidRequest     400, names the field
│   ├── ContextTooLong     400, context_length_exceeded
│   ├── Unauthorized       401, invalid_api_key
│   ├── UnknownModel       404, model_not_found
│   ├── Forbidden          403, the key is not an admin's
│   ├── UnknownPin         404, there is no such pin
│   ├── UnknownResponse    404, there is no such stored response
│   ├── NotFound           404, the database has no such tenant, key, file or batch
│   ├── NotKept            501, the server has no database
│   ├── Conflict           409, there is one of that name already
│   ├── QuotaExceeded      429, more pins than the tenant may have
│   └── RateLimited        429, more requests or tokens than the tenant may have now
├── EngineError            our fault                                        → 5xx
│   ├── EngineDied         500, a running request was lost with its engine process
│   ├── EngineUnavailable  503, a fresh engine is starting, or the server is ending
│   └── StoreUnavailable   503, the database cannot be read or written
├── MissingExtra           an optional package that is not installed        → exit status 2
├── InvalidArgument        an argument of an AI function                    → exit status 2
├── RowFailed              a row for which an AI function has no value      → exit status 2
├── NoTokenLeft            nothing that the request allows can come next    → its choice ends
├── DamagedBlock           a block on disk is not what was written         → a miss
└── MeasurementError       a measured server failed or answered wrongly     → exit status 1

A message names the field, the value and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping


class AnaphoraError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AnaphoraError):
    """An option, size or file given by the operator cannot be used."""


class WorkFileInUse(ConfigError):
    """Another process runs the same batch."""


class ModelError(AnaphoraError):
    """A checkpoint cannot be served as it is."""


class ModelNotFound(ModelError):
    """No such alias, file, directory or hub id."""


class LicenceNotAccepted(ModelError):
    """The model's terms must be accepted before it is fetched."""


class UnsupportedModel(ModelError):
    """The checkpoint needs an architecture, tensor type or field that we do not implement."""


class CorruptCheckpoint(ModelError):
    """The checkpoint's files are truncated, mis-shaped or damaged."""


class UnusableAdapter(ModelError):
    """A LoRA adapter is damaged, was made for another model, or needs what we lack."""


class RequestError(AnaphoraError):
    """The client's mistake; ``status``, ``kind``, ``param`` and ``code`` become the error body."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field has a wrong type or value (400)."""


class ContextTooLong(RequestError):
    """Prompt and requested output do not fit the context (400)."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The API key is missing or wrong (401)."""

    status = 401
    code = "invalid_api_key"


class UnknownModel(RequestError):
    """The request names a model that is not served here (404)."""

    status = 404
    code = "model_not_found"


class Forbidden(RequestError):
    """The key is valid but may not do this (403)."""

    status = 403
    code = "insufficient_permissions"


class UnknownPin(RequestError):
    """The tenant has no pin of this id (404)."""

    status = 404
    code = "pin_not_found"


class UnknownResponse(RequestError):
    """The tenant has no stored response of this id (404)."""

    status = 404
    code = "response_not_found"


class QuotaExceeded(RequestError):
    """The tenant would pin more than it may (429)."""

    status = 429
    code = "pin_quota_exceeded"


class NotFound(RequestError):
    """The database has no such tenant, key, file or batch (404)."""

    status = 404
    code = "not_found"


class NotKept(RequestError):
    """The server has no database to keep this in (501)."""

    status = 501
    code = "no_database"


class Conflict(RequestError):
    """There is one of that name already, or it cannot be changed any more (409)."""

    status = 409
    code = "conflict"


class RateLimited(RequestError):
    """The tenant has had what it may have for now (429); try again in ``retry_after`` seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = dict(headers or {})


class EngineError(AnaphoraError):
    """Our fault; ``status`` is what an HTTP client sees."""

    status = 500
    kind = "server_error"
    code: str | None = None


class EngineDied(EngineError):
    """The engine process died while it worked on this request (500)."""


class EngineUnavailable(EngineError):
    """No engine can take the request now; try again in ``retry_after`` seconds (503)."""

    status = 503
    kind = "service_unavailable_error"
    code = "server_is_overloaded"

    def __init__(self, message: str, *, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreUnavailable(EngineError):
    """The database cannot be read or written now (503)."""

    status = 503
    kind = "service_unavailable_error"
    code = "database_unavailable"


class MissingExtra(AnaphoraError):
    """An optional package is needed and not installed; the message says how to get it."""


class InvalidArgument(AnaphoraError):
    """An argument of an AI function has a wrong type or value."""


class RowFailed(AnaphoraError):
    """An AI function has no value for a row: the request failed or the answer cannot be read."""


class NoTokenLeft(AnaphoraError):
    """Nothing that the request's constraints allow can come next; ``param`` names the field.

    Never leaves the engine: it ends one choice, and the request gets ``InvalidRequest``.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class DamagedBlock(AnaphoraError):
    """The disk cache has not, or has no longer, the block asked for: a miss, whatever the reason.

    It was damaged, overwritten or erased, or has outlived its time. Never leaves the cache.
    """


class MeasurementError(AnaphoraError):
    """A server under measurement cannot be reached, failed, or answered wrongly."""
