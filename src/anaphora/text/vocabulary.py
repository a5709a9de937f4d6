"""Tables of a BPE vocabulary, and the Hugging Face tokenizer built from them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.text import sentencepiece

# From the tokenizer.json files of Llama 3 and of o200k_base; GGUF knows them by these names.
_LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "gpt-4o")
# A turn, a call of a tool and a document end with different tokens. Metadata often names one of
# them, so that the others are found by name: those of a line whose first is there.
_ENDS = (
    ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),  # Llama 3
    ("<end_of_turn>",),  # Gemma
    ("<|call|>", "<|return|>", "<|endoftext|>"),  # GPT-OSS, where <|end|> ends a message of a turn
)
# How tokens are written down: bytes as printable characters, or text with ▁ for spaces.
Spelling = Literal["byte-level", "sentencepiece"]


class TokenType(enum.IntEnum):
    """What a token is for; the numbers are GGUF's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Everything a tokenizer is built from, without files.

    ``tokens[i]`` is token i: normal tokens as ``spelling`` says (a space is ``Ġ`` or ``▁``),
    control and user-defined ones as plain text. ``merges`` are pairs in rank order; SentencePiece
    has ``scores`` instead, one for each token. ``strip`` holds, for the few control tokens that
    swallow white space, whether they do so on their left and right.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[tuple[str, str], ...]
    pre_tokenizer: str  # one of PRE_TOKENIZERS, or the name of what defines it
    spelling: Spelling = "byte-level"
    scores: tuple[float, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    strip: Mapping[int, tuple[bool, bool]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.types):
            raise CorruptCheckpoint(
                f"the vocabulary has {len(self.tokens)} tokens but {len(self.types)} token types"
            )
        if self.scores and len(self.scores) != len(self.tokens):
            raise CorruptCheckpoint(
                f"the vocabulary has {len(self.tokens)} tokens but {len(self.scores)} scores"
            )
        for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < len(self.tokens):
                raise CorruptCheckpoint(
                    f"{name} is {value} but the vocabulary has {len(self.tokens)} tokens"
                )

    def padded(self, size: int) -> Vocabulary:
        """This vocabulary with unused tokens up to ``size``, itself if it has so many."""
        num_missing = size - len(self.tokens)
        if num_missing <= 0:
            return self
        return dataclasses.replace(
            self,
            tokens=self.tokens + ("",) * num_missing,
            types=self.types + (TokenType.UNUSED,) * num_missing,
            scores=self.scores and self.scores + (0.0,) * num_missing,
        )


def turn_ends(ids: Mapping[str, int]) -> list[int]:
    """The tokens that end an answer, of a vocabulary that has tokens for turns."""
    return [ids[text] for family in _ENDS if family[0] in ids for text in family if text in ids]


def build_backend(vocabulary: Vocabulary) -> Backend:
    """The BPE of ``vocabulary``, which knows no control tokens, so that none can come from text."""
    if vocabulary.spelling == "sentencepiece":
        return _build_sentencepiece(vocabulary)
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    pairs = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    ids = {text: index for index, (text, kind) in enumerate(pairs) if kind not in special}
    pre_tokenizer = _pre_tokenizer(vocabulary)
    try:
        model = models.BPE(
            ids,
            list(vocabulary.merges),
            fuse_unk=False,
            ignore_merges=vocabulary.pre_tokenizer == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception
        raise CorruptCheckpoint(
            f"the merges of the vocabulary do not fit its tokens: {error}"
        ) from error
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=False)
            for text, kind in pairs
            if kind == TokenType.USER_DEFINED and text
        ]
    )
    return backend


