"""What this machine can do with a model, as measured: the stock from which model units are sold."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

UNIT_TOKENS_PER_SECOND = 10.0  # one model unit: so many weighted tokens a second
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Of one model in one precision on one machine, in tokens a second."""

    input_tokens_per_second: float  # prefill
    output_tokens_per_second: float  # decode, with as many streams as are served together

    @property
    def tokens_per_second(self) -> float:
        """Weighted tokens: an input token is one."""
        return self.input_tokens_per_second

    @property
    def output_weight(self) -> float:
        """Input tokens that take as long as one output token."""
        return self.input_tokens_per_second / self.output_tokens_per_second

    @property
    def model_units(self) -> int:
        """The whole machine, in model units."""
        return int(self.tokens_per_second / UNIT_TOKENS_PER_SECOND)


class CapacityFile:
    """Measured capacities by model, precision and threads, in the user's cache directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, model: str, dtype: str, threads: int) -> Capacity | None:
        """None if it has not been measured, or the file is not ours."""
        found = self._load().get(_key(model, dtype, threads))
        try:
            return None if found is None else Capacity(**found)
        except TypeError:
            return None

    def put(self, model: str, dtype: str, threads: int, capacity: Capacity) -> None:
        """Keeps a measurement; the one before is forgotten."""
        measured = self._load() | {_key(model, dtype, threads): dataclasses.asdict(capacity)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"format": _FORMAT, "measured": measured}, file, indent=1)
        os.replace(temporary, self._path)

    def _load(self) -> dict[str, dict[str, float]]:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}
        measured = content.get("measured")
        return measured if isinstance(measured, dict) else {}


def _key(model: str, dtype: str, threads: int) -> str:
    return f"{model} {dtype} {threads} threads"
