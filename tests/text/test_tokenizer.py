from __future__ import annotations

import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.text.tokenizer import Tokenizer, literal_pattern
from anaphora.text.vocabulary import TokenType, Vocabulary
from tests.text.tiny import GOLDEN, golden_tokenizer, tiny_vocabulary

SMALL = ("gpt-2", "llama-bpe", "gpt-4o")
TEXTS: list[str] = GOLDEN["texts"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with open_checkpoint(smollm2_path) as checkpoint:
        return checkpoint.tokenizer


@pytest.fixture(scope="module", params=SMALL)
def pre(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_golden(tokenizer: Tokenizer, name: str) -> None:
    for text, (plain, special) in zip(TEXTS, GOLDEN[name]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text
        found = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert found == special, text


def test_smollm_ids_are_those_of_llama_cpp(smollm2: Tokenizer) -> None:
    check_golden(smollm2, "smollm")


def test_vocabulary_gives_the_ids_of_the_references(pre: str) -> None:
    check_golden(Tokenizer.from_vocabulary(tiny_vocabulary(pre)), pre)


def test_tokenizer_json_gives_the_ids_of_the_references(pre: str) -> None:
    check_golden(golden_tokenizer(pre), pre)


def test_llama_cpp_agrees_with_hugging_face_where_it_can() -> None:
    assert not GOLDEN["gpt-2"]["llama_cpp_differs"]
    assert not GOLDEN["llama-bpe"]["llama_cpp_differs"]


@given(text=st.text())
def test_byte_level_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = golden_tokenizer("llama-bpe")
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == text.encode()


def test_control_tokens_come_from_text_only_on_demand(smollm2: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = smollm2.encode(text)
    assert not any(map(smollm2.is_control, ids))
    assert smollm2.decode(ids) == text
    parsed = smollm2.encode(text, parse_special=True)
    assert parsed[0] == 1
    assert parsed[-1] == 2
    assert smollm2.decode(parsed) == "user\nhi"
    assert smollm2.decode(parsed, skip_special_tokens=False) == text


def test_a_control_token_of_letters_stays_text_although_merges_are_ignored() -> None:
    vocabulary = tiny_vocabulary("llama-bpe", extra=[("stop", TokenType.CONTROL)])
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    assert not any(map(tokenizer.is_control, tokenizer.encode("stop", add_special_tokens=False)))
    assert tokenizer.encode("stop", add_special_tokens=False, parse_special=True) == [
        tokenizer.vocab_size - 1
    ]


def test_ignore_merges_takes_a_whole_word_that_no_merge_builds() -> None:
    extra = [("Ġxqzxqz", TokenType.NORMAL)]
    llama = Tokenizer.from_vocabulary(tiny_vocabulary("llama-bpe", extra=extra))
    assert llama.encode(" xqzxqz", add_special_tokens=False) == [llama.vocab_size - 1]
    gpt = Tokenizer.from_vocabulary(tiny_vocabulary("gpt-2", extra=extra))
    assert gpt.vocab_size - 1 not in gpt.encode(" xqzxqz", add_special_tokens=False)


def test_attributes(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.control_tokens["<|endoftext|>"] == 0
    assert len(smollm2.control_tokens) == 17
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_text(smollm2.encode(" world")[0]) == " world"


@pytest.mark.parametrize("token_id", [-1, 49152, 2**40])
def test_unknown_ids_are_refused(smollm2: Tokenizer, token_id: int) -> None:
    for call in (smollm2.token_bytes, smollm2.token_text, lambda i: smollm2.decode([5, i])):
        with pytest.raises(InvalidRequest, match=rf"{token_id}.*49152"):
            call(token_id)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80" * 3])
def test_lone_surrogates_are_the_clients_mistake(smollm2: Tokenizer, text: str) -> None:
    for parse_special in (False, True):
        with pytest.raises(InvalidRequest, match="surrogate U\\+D"):
            smollm2.encode(text, parse_special=parse_special)


def test_threads_share_a_tokenizer(smollm2: Tokenizer) -> None:
    expected = [smollm2.encode(text) for text in TEXTS]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(t for t, ids in zip(TEXTS, expected, strict=True) if smollm2.encode(t) != ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_padding_rows_decode_to_nothing() -> None:
    tokenizer = Tokenizer.from_vocabulary(tiny_vocabulary("gpt-2").padded(2000))
    assert tokenizer.vocab_size == 2000
    assert tokenizer.decode([1999]) == ""
    assert tokenizer.encode("") == []


def test_unknown_pre_tokenizer_is_named() -> None:
    vocabulary = tiny_vocabulary("gpt-2")
    fields = {name: getattr(vocabulary, name) for name in ("tokens", "types", "merges")}
    with pytest.raises(UnsupportedModel, match="'poro'"):
        Tokenizer.from_vocabulary(Vocabulary(**fields, pre_tokenizer="poro"))
    with pytest.raises(CorruptCheckpoint, match="bos_token_id is 10000"):
        Vocabulary(**fields, pre_tokenizer="gpt-2", bos_token_id=10_000)
    with pytest.raises(CorruptCheckpoint, match="merges"):
        Tokenizer.from_vocabulary(
            Vocabulary(**fields | {"merges": (("not", "there"),)}, pre_tokenizer="gpt-2")
        )
    with pytest.raises(UnsupportedModel, match="add_bos_token"):
        Tokenizer.from_vocabulary(Vocabulary(**fields, pre_tokenizer="gpt-2", add_bos=True))


class TestFromFile:
    def write(self, path: Path, **changes: Any) -> Path:
        content = GOLDEN["llama-bpe"]["tokenizer"]
        file = path / "tokenizer.json"
        file.write_text(json.dumps(content | changes), encoding="utf-8")
        return file

    def test_the_template_decides_about_bos_unless_the_config_does(self, tmp_path: Path) -> None:
        file = self.write(tmp_path)
        bos = golden_tokenizer("llama-bpe").control_tokens["<|bos|>"]
        assert Tokenizer.from_file(file).encode("a")[0] == bos
        config = tmp_path / "tokenizer_config.json"
        config.write_text('{"add_bos_token": false, "eos_token": {"content": "<|eos|>"}}')
        tokenizer = Tokenizer.from_file(file)
        assert bos not in tokenizer.encode("a")
        assert tokenizer.eos_token_id == tokenizer.control_tokens["<|eos|>"]
        assert "post_processor" in json.loads(file.read_text())
        file = self.write(tmp_path, post_processor=None)
        tokenizer = Tokenizer.from_file(
            file, config={"add_bos_token": True, "bos_token": "<|bos|>"}, vocab_size=1000
        )
        assert tokenizer.encode("a")[0] == bos
        assert tokenizer.vocab_size == 1000

    def test_other_kinds_are_named(self, tmp_path: Path) -> None:
        model = GOLDEN["llama-bpe"]["tokenizer"]["model"]
        with pytest.raises(UnsupportedModel, match="Unigram"):
            Tokenizer.from_file(
                self.write(tmp_path, model={"type": "Unigram", "vocab": [["a", -1.0]]})
            )
        for changes in ({}, {"model": model | {"byte_fallback": True}}):
            changes = changes | {"pre_tokenizer": {"type": "Whitespace"}}
            with pytest.raises(UnsupportedModel, match="ByteLevel"):
                Tokenizer.from_file(self.write(tmp_path, **changes))

    @pytest.mark.parametrize(
        "content", ["", "[]", "{}", "{", '{"model": 5}', '{"model": {"vocab": {"a": "x"}}}']
    )
    def test_damage_names_the_file(self, tmp_path: Path, content: str) -> None:
        file = tmp_path / "tokenizer.json"
        file.write_text(content)
        with pytest.raises((CorruptCheckpoint, UnsupportedModel), match=r"tokenizer\.json"):
            Tokenizer.from_file(file)
        with pytest.raises(CorruptCheckpoint, match=r"nothing\.json"):
            Tokenizer.from_file(tmp_path / "nothing.json")

    def test_merges_that_do_not_fit(self, tmp_path: Path) -> None:
        model = GOLDEN["llama-bpe"]["tokenizer"]["model"] | {"merges": [["no", "such"]]}
        with pytest.raises(CorruptCheckpoint, match="not a valid tokenizer"):
            Tokenizer.from_file(self.write(tmp_path, model=model))
        ids = GOLDEN["llama-bpe"]["tokenizer"]["model"]["vocab"] | {"far": 10**9}
        with pytest.raises(CorruptCheckpoint, match="1000000000"):
            Tokenizer.from_file(self.write(tmp_path, model=model | {"vocab": ids}))


def test_golden_file_is_small() -> None:
    path = Path(__file__).parents[1] / "golden" / "tokenizers.json.gz"
    assert path.stat().st_size < 100_000
    names = {"texts", "smollm", "gemma3", "sentencepiece", *SMALL}
    assert set(json.loads(gzip.decompress(path.read_bytes()))) == names


@given(
    literals=st.lists(st.text("<|ab ", min_size=1, max_size=6), max_size=8),
    text=st.text("<|ab ", max_size=30),
)
def test_of_several_literals_the_longest_is_found(literals: list[str], text: str) -> None:
    longest = sorted(literals, key=len, reverse=True)
    expected = re.findall("|".join(map(re.escape, longest)) or "(?!)", text)
    assert literal_pattern(literals).findall(text) == expected
