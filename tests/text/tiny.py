"""Small vocabularies from the golden file: about 760 tokens, trained on its texts."""

from __future__ import annotations

import functools
import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


@functools.cache
def golden_tokenizer(pre: str) -> Tokenizer:
    """Built from the same vocabulary as a tokenizer.json."""
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(json.dumps(GOLDEN[pre]["tokenizer"]), encoding="utf-8")
        return Tokenizer.from_file(path, config=config)
