"""Every error as a body of the API that its route belongs to, OpenAI's for most."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from fastapi import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from anaphora.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    RateLimited,
    RequestError,
)

logger = logging.getLogger("anaphora.server")

_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
_MAX_SHOWN_FIELD_CHARS = 64
# Fields that hold objects with the client's own keys: an error there names the field alone.
_FIELDS_WITH_FREE_KEYS = ("logit_bias", "chat_template_kwargs")


# Whose words a route speaks.
Dialect = Literal["openai", "anthropic", "databricks"]
_OVERLOADED = 529  # what Anthropic's clients know 503 as
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_DATABRICKS_CODES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    429: "REQUEST_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    503: "TEMPORARILY_UNAVAILABLE",
}


def dialect_of(path: str) -> Dialect:
    """The dialect of a path, whether there is such a route or not."""
    if f"{path}/".startswith("/v1/messages/"):
        return "anthropic"
    return "databricks" if path.startswith(("/serving-endpoints", "/api/2.0/")) else "openai"


class UnknownField(InvalidRequest):
    """A field that the route does not know, where such are refused (400)."""

    code = "unknown_parameter"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not a field of this route; leave it out", param=field)


class BodyTooLargeError(RequestError):
    """The request's body is over the limit (413)."""

    status = 413


class BodyTooSlowError(RequestError):
    """The request's body did not arrive in time (408)."""

    status = 408


class UnsupportedMediaTypeError(RequestError):
    """The request's body is not declared as JSON (415)."""

    status = 415


class RouteError(RequestError):
    """No such path (404) or not with this method (405)."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def unsupported(field: str, fix: str) -> InvalidRequest:
    """The error for a field whose meaning is not implemented."""
    return InvalidRequest(
        f"{field} is not supported; {fix}", param=field, code="unsupported_parameter"
    )


def error_body(error: Exception, dialect: Dialect = "openai", request_id: str = "") -> bytes:
    """The envelope. An error not raised on purpose shows nothing of its content."""
    return msgspec.json.encode(error_object(error, dialect, request_id))


def error_object(error: Exception, dialect: Dialect, request_id: str) -> dict[str, Any]:
    """The same before it is encoded."""
    is_ours = isinstance(error, RequestError | EngineError)
    message = str(error) if is_ours else "the server failed on this request; send it again"
    if dialect == "anthropic":
        kind = _ANTHROPIC_TYPES.get(_status(error), "invalid_request_error")
        inner = {"type": kind, "message": message}
        return {"type": "error", "error": inner, "request_id": request_id}
    if dialect == "databricks":
        if isinstance(error, UnknownField):
            message = f'json: unknown field "{error.param}"'
        code = _DATABRICKS_CODES.get(_status(error), "BAD_REQUEST")
        return {"error_code": code, "message": message}
    body = {
        "message": message,
        "type": error.kind if isinstance(error, RequestError | EngineError) else "server_error",
        "param": error.param if isinstance(error, RequestError) else None,
        "code": error.code if isinstance(error, RequestError | EngineError) else None,
    }
    return {"error": body}


def _status(error: Exception) -> int:
    return error.status if isinstance(error, RequestError | EngineError) else 500


def error_response(error: Exception, path: str = "", request_id: str = "") -> Response:
    """The whole answer for ``error`` on a path: status, envelope and headers."""
    dialect = dialect_of(path)
    headers: dict[str, str] = {}
    if isinstance(error, EngineUnavailable | RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimited):
        headers |= {"retry-after-ms": str(math.ceil(error.retry_after * 1000)), **error.headers}
    status = _status(error)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if dialect == "anthropic" and status == 503:
        status = _OVERLOADED
    return json_response(error_body(error, dialect, request_id), status=status, headers=headers)


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """``content`` as JSON, floats with all the digits that they need; bytes are taken as JSON."""
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, status, headers, media_type="application/json")


def log_failure(request_id: str, error: Exception) -> None:
    """Record where ``error`` was raised but not its message, which may quote a prompt."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed with %s at\n%s", request_id, type(error).__name__, places)


def translate(error: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints, in our words and without the client's text."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON ({first['msg']}); send a JSON object")
    param = _path(first["loc"])
    if not param:
        return InvalidRequest("the body is not a JSON object; send an object")
    if first["type"] == "extra_forbidden":
        return UnknownField(param[:_MAX_SHOWN_FIELD_CHARS])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing; add it", param=param)
    return InvalidRequest(
        f"{param} is {describe(first['input'])}; it {_requirement(first)}", param=param
    )


def describe(value: Any) -> str:
    """A JSON value for an error message: numbers as they are, of all else only the type."""
    if value is None:
        return "null"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value}" if abs(value) < 1e12 else "a number beyond all limits"
    return _JSON_TYPES.get(type(value), "a value of the wrong type")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
        if part in _FIELDS_WITH_FREE_KEYS:
            break
    return path


def _requirement(error: ErrorDetails) -> str:
    """What pydantic asks for, in the words of JSON."""
    context = error.get("ctx", {})
    match error["type"]:
        case "too_short" | "string_too_short":
            return f"must have a length of at least {context['min_length']}"
        case "too_long" | "string_too_long":
            return f"must have a length of at most {context['max_length']}"
        case "list_type":
            return "must be an array"
        case "dict_type" | "model_type":
            return "must be an object"
        case "int_type" | "int_from_float":
            return "must be an integer"
        case "bool_type":
            return "must be true or false"
    reason = error["msg"].removeprefix("Input ")
    return reason.replace("should be a valid", "must be a").replace("should", "must")
