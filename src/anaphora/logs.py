"""Log lines of both processes: text for people, or one JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from typing import Any, Literal, get_args

from anaphora.errors import ConfigError

LogFormat = Literal["auto", "text", "json"]
_VARIABLE = "ANAPHORA_LOG_FORMAT"  # also how the engine's process learns of it
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure_logging(given: LogFormat | None = None) -> None:
    """Writes to standard error. ``auto``: text if that is a terminal, else JSON.

    Without ``given`` the environment decides. Raises ``ConfigError``.
    """
    chosen = given or os.environ.get(_VARIABLE) or "auto"
    if chosen not in get_args(LogFormat):
        raise ConfigError(f"{_VARIABLE} is {chosen!r}; use {', '.join(get_args(LogFormat))}")
    if chosen == "auto":
        chosen = "text" if sys.stderr.isatty() else "json"
    os.environ[_VARIABLE] = chosen
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger`` and ``message``, then the record's ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
