"""Text from tokens as they come: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from anaphora.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one choice's tokens into text that is safe to send.

    The joined results equal the decoding of all tokens at once, however they are split between
    calls. Of several stop strings, the one that is complete first wins; of those complete at the
    same character, the one that began first. So the result does not depend on how the tokens came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are not looked for in the text of the first ``min_tokens`` tokens."""
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop_str_in_output
        self._num_unscanned = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Longest first, because at the same end the longer one began earlier.
        self._matchers = [_Matcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._held = ""  # text that may be the start of a stop string

    def add(self, token_ids: Sequence[int]) -> str:
        """New text after ``token_ids``; empty after a stop string. Cost grows with them alone.

        Raises ``InvalidRequest`` for an id outside the vocabulary.
        """
        if self.stop_reason is not None:
            return ""
        unscanned, scanned = token_ids[: self._num_unscanned], token_ids[self._num_unscanned :]
        self._num_unscanned -= len(unscanned)
        return self._decode(unscanned) + self._scan(self._decode(scanned))

    def _decode(self, token_ids: Sequence[int]) -> str:
        is_control = self._tokenizer.is_control
        data = b"".join(
            self._tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not (self._skip_special_tokens and is_control(token_id))
        )
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back, at the end of the output; an unfinished character is U+FFFD."""
        if self.stop_reason is not None:
            return ""
        text = self._scan(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.length = 0
        return text + rest

    def _scan(self, text: str) -> str:
        if not self._matchers or not text:
            return text
        pending = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.text for matcher in self._matchers if matcher.feed(char)]
            if complete:
                self.stop_reason = complete[0]
                self._held = ""
                return pending[: index if self._include_stop else index - len(complete[0])]
        num_held = max(matcher.length for matcher in self._matchers)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]


class _Matcher:
    """Knuth, Morris and Pratt: how much of ``text`` the input's end matches, one step a character.

    A stop string of 1,000 characters must not be searched anew in the held text at each token.
    """

    def __init__(self, text: str) -> None:
        assert text, "SamplingParams refuses empty stop strings"
        self.text = text
        self.length = 0
        self._fallback = [0] * len(text)
        for index in range(1, len(text)):
            length = self._fallback[index - 1]
            while length and text[length] != text[index]:
                length = self._fallback[length - 1]
            self._fallback[index] = length + (text[length] == text[index])

    def feed(self, char: str) -> bool:
        """Whether ``char`` completes the text."""
        while self.length and self.text[self.length] != char:
            self.length = self._fallback[self.length - 1]
        self.length += self.text[self.length] == char
        return self.length == len(self.text)
