"""Every error as OpenAI's body: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from typing import Any

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


def error_body(error: Exception) -> bytes:
    """The envelope. An error not raised on purpose shows nothing of its content."""
    body = {
        "message": "the server failed on this request; send it again",
        "type": "server_error",
        "param": error.param if isinstance(error, RequestError) else None,
        "code": None,
    }
    if isinstance(error, RequestError | EngineError):
        body |= {"message": str(error), "type": error.kind, "code": error.code}
    return msgspec.json.encode({"error": body})


def error_response(error: Exception) -> Response:
    """The whole answer for ``error``: status, envelope and headers."""
    headers: dict[str, str] = {}
    if isinstance(error, EngineUnavailable | RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimited):
        headers |= {"retry-after-ms": str(math.ceil(error.retry_after * 1000)), **error.headers}
    status = error.status if isinstance(error, RequestError | EngineError) else 500
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), status=status, headers=headers)


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
        param = param[:_MAX_SHOWN_FIELD_CHARS]
        return InvalidRequest(f"{param} is not a field of this route; leave it out", param=param)
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
