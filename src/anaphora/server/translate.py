"""From another API's request to a ``ChatRequest``, and errors about it back to the names sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from anaphora.errors import InvalidRequest, RequestError
from anaphora.server.envelope import describe, translate, unsupported
from anaphora.server.schemas import B

_PARAM = re.compile(r"(\w+)(?:\[(\d+)\])?")


def validate(schema: type[B], fields: Mapping[str, Any]) -> B:
    """``fields`` as a ``schema``. Raises ``InvalidRequest`` that names the field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise translate(error) from None


@contextlib.contextmanager
def naming(names: Mapping[str, str], messages: Sequence[str] = ()) -> Iterator[None]:
    """Have errors name what the client sent: its ``names`` of fields, its places of messages."""
    try:
        yield
    except RequestError as error:
        match = _PARAM.match(error.param or "")
        if match is None:
            raise
        old = new = match[0] if match[1] == "messages" and match[2] else match[1]
        if old != match[1] and int(match[2]) < len(messages):
            new = messages[int(match[2])]
        elif match[1] in names:
            old, new = match[1], names[match[1]]
            schema = f"{old}.json_schema"  # one level less in the other APIs
            if (error.param or "").startswith(schema):
                old, new = schema, f"{new}.schema"
        error.param = (error.param or "").replace(old, new, 1)
        spelled = re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)")
        error.args = (spelled.sub(lambda _: new, str(error)),)
        raise


def only(field: str, value: Any, *allowed: Any) -> None:
    """Raise ``InvalidRequest`` unless ``value`` is one that asks for nothing that is not built."""
    if value is not None and value not in allowed:
        raise unsupported(field, "leave it out")


def function(tool: Any, where: str, parameters: str) -> dict[str, Any]:
    """A function as chats offer it; ``parameters`` is the name of its schema in ``tool``."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} is {describe(tool)}; it must be an object", param=where)
    kept = {"name": tool.get("name"), "description": tool.get("description")}
    kept |= {"parameters": tool.get(parameters), "strict": tool.get("strict")}
    given = {name: value for name, value in kept.items() if value is not None}
    return {"type": "function", "function": given}


def given(**fields: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
