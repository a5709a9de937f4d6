"""Text to token ids and back, for BPE vocabularies: byte-level, and SentencePiece's.

``encode`` never turns a control token's literal into a control token unless it is told to: text
that comes from a user stays text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from anaphora.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from anaphora.text.vocabulary import (
    TokenType,
    Vocabulary,
    build_backend,
    bytes_of_token,
    files_to_vocabulary,
)

_CONTROL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


class Tokenizer:
    """One model's vocabulary. Immutable after construction, so safe to share between threads."""

    def __init__(
        self, backend: Backend, vocabulary: Vocabulary, *, inner: Backend | None = None
    ) -> None:
        """``inner`` encodes text after a control token, where that differs from other text."""
        self._backend = backend
        self._inner = backend if inner is None else inner
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._spelling = vocabulary.spelling
        self._adds_space_prefix = vocabulary.add_space_prefix
        self._strip = vocabulary.strip
        self._ids = {text: index for index, text in enumerate(vocabulary.tokens)}
        self.vocab_size = len(vocabulary.tokens)
        # No spelling is shorter than what it stands for, so this bounds characters as well.
        self.max_token_chars = max(map(len, vocabulary.tokens), default=1)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.eos_token_id
        self.unk_token_id = vocabulary.unk_token_id
        self.pad_token_id = vocabulary.pad_token_id
        self.control_tokens = {
            text: index
            for index, (text, kind) in enumerate(
                zip(vocabulary.tokens, vocabulary.types, strict=True)
            )
            if kind in _CONTROL and text
        }
        self._control_ids = frozenset(self.control_tokens.values())
        self._prefix_ids = _special_ids(vocabulary.add_bos, "bos", vocabulary.bos_token_id)
        self._suffix_ids = _special_ids(vocabulary.add_eos, "eos", vocabulary.eos_token_id)
        user_defined = [
            text
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind == TokenType.USER_DEFINED and text
        ]
        self._added = literal_pattern([*self.control_tokens, *user_defined])
        self._encode = self._encode_text

    def remember(self, num_texts: int) -> None:
        """Keeps the token ids of the latest texts, for prompts that have long ones in common.

        Not where tenants share a tokenizer: the time would tell what another one had encoded.
        """
        self._encode = functools.lru_cache(num_texts)(self._encode_text)

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> Tokenizer:
        """Build from tables, as a GGUF file holds them.

        Raises ``UnsupportedModel`` for a pre-tokenizer we lack and ``CorruptCheckpoint`` for tables
        that contradict each other.
        """
        return cls(build_backend(vocabulary), vocabulary)

    @classmethod
    def from_file(
        cls, path: Path, *, config: dict[str, Any] | None = None, vocab_size: int = 0
    ) -> Tokenizer:
        """Build from a ``tokenizer.json``.

        ``config`` is the content of the ``tokenizer_config.json`` beside it; when None, that file
        is read if it exists. ``vocab_size`` is the number of rows of the model's embedding: models
        that pad it can emit ids for which the file has no token, and these decode to nothing.
        Raises ``CorruptCheckpoint`` naming the file that cannot be read and ``UnsupportedModel``
        for anything but BPE, byte-level or with SentencePiece's byte tokens.
        """
        if config is None:
            config = read_json(path.with_name("tokenizer_config.json"), missing_ok=True)
        backend, inner, vocabulary = files_to_vocabulary(read_json(path), config, path)
        return cls(backend, vocabulary.padded(vocab_size), inner=inner)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` puts the beginning-of-sequence token first if the model wants it.
        ``parse_special`` turns literals of control tokens in ``text`` into these tokens. Raises
        ``InvalidRequest`` when ``text`` holds a lone surrogate, which UTF-8 cannot express.
        """
        pieces = self.split_control(text) if parse_special else (text,)
        ids = self.encode_pieces(pieces)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Token ids of one text that ``split_control`` has cut; ids among the pieces stay."""
        ids: list[int] = []
        backend = self._backend
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode(piece, backend)
            backend = self._inner
        return ids

    def split_control(self, text: str) -> Iterator[str | int]:
        """``text`` cut at control-token literals: pieces of text, and ids where a literal stood.

        The leftmost literal wins and of those the longest. A user-defined token that begins earlier
        or is longer keeps its place in the text, as in the Hugging Face tokenizers.
        """
        start = 0
        strip_next = False
        for match in self._added.finditer(text):
            token_id = self.control_tokens.get(match[0])
            if token_id is None:
                continue
            strip_left, strip_right = self._strip.get(token_id, (False, False))
            piece = text[start : match.start()]
            piece = piece.lstrip() if strip_next else piece
            piece = piece.rstrip() if strip_left else piece
            if piece:
                yield piece
            yield token_id
            start, strip_next = match.end(), strip_right
        rest = text[start:].lstrip() if strip_next else text[start:]
        if rest:
            yield rest

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text is taken off again. Raises
        ``InvalidRequest`` for an id outside the vocabulary.
        """
        skip = self._control_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skip)
        if self._adds_space_prefix and self._spelling == "sentencepiece":
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token; of a control token, its literal in UTF-8."""
        self._check(token_id)
        return bytes_of_token(self._tokens[token_id], self._types[token_id], self._spelling)

    def token_text(self, token_id: int) -> str:
        """One token alone as text; half a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token stored as ``text``, as it is spelled there, None if there is none."""
        return self._ids.get(text)

    def is_control(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token, which ``skip_special_tokens`` leaves out."""
        return token_id in self._control_ids

    def _encode_text(self, text: str, backend: Backend) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}; send valid Unicode"
            ) from None
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in the vocabulary; ids run from 0 to "
                f"{self.vocab_size - 1} ({self.vocab_size} tokens)"
            )


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in ``path``; {} when it is missing and may be.

    Raises ``CorruptCheckpoint`` naming the file when it is missing, damaged or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise CorruptCheckpoint(f"{path} is missing; copy it beside the weights") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path} is not readable as JSON ({error}); fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _special_ids(wanted: bool, name: str, token_id: int | None) -> tuple[int, ...]:
    if not wanted:
        return ()
    if token_id is None:
        raise UnsupportedModel(
            f"the tokenizer wants add_{name}_token but names no {name} token; set {name}_token"
        )
    return (token_id,)


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of ``literals`` at a place; without any, nothing.

    Beginnings that several share are tried once: Gemma has 6,000 control tokens.
    """
    root: dict[str, Any] = {}
    for text in literals:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a literal ends here
    return re.compile(_alternatives(root) if root else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    parts: list[str] = []
    for char, child in node.items():
        if not char:
            continue
        text = char
        while len(child) == 1 and "" not in child:  # no choice: one run of characters
            [(char, child)] = child.items()
            text += char
        parts.append(re.escape(text) + ("" if list(child) == [""] else _alternatives(child)))
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)})" + ("?" if "" in node else "")
