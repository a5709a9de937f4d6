from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import CorruptCheckpoint, InvalidRequest
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.gguf import read_vocabulary
from anaphora.text.chat import ChatTemplate
from anaphora.text.detokenizer import Detokenizer
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType
from tests.text.test_chat import GOLDEN as CHAT_GOLDEN
from tests.text.test_tokenizer import TEXTS, check_golden
from tests.text.tiny import GOLDEN, sentencepiece_json, sentencepiece_vocabulary

TEMPLATES: dict[str, str] = CHAT_GOLDEN["templates"]
SMALL = Tokenizer.from_vocabulary(sentencepiece_vocabulary())


def from_json(tmp_path: Path, content: dict[str, Any]) -> Tokenizer:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.from_file(file)


def test_scores_give_the_ids_of_the_references() -> None:
    check_golden(SMALL, "sentencepiece")
    assert not GOLDEN["sentencepiece"]["hugging_face_differs"]


def test_tokenizer_json_gives_the_ids_of_the_references(tmp_path: Path) -> None:
    tokenizer = from_json(tmp_path, sentencepiece_json())
    check_golden(tokenizer, "sentencepiece")
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1


def test_a_space_at_the_beginning_only(tmp_path: Path) -> None:
    tokenizer = from_json(tmp_path, sentencepiece_json(first=True))
    for text, (plain, special) in zip(TEXTS, GOLDEN["sentencepiece"]["first"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text
        found = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert found == special, text


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    with open_checkpoint(gemma3_path) as checkpoint:
        return checkpoint.tokenizer


def test_gemma3_gives_the_ids_of_sentencepiece(gemma3: Tokenizer) -> None:
    check_golden(gemma3, "gemma3")


def test_what_a_user_types_is_no_control_token(gemma3: Tokenizer) -> None:
    text = "<start_of_turn>user<eos><0x0A><unk>"
    ids = gemma3.encode(text)
    assert ids[0] == gemma3.bos_token_id == 2
    assert not any(map(gemma3.is_control, ids[1:]))
    assert gemma3.decode(ids[1:]) == text
    assert "\n" not in gemma3.decode(ids)
    assert gemma3.encode(text, parse_special=True)[1] == 105


@pytest.mark.parametrize("name", ["small", "gemma3"])
def test_decoding_gives_the_text_back(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = SMALL if name == "small" else request.getfixturevalue("gemma3")

    @given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    # After a user-defined token llama.cpp puts a space, so that the small one leaves it out there.
    assert tokenizer.decode(tokenizer.encode("  leading, 👋🏽 and\ttabs")) is not None
    if name == "gemma3":
        check()


@given(text=st.text(st.characters(exclude_characters="▁ \n<", exclude_categories=["Cs"])))
def test_bytes_are_streamed_as_whole_characters(text: str) -> None:
    ids = SMALL.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(SMALL)
    pieces = [detokenizer.add([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == (" " + text if text else "")
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_byte_tokens_are_bytes() -> None:
    newline = SMALL.token_id("<0x0A>")
    assert newline is not None
    assert SMALL.token_bytes(newline) == b"\n"
    assert SMALL.decode([newline, newline]) == "\n\n"
    typed = SMALL.encode("<0x0A>", add_special_tokens=False)
    assert newline not in typed
    assert SMALL.decode(typed) == "<0x0A>"
    half = [SMALL.token_id(f"<0x{byte:02X}>") or 0 for byte in "👋".encode()[:2]]
    assert SMALL.decode(half) == "\ufffd"


def test_without_bytes_unknown_characters_are_the_unknown_token() -> None:
    vocabulary = sentencepiece_vocabulary()
    types = tuple(TokenType.UNUSED if kind == TokenType.BYTE else kind for kind in vocabulary.types)
    tokenizer = Tokenizer.from_vocabulary(sentencepiece_vocabulary(types=types))
    assert tokenizer.encode("𓀀𓀁", add_special_tokens=False)[-1] == 0
    with pytest.raises(CorruptCheckpoint, match="unknown token"):
        Tokenizer.from_vocabulary(sentencepiece_vocabulary(types=types, unk_token_id=None))
    with pytest.raises(CorruptCheckpoint, match="no scores"):
        Tokenizer.from_vocabulary(sentencepiece_vocabulary(scores=()))
    with pytest.raises(CorruptCheckpoint, match="1 scores"):
        sentencepiece_vocabulary(scores=(1.0,))


def test_a_vocabulary_of_a_control_token_that_text_could_join_to(tmp_path: Path) -> None:
    content = sentencepiece_json()
    for left, right in (("<", "s>"), ("<s", ">")):  # files of Llama 2 have such merges
        if {left, right} <= set(content["model"]["vocab"]):
            content["model"]["merges"].append([left, right])
    content["model"]["vocab"] |= {"s>": len(content["model"]["vocab"])}
    content["model"]["merges"] += [["s", ">"], ["<", "s>"]]
    ids = from_json(tmp_path, content).encode("<s>", add_special_tokens=False)
    assert 1 not in ids


class TestGGUF:
    def fields(self, **changes: Any) -> dict[str, Any]:
        tokens, scores, types = zip(*GOLDEN["sentencepiece"]["pieces"], strict=True)
        fields: dict[str, Any] = {
            "model": "llama",
            "tokens": list(tokens),
            "scores": list(scores),
            "token_type": list(types),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
        merged = {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items()}
        return {name: value for name, value in merged.items() if value is not None}

    def test_defaults_are_those_of_llama_cpp(self) -> None:
        vocabulary = read_vocabulary(self.fields(), Path("x.gguf"))
        assert vocabulary.add_bos
        assert vocabulary.add_space_prefix
        assert Tokenizer.from_vocabulary(vocabulary).encode("Hi") == SMALL.encode("Hi")
        plain = read_vocabulary(
            self.fields(add_bos_token=False, add_space_prefix=False), Path("x.gguf")
        )
        tokenizer = Tokenizer.from_vocabulary(plain)
        assert tokenizer.decode(tokenizer.encode(" Hi")) == " Hi"
        assert tokenizer.encode(" Hi") == SMALL.encode("Hi", add_special_tokens=False)

    @pytest.mark.parametrize("scores", [None, "text", [1], ["a"]])
    def test_damaged_scores_are_named(self, scores: Any) -> None:
        with pytest.raises(CorruptCheckpoint, match=r"x\.gguf.*scores"):
            read_vocabulary(self.fields(scores=scores), Path("x.gguf"))


@pytest.fixture
def template(gemma3: Tokenizer) -> ChatTemplate:
    return ChatTemplate(TEMPLATES["gemma"], gemma3)


class TestGemmaChat:
    def test_turns(self, template: ChatTemplate, gemma3: Tokenizer) -> None:
        system = {"role": "system", "content": "Be brief."}
        user = {"role": "user", "content": " Hi <end_of_turn> 👋  "}
        ids = template.encode([system, user])
        shown = "<start_of_turn>user\nBe brief.\n\nHi <end_of_turn> 👋<end_of_turn>\n"
        assert gemma3.decode(ids, skip_special_tokens=False) == (
            f"<bos>{shown}<start_of_turn>model\n"
        )
        controls = [gemma3.token_text(i) for i in ids if gemma3.is_control(i)]
        assert controls == ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>"]

    def test_turns_that_do_not_alternate(self, template: ChatTemplate) -> None:
        user = {"role": "user", "content": "Hi"}
        with pytest.raises(InvalidRequest, match="roles must alternate") as error:
            template.encode([user, user])
        assert (error.value.status, error.value.param) == (400, "messages")
