"""Fields of a body that its route does not know: found by name, so that clients can be told."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from fastapi import Request

from anaphora.server.envelope import UnknownField
from anaphora.server.fields import ACCEPTED_WITHOUT_EFFECT, UNSUPPORTED
from anaphora.server.schemas import Body, ChatMessage

IGNORED_HEADER = "x-anaphora-ignored-fields"
MAX_IGNORED_FIELDS = 16
_MAX_NAME_CHARS = 64
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # a name is the client's text, and goes into a header
_INDEX = re.compile(r"\[\d+\]")


def unknown_fields(body: Body, path: str = "") -> Iterator[str]:
    """Names of what has no meaning and is in no table, with the path to it, made safe to show.

    Fields of messages go to the chat template and are known; what was checked by hand is not seen.
    """
    if not isinstance(body, ChatMessage):
        for name in body.extra_names:
            where = f"{path}{name[:_MAX_NAME_CHARS]}"
            is_known = name in UNSUPPORTED and not path  # refused already if it asked for anything
            if not is_known and _INDEX.sub("[]", where) not in ACCEPTED_WITHOUT_EFFECT:
                yield _ODD.sub("?", where)
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for index, element in enumerate(value):
                if isinstance(element, Body):
                    yield from unknown_fields(element, f"{path}{name}[{index}].")


def note_unknown(request: Request, body: Body, *, strict: bool) -> None:
    """Refuse the fields of ``body`` that nobody knows, or have the answer's header name them."""
    names = list(itertools.islice(unknown_fields(body), MAX_IGNORED_FIELDS))
    if strict and names:
        raise UnknownField(names[0])
    request.state.ignored_fields = names
