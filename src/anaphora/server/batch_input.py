"""A batch's input file, checked line by line before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from anaphora.server.file_store import FileStore

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINES = 50_000  # OpenAI's bound
MAX_LINE_BYTES = 4 * 2**20  # as a body's
_MAX_ERRORS = 50
_MAX_ID_CHARS = 512
_KEY_CHARS = 1000  # what begins alike for longer is close enough


class BatchInput:
    """Lines and errors of an input file. ``lines`` are rows for the database."""

    def __init__(self, files: FileStore, file_id: str, endpoint: str) -> None:
        self.errors: list[dict[str, Any]] = []
        self.model = ""
        self._endpoint = endpoint
        self._ids: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._keys: list[bytes] = []
        for number, (start, text) in enumerate(_split(files.read(file_id)), start=1):
            if text.strip():
                self._read(number, start, text)
            if len(self.errors) == _MAX_ERRORS:
                break
        if not self._rows and not self.errors:
            self._add_error("empty_file", "the file has no line; write one request a line", None)

    @property
    def lines(self) -> Iterator[dict[str, Any]]:
        """In the order of the file; ``position`` puts requests that begin alike side by side."""
        order = sorted(range(len(self._rows)), key=lambda index: self._keys[index])
        for position, index in enumerate(order):
            self._rows[index]["position"] = position
        return iter(self._rows)

    @property
    def num_lines(self) -> int:
        """Requests in the file."""
        return len(self._rows)

    def _read(self, number: int, start: int, text: bytes) -> None:
        if len(text) > MAX_LINE_BYTES:
            message = f"the line has {len(text)} bytes; at most {MAX_LINE_BYTES} are allowed"
            return self._add_error("line_too_long", message, number)
        if self.num_lines == MAX_LINES:
            message = f"the file has more than {MAX_LINES} lines; split it"
            return self._add_error("too_many_lines", message, number)
        try:
            content = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return self._add_error("invalid_json_line", "the line is not JSON", number)
        fault = self._fault(content)
        if fault is not None:
            code, message, param = fault
            return self._add_error(code, message, number, param)
        self._ids.add(content["custom_id"])
        self.model = content["body"]["model"]
        self._rows.append(
            {
                "line": number,
                "custom_id": content["custom_id"],
                "start": start,
                "length": len(text),
                "result": None,
            }
        )
        self._keys.append(_key(content["body"]))
        return None

    def _fault(self, content: Any) -> tuple[str, str, str | None] | None:
        """Code, message and field of what is wrong with a line."""
        if not isinstance(content, dict):
            return "invalid_line", "the line is no JSON object", None
        custom_id, body = content.get("custom_id"), content.get("body")
        # printable, because PostgreSQL takes no NUL
        if not (
            isinstance(custom_id, str)
            and 1 <= len(custom_id) <= _MAX_ID_CHARS
            and custom_id.isprintable()
        ):
            message = f"custom_id must be a string of 1 to {_MAX_ID_CHARS} printable characters"
            return "invalid_custom_id", message, "custom_id"
        if custom_id in self._ids:
            return "duplicate_custom_id", "custom_id is that of an earlier line", "custom_id"
        if content.get("method", "POST") != "POST":
            return "invalid_method", "method must be POST", "method"
        if content.get("url") != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        if not isinstance(body, dict):
            return "invalid_body", "body must be an object", "body"
        if not isinstance(body.get("model"), str):
            return "missing_model", "body.model must be a string", "body.model"
        if self.model and body["model"] != self.model:
            return (
                "mismatched_model",
                f"body.model must be one for all, {self.model!r}",
                "body.model",
            )
        if body.get("stream"):
            return "invalid_body", "body.stream has no meaning in a batch", "body.stream"
        return None

    def _add_error(
        self, code: str, message: str, line: int | None, param: str | None = None
    ) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})


def _split(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Start and content of each line; a longer one than is allowed is cut off there."""
    start, rest = 0, b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield start, line
            start += len(line) + 1
        if len(rest) > MAX_LINE_BYTES:
            yield start, rest
            return
    if rest:
        yield start, rest


def _key(body: dict[str, Any]) -> bytes:
    """Equal beginnings of prompts have equal beginnings of keys."""
    prompt = [body.get(name) for name in ("instructions", "tools", "messages", "prompt", "input")]
    return json.dumps(prompt, ensure_ascii=False)[:_KEY_CHARS].encode(errors="replace")