def _build_sentencepiece(vocabulary: Vocabulary) -> Backend:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CorruptCheckpoint("the vocabulary has no scores, by which its tokens are joined")
    kinds = (TokenType.NORMAL, TokenType.BYTE, TokenType.USER_DEFINED)
    pairs = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    ids = {text: index for index, (text, kind) in enumerate(pairs) if kind in kinds}
    unk, unk_token = vocabulary.unk_token_id, None
    if unk is not None:
        unk_token = vocabulary.tokens[unk]
        ids[unk_token] = unk  # no text joins to it, see ``without``
    user_defined = [text for text, kind in pairs if kind == TokenType.USER_DEFINED]
    return sentencepiece.build_scored(
        ids,
        vocabulary.scores,
        user_defined=user_defined,
        unk_token=unk_token,
        add_space_prefix=vocabulary.add_space_prefix,
    )


def _pre_tokenizer(vocabulary: Vocabulary) -> pre_tokenizers.PreTokenizer:
    name, prefix = vocabulary.pre_tokenizer, vocabulary.add_space_prefix
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if name == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix),
            ]
        )
    if name in ("llama-bpe", "gpt-4o"):
        pattern = Regex(_LLAMA_BPE if name == "llama-bpe" else _GPT_4O)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    raise UnsupportedModel(
        f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}. "
        "Serve the model from its Hugging Face directory, whose tokenizer.json defines it"
    )


def files_to_vocabulary(
    content: dict[str, Any], config: dict[str, Any], path: Path
) -> tuple[Backend, Backend, Vocabulary]:
    """The backends and tables of a ``tokenizer.json`` with its ``tokenizer_config.json``.

    The first backend is for text at the beginning, the second for text after a control token.
    """
    model, spelling = _bpe_model(content, path)
    try:
        added = {int(token["id"]): token for token in content.get("added_tokens") or ()}
        texts = {int(index): str(text) for text, index in model["vocab"].items()}
        texts |= {index: str(token["content"]) for index, token in added.items()}
        control = {index for index, token in added.items() if token.get("special")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} has a malformed token table: {error!r}") from error
    size = max(texts, default=-1) + 1
    if min(texts, default=0) < 0 or size > 4 * len(texts) + 4096:
        raise CorruptCheckpoint(f"{path} numbers its {len(texts)} tokens up to {size - 1}")
    kinds = [TokenType.NORMAL if index in texts else TokenType.UNUSED for index in range(size)]
    if spelling == "sentencepiece":
        kinds = [
            kind if sentencepiece.byte_of_token(texts.get(index, "")) is None else TokenType.BYTE
            for index, kind in enumerate(kinds)
        ]
    for index in added:
        kinds[index] = TokenType.CONTROL if index in control else TokenType.USER_DEFINED
    ids = {text: index for index, text in texts.items()}
    prefix, suffix = _template_tokens(content.get("post_processor"))
    bos, eos = (_named_token(config, f"{name}_token", ids) for name in ("bos", "eos"))
    if bos is None and prefix:
        bos = ids.get(prefix)
    vocabulary = Vocabulary(
        tokens=tuple(texts.get(index, "") for index in range(size)),
        types=tuple(kinds),
        merges=(),  # the backend below has them
        pre_tokenizer="tokenizer.json",
        spelling=spelling,
        add_space_prefix=sentencepiece.adds_space_prefix(content),
        bos_token_id=bos,
        eos_token_id=eos if eos is not None else ids.get(suffix or ""),
        unk_token_id=_named_token(config, "unk_token", ids),
        pad_token_id=_named_token(config, "pad_token", ids),
        add_bos=_flag(config, "add_bos_token", prefix is not None),
        add_eos=_flag(config, "add_eos_token", suffix is not None),
        strip={
            index: (bool(added[index].get("lstrip")), bool(added[index].get("rstrip")))
            for index in control
        },
    )
    backend = inner = _file_backend(content, model, control, texts, path)
    if (changed := sentencepiece.without_first_prefix(content)) is not None:
        inner = _file_backend(changed, model, control, texts, path)
    return backend, inner, vocabulary


