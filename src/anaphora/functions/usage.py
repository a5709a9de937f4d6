"""What AI functions cost so far."""

from __future__ import annotations

import threading

from anaphora.batch.client import Reply


class Usage:
    """Counts replies; ``add`` is what ``on_done`` wants. Several threads may.

    ``row`` is what ``str`` calls a row: in SQL only different ones are asked.
    """

    def __init__(self, row: str = "row") -> None:
        self._row = row
        self.num_rows = 0
        self.num_requests = 0  # fewer than rows where rows are equal
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def add(self, reply: Reply) -> None:
        """One row more. Equal rows come one after another with the one reply that they share."""
        is_new = reply is not getattr(self._of_thread, "reply", None)
        self._of_thread.reply = reply
        prompt, cached, completion = reply.usage() if is_new else (0, 0, 0)
        with self._lock:
            self.num_rows += 1
            self.num_requests += is_new
            self.num_prompt_tokens += prompt
            self.num_cached_tokens += cached
            self.num_completion_tokens += completion

    @property
    def cached_share(self) -> float:
        """Part of the prompts' tokens that was not computed, 0 to 1."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def __str__(self) -> str:
        return (
            f"{_count(self.num_rows, self._row)}, {_count(self.num_requests, 'request')}, "
            f"{_count(self.num_prompt_tokens, 'prompt token')}, {self.num_cached_tokens} of them "
            f"cached ({self.cached_share:.0%}), "
            f"{_count(self.num_completion_tokens, 'completion token')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
