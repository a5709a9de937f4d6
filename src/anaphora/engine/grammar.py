"""Constraints as the step loop uses them: compiled beside it, a mask of tokens for each step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from anaphora.constraints import LIMITS, Constraint, shorten
from anaphora.errors import NoTokenLeft
from anaphora.types import TokenTable

Mask = npt.NDArray[np.bool_]

_MIN_PARALLEL = 8  # masks; fewer take less time than waking threads


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


class Grammars:
    """Compiles constraints and fills masks."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], threads: int) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = threads
        self._limits = LLParserLimits(**LIMITS)
        self._vocabulary: Vocabulary | None = None
        self._executor: LLExecutor | None = None
        self.table: TokenTable | None = None  # to be given before the first constraint

    def compile(self, constraint: Constraint) -> LLMatcher:
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
        check(matcher, constraint.param)
        return matcher

    @property
    def needs_table(self) -> bool:
        """Whether nobody has said yet which tokens there are."""
        return self._vocabulary is None and self.table is None

    def masks(self, matchers: list[LLMatcher]) -> Mask:
        """[len(matchers), vocab]: which tokens may come next. A failed one's row is empty."""
        num_words = -(-self._vocab_size // 32)
        words = np.zeros((len(matchers), num_words), np.uint32)
        if len(matchers) < _MIN_PARALLEL:
            for row, matcher in zip(words, matchers, strict=True):
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(
                [(matcher, i) for i, matcher in enumerate(matchers)],
                words.ctypes.data,
                num_words * 4,
                len(matchers),
            )
        bits = np.unpackbits(
            words.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size
        )
        mask = bits.view(np.bool_)
        for row, matcher in zip(mask, matchers, strict=True):
            if matcher.is_error():
                row[:] = False
        return mask


def check(matcher: LLMatcher, param: str) -> None:
    """Raises ``NoTokenLeft`` if ``matcher`` has failed."""
    if matcher.is_error():
        raise NoTokenLeft(
            f"{param} cannot be followed: {shorten(matcher.get_error())}", param=param
        )
