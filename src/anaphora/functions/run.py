"""Runs tasks over rows: all rows of a call are one planned batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from anaphora.batch.client import Client, Reply
from anaphora.errors import InvalidArgument, RowFailed
from anaphora.functions.tasks import Task, is_unicode

OnDone = Callable[[Reply], None]
_SHOWN_CHARS = 40
_NO_TEXT = "the row has half a surrogate pair, which is no text: leave it out"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row's value, or why it has none."""

    value: Any = None
    error: str | None = None

    def unwrap(self, where: str, fix: str) -> Any:
        """The value. Raises ``RowFailed`` that says where there is none, and why."""
        if self.error is not None:
            raise RowFailed(f"{where}: {self.error}; {fix}")
        return self.value

    def as_struct(self) -> dict[str, Any]:
        """STRUCT<result, errorMessage>."""
        return {"result": self.value, "errorMessage": self.error}


def answer(
    client: Client, rows: Sequence[tuple[Task, str]], on_done: OnDone | None = None
) -> list[Outcome]:
    """What each row's task makes of it, in order. Raises ``InvalidArgument`` if a task asks for a
    model that is not served."""
    for task in {id(task): task for task, _ in rows}.values():
        check_endpoint(task, client)
    outcomes: list[Outcome | None] = [None] * len(rows)
    asked: list[int] = []
    for index, (task, row) in enumerate(rows):
        if not is_unicode(row):
            outcomes[index] = Outcome(error=_NO_TEXT)
        elif (value := task.known(row)) is not None:
            outcomes[index] = Outcome(value)
        else:
            asked.append(index)
    bodies = [rows[index][0].request(rows[index][1]) for index in asked]
    replies = client.complete(bodies, on_done=on_done) if bodies else []
    for index, reply in zip(asked, replies, strict=True):
        task, row = rows[index]
        try:
            outcomes[index] = Outcome(task.value(row, reply))
        except RowFailed as error:
            outcomes[index] = Outcome(error=str(error).encode(errors="replace").decode())
    return [outcome for outcome in outcomes if outcome is not None]


def check_endpoint(task: Task, client: Client) -> None:
    """``ai_query`` names whom it asks; that one must be served."""
    endpoint = task.fields.get("model", client.model)
    if endpoint not in client.models:
        raise InvalidArgument(
            f"{task.function}'s endpoint is {endpoint!r:.60}, which is not served; served: "
            f"{', '.join(client.models)}"
        )


def shorten(row: str) -> str:
    """The beginning of a row, for messages."""
    return repr(row if len(row) <= _SHOWN_CHARS else row[:_SHOWN_CHARS] + "…")
