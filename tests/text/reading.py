"""Scripted answers through a reader, token by token, as an engine gives them."""

from __future__ import annotations

import dataclasses

from anaphora.text.formats import output_reader
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import SamplingParams


@dataclasses.dataclass
class Answer:
    """What a client would have put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = dataclasses.field(default_factory=list)  # name and arguments
    parts: list[str] = dataclasses.field(default_factory=list)  # of each token
    steps: list[str] = dataclasses.field(default_factory=list)  # text of each step
    stop_reason: str | None = None


def read(
    tokenizer: Tokenizer, script: str, params: SamplingParams, *, num_tokens: int | None = None
) -> Answer:
    """The answer of ``script``, in which control tokens count, or of its first tokens."""
    ids = tokenizer.encode(script, add_special_tokens=False, parse_special=True)[:num_tokens]
    reader, answer = output_reader(tokenizer, params), Answer()
    outputs = []
    for token_id in ids:
        outputs.append(reader.add(token_id))
        answer.parts.append(outputs[-1].part)
        if reader.stop_reason is not None:
            break
    for output in [*outputs, reader.flush()]:
        answer.text += output.text
        answer.steps.append(output.text)
        answer.reasoning += output.reasoning
        for call in output.tool_calls:
            if call.name is not None:
                assert call.index == len(answer.calls)
                answer.calls.append([call.name, ""])
            answer.calls[call.index][1] += call.arguments
    answer.stop_reason = reader.stop_reason
    return answer
