"""Constraints as the step loop uses them: compiled beside it, a mask of tokens for each step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from anaphora.constraints import LIMITS, Constraint, shorten
from anaphora.errors import NoTokenLeft
from anaphora.types import TokenTable

Mask = npt.NDArray[np.bool_]

# Of one choice's masks, of this thread's time. Usual ones take 20 to 100 microseconds.
_SECONDS_AT_FIRST = 0.1
_SECONDS_PER_TOKEN = 0.002


class Vocabulary:
    """The tokens of a model as llguidance reads them. A call gives token ids of a text."""

    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Holds the interpreter for 0.1 s with 49,000 tokens, for 1 s with 262,000."""
        self.eos_token_ids = sorted(eos_token_ids)
        self.eos_token_id = self.eos_token_ids[0]
        self.tokens = [*table.token_bytes, *[b""] * (vocab_size - len(table.token_bytes))]
        self.special_token_ids = sorted({*table.control_ids, *self.eos_token_ids})
        self.tokenizer: LLTokenizer | None = None
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(self),
            n_vocab=vocab_size,
            eos_token=self.eos_token_ids,
        )
        self.tokens = []

    def __call__(self, text: bytes) -> list[int]:
        """Where a grammar leaves no choice of text, it is written in the longest tokens."""
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text.decode())


class Matcher:
    """Where one choice stands in its constraint, and what its masks have cost."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param
        self._seconds_left = _SECONDS_AT_FIRST

    def copy(self) -> Matcher:
        """Another choice at the same place; what both have learnt of the grammar is shared."""
        return Matcher(self._matcher.deep_copy(), self._param)

    def fill(self, words: npt.NDArray[np.uint32]) -> None:
        """Writes which tokens may come next, a bit for each; none if it has failed."""
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._seconds_left += _SECONDS_PER_TOKEN - (time.thread_time() - start)
        if self._matcher.is_error():
            words[:] = 0

    def advance(self, token_id: int) -> None:
        """Goes on after a token that was allowed. Raises ``NoTokenLeft`` as ``check``."""
        self.check()
        self._matcher.consume_token(token_id)
        self.check()

    def check(self) -> None:
        """Raises ``NoTokenLeft`` if a limit is reached, of llguidance or of time."""
        complaint = None
        if self._matcher.is_error():
            complaint = shorten(self._matcher.get_error())
        elif self._seconds_left < 0:
            complaint = "its masks take too long"
        if complaint is not None:
            raise NoTokenLeft(f"{self._param} cannot be followed: {complaint}", param=self._param)


class Grammars:
    """Compiles constraints and fills masks."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = LLParserLimits(**LIMITS)
        self._vocabulary: Vocabulary | None = None
        self.table: TokenTable | None = None  # to be given before the first constraint

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at its beginning; copies of it are cheap. Raises ``NoTokenLeft``.

        To be called from one thread. Releases the interpreter while it compiles.
        """
        if not self._eos_token_ids:
            raise NoTokenLeft(
                f"{constraint.param} cannot be followed: this model has no token that ends an "
                "answer",
                param=constraint.param,
            )
        if self._vocabulary is None:
            assert self.table is not None, "a constraint came before the tokens"
            self._vocabulary = Vocabulary(self.table, self._vocab_size, self._eos_token_ids)
            self.table = None
        assert self._vocabulary.tokenizer is not None
        matcher = LLMatcher(
            self._vocabulary.tokenizer, constraint.grammar(), log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one builds most of the automaton
        found = Matcher(matcher, constraint.param)
        found.check()
        return found

    @property
    def needs_table(self) -> bool:
        """Whether nobody has said yet which tokens there are."""
        return self._vocabulary is None and self.table is None

    def masks(self, matchers: Sequence[Matcher]) -> Mask:
        """[len(matchers), vocab]: which tokens may come next. A failed one's row is empty.

        One after the other: threads would take longer to wake than most masks take.
        """
        words = np.zeros((len(matchers), -(-self._vocab_size // 32)), np.uint32)
        for row, matcher in zip(words, matchers, strict=True):
            matcher.fill(row)
        return np.unpackbits(
            words.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size
        ).view(np.bool_)
