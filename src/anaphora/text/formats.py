"""Which format a model's answers have, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anaphora.text.harmony import MARKS, HarmonyReader
from anaphora.text.llama_tools import PYTHON_TAG, Llama3Reader
from anaphora.text.output import OutputReader, TextReader
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import OutputFormat, SamplingParams

_HARMONY = frozenset(f"<|{name}|>" for name in MARKS)
_LLAMA3 = frozenset({PYTHON_TAG, "<|eot_id|>"})
_READERS: Mapping[OutputFormat, Callable[[Tokenizer, SamplingParams], OutputReader]] = {
    "text": TextReader,
    "harmony": HarmonyReader,
    "llama3": Llama3Reader,
}


def detect_format(template: str, tokenizer: Tokenizer) -> OutputFormat:
    """The format that a chat template asks for. The vocabulary must have its marks, and the
    template must use them: fine-tunes change the template and keep the vocabulary."""
    control = tokenizer.control_tokens.keys()
    if control >= _HARMONY and "<|channel|>" in template:
        return "harmony"
    if control >= _LLAMA3 and '"parameters"' in template and "tool_calls" in template:
        return "llama3"
    return "text"


def output_reader(tokenizer: Tokenizer, params: SamplingParams) -> OutputReader:
    """A reader for one choice of a request."""
    return _READERS[params.output_format](tokenizer, params)
