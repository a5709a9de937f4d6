"""SentencePiece-type BPE: spaces written as ``▁``, unknown characters as tokens of single bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from anaphora.errors import CorruptCheckpoint

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_of_token(text: str) -> int | None:
    """The byte that ``<0x0A>`` and its like stand for, None for other texts."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


def build_scored(
    ids: dict[str, int],
    scores: Sequence[float],
    *,
    user_defined: Sequence[str],
    unk_token: str | None,
    add_space_prefix: bool,
) -> Tokenizer:
    """The BPE of a vocabulary that has a score for each token and no merges.

    ``ids`` are the tokens that text can become: normal ones, bytes and ``user_defined``. The score
    of token i is ``scores[i]``. Without a token for each byte, what no token spells becomes
    ``unk_token``. Raises ``CorruptCheckpoint`` if there is neither.
    """
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    if not has_bytes and unk_token is None:
        raise CorruptCheckpoint(
            "the vocabulary has neither a token for each byte nor an unknown token; it is damaged"
        )
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            merges_of_scores(ids, scores, without={*user_defined, unk_token}),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in user_defined if text])
    return tokenizer


def merges_of_scores(
    ids: dict[str, int], scores: Sequence[float], *, without: Collection[str | None] = ()
) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the highest score of what it joins to first.

    SentencePiece joins whichever neighbours give the highest score, so a pair needs no score of its
    own. Byte tokens and those of ``without`` neither join nor come of joining.
    """
    normal = {
        text: (-scores[index], index)
        for text, index in ids.items()
        if text and text not in without and byte_of_token(text) is None
    }
    ranked = [
        (*rank, cut, text)
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    ranked.sort()
    return [(text[:cut], text[cut:]) for _, _, cut, text in ranked]


def is_sentencepiece(content: dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` has such a vocabulary."""
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return bool(content["model"].get("byte_fallback")) and (
        "Metaspace" in steps or "u2581" in steps
    )


def without_first_prefix(content: dict[str, Any]) -> dict[str, Any] | None:
    """The pipeline for text that follows a control token, None if it is the same.

    ``prepend_scheme: "first"`` puts a space before the beginning of a whole input, control tokens
    included. We encode what stands between these on its own, so the pipeline cannot know.
    """
    text = json.dumps(content.get("pre_tokenizer"))
    changed = re.sub(r'("prepend_scheme": )"first"', r'\1"never"', text)
    return None if changed == text else content | {"pre_tokenizer": json.loads(changed)}


def adds_space_prefix(content: dict[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` puts a space before text."""
    normalizer, pre_tokenizer = json.dumps(content.get("normalizer")), content.get("pre_tokenizer")
    schemes = re.findall(r'"prepend_scheme": "(\w+)"', json.dumps(pre_tokenizer))
    return '"Prepend"' in normalizer or any(scheme != "never" for scheme in schemes)
