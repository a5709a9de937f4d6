"""What becomes of generated tokens: text for the user, and what some formats keep apart from it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from anaphora.text.detokenizer import Detokenizer
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import OutputPart, SamplingParams, ToolCallDelta


@dataclasses.dataclass(frozen=True)
class Output:
    """What one token added to an answer. ``part`` is what the token itself belongs to."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    part: OutputPart = "content"


class OutputReader(Protocol):
    """Takes one choice's tokens and gives what can be sent, as soon as it can."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has ended the answer, None as long as there is none."""

    def add(self, token_id: int) -> Output:
        """What this token adds; nothing after a stop string."""

    def flush(self) -> Output:
        """What was held back, at the end of the output."""


class TextReader:
    """The format that has no parts: all of it is text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def stop_reason(self) -> str | None:
        """As ``OutputReader``."""
        return self._detokenizer.stop_reason

    def add(self, token_id: int) -> Output:
        """As ``OutputReader``."""
        return Output(self._detokenizer.add((token_id,)))

    def flush(self) -> Output:
        """As ``OutputReader``."""
        return Output(self._detokenizer.flush())