def _bpe_model(content: dict[str, Any], path: Path) -> tuple[dict[str, Any], Spelling]:
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise CorruptCheckpoint(f"{path} has no model.vocab")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise UnsupportedModel(f"{path} is a {kind} tokenizer; supported is BPE")
    if sentencepiece.is_sentencepiece(content):
        return model, "sentencepiece"
    if "ByteLevel" not in json.dumps(content.get("pre_tokenizer")):
        raise UnsupportedModel(
            f"{path} has no ByteLevel pre-tokenizer and is not of SentencePiece's type; supported "
            "are these two kinds of BPE"
        )
    return model, "byte-level"


def _file_backend(
    content: dict[str, Any],
    model: dict[str, Any],
    control: set[int],
    texts: dict[int, str],
    path: Path,
) -> Backend:
    """The file's own pipeline without its control tokens, which we handle ourselves."""
    # The BPE needs its own unknown token, wherever else that is listed.
    hidden = {texts[index] for index in control} - {model.get("unk_token")}
    model = model | {"vocab": {t: i for t, i in model["vocab"].items() if t not in hidden}}
    model["merges"] = _merges_without(model.get("merges"), {texts[index] for index in control})
    tokens = [token for token in content.get("added_tokens") or () if token["id"] not in control]
    parts = content | {"model": model, "added_tokens": []}
    parts |= {"post_processor": None, "truncation": None, "padding": None}
    # Added tokens take the ids that the model's vocabulary gives them, so they must be in it.
    model["vocab"] |= {token["content"]: int(token["id"]) for token in tokens}
    try:
        backend = Backend.from_str(json.dumps(parts))
    except Exception as error:  # the library raises bare Exception
        raise CorruptCheckpoint(f"{path} is not a valid tokenizer: {error}") from error
    backend.add_tokens(
        [
            AddedToken(
                token["content"],
                single_word=bool(token.get("single_word")),
                lstrip=bool(token.get("lstrip")),
                rstrip=bool(token.get("rstrip")),
                normalized=bool(token.get("normalized")),
                special=False,
            )
            for token in tokens
        ]
    )
    return backend


def _merges_without(merges: Any, control: set[str]) -> Any:
    """Some files list how text would join to a control token's literal, which it must not."""
    if not isinstance(merges, list):
        return merges
    return [
        merge
        for merge in merges
        if (merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)) not in control
    ]


def _template_tokens(post_processor: Any) -> tuple[str | None, str | None]:
    """The special tokens that a TemplateProcessing step puts before and after one sequence."""
    if not isinstance(post_processor, dict):
        return None, None
    if post_processor.get("type") == "Sequence":
        found = [_template_tokens(step) for step in post_processor.get("processors") or ()]
        return next((pair for pair in found if any(pair)), (None, None))
    if post_processor.get("type") != "TemplateProcessing":
        return None, None
    before: str | None = None
    after: str | None = None
    seen_sequence = False
    try:
        for item in post_processor.get("single") or ():
            if "Sequence" in item:
                seen_sequence = True
            elif seen_sequence:
                after = str(item["SpecialToken"]["id"])
            else:
                before = str(item["SpecialToken"]["id"])
    except (KeyError, TypeError) as error:
        raise CorruptCheckpoint(
            "tokenizer.json: post_processor.single is not a list of Sequence and SpecialToken"
        ) from error
    return before, after


def _flag(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _named_token(config: dict[str, Any], name: str, ids: dict[str, int]) -> int | None:
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return ids.get(text) if isinstance(text, str) else None


def bytes_of_token(text: str, kind: TokenType, spelling: Spelling) -> bytes:
    """Raw bytes of a token stored as ``text``; only normal tokens and bytes are spelled."""
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        return text.encode("utf-8", errors="replace")
    if spelling == "sentencepiece":
        if kind == TokenType.BYTE and (byte := sentencepiece.byte_of_token(text)) is not None:
            return bytes([byte])
        # Gemma's tokens for runs of spaces are user-defined and spelled all the same.
        return text.replace(sentencepiece.SPACE, " ").encode("utf-8", errors="replace")
    if kind == TokenType.USER_DEFINED:
        return text.encode("utf-8", errors="replace")
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in text)
    except KeyError:
        return text.encode("utf-8", errors="replace")  # as the reference: the token as it is


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
