"""Small vocabularies from the golden file: about 760 tokens, trained on its texts."""

from __future__ import annotations

import functools
import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anaphora.text.sentencepiece import merges_of_scores
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType, Vocabulary

GOLDEN: dict[str, Any] = json.loads(
    gzip.decompress(
        (Path(__file__).parents[1] / "golden" / "tokenizers.json.gz").read_bytes()
    ).decode("utf-8")
)


def tiny_vocabulary(pre: str, *, extra: Sequence[tuple[str, TokenType]] = ()) -> Vocabulary:
    """The tables that a GGUF file would hold, with ``extra`` tokens at the end."""
    content = GOLDEN[pre]["tokenizer"]
    texts = {index: text for text, index in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, TokenType.NORMAL)
    for token in content["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    ids = {text: index for index, text in texts.items()}
    size = len(texts)
    return Vocabulary(
        tokens=(*(texts[i] for i in range(size)), *(text for text, _ in extra)),
        types=(*(kinds[i] for i in range(size)), *(kind for _, kind in extra)),
        merges=tuple((left, right) for left, right in content["model"]["merges"]),
        pre_tokenizer=pre,
        bos_token_id=ids["<|bos|>"],
        eos_token_id=ids["<|eos|>"],
        add_bos=pre == "llama-bpe",
    )


def sentencepiece_vocabulary(**changes: Any) -> Vocabulary:
    """A small vocabulary like Llama 2's, as GGUF holds it."""
    tokens, scores, types = zip(*GOLDEN["sentencepiece"]["pieces"], strict=True)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "scores": scores,
        "types": tuple(map(TokenType, types)),
        "merges": (),
        "pre_tokenizer": "sentencepiece",
        "spelling": "sentencepiece",
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos": True,
        "add_space_prefix": True,
    }
    return Vocabulary(**fields | changes)


def sentencepiece_json(*, first: bool = False) -> dict[str, Any]:
    """The same as a tokenizer.json, which puts a space before text as Llama 2's or at its start."""
    pieces = GOLDEN["sentencepiece"]["pieces"]
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    ids = {text: index for index, (text, _, _) in enumerate(pieces)}
    joining = {text: i for text, i in ids.items() if pieces[i][2] != TokenType.USER_DEFINED}
    return {
        "normalizer": None if first else {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": metaspace if first else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
        },
        "added_tokens": [
            {"id": index, "content": text, "special": kind != TokenType.USER_DEFINED}
            for index, (text, _, kind) in enumerate(pieces)
            if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        ],
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": merges_of_scores(joining, [score for _, score, _ in pieces]),
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


@functools.cache
def golden_tokenizer(pre: str) -> Tokenizer:
    """Built from the same vocabulary as a tokenizer.json."""
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(json.dumps(GOLDEN[pre]["tokenizer"]), encoding="utf-8")
        return Tokenizer.from_file(path, config=config)
