from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import InvalidRequest
from anaphora.text.detokenizer import Detokenizer
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType, Vocabulary
from tests.text.tiny import golden_tokenizer

TOKENIZER = golden_tokenizer("gpt-2")
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(256)}


def byte_tokens(data: bytes) -> list[int]:
    return [BYTE_IDS[data[i : i + 1]] for i in range(len(data))]


def chunks(items: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The definition, slowly: the stop string with the earliest end, then the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


# Bytes that meet often: lead bytes, continuations, ASCII, and what is never valid.
hard_bytes = st.lists(
    st.sampled_from(
        [
            *b"ab",
            0x80,
            0xBF,
            0xC3,
            0xA9,
            0xE2,
            0x82,
            0xAC,
            0xED,
            0xA0,
            0xF0,
            0x9F,
            0x91,
            0x8D,
            0xF4,
            0xC0,
            0xFF,
            0xEF,
        ]
    ),
    max_size=30,
).map(bytes)
streams = st.one_of(st.binary(max_size=40), hard_bytes, st.text(max_size=20).map(str.encode))


@given(data=streams, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_any_split_of_any_bytes_gives_the_text_of_the_whole(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    parts = [detokenizer.add(part) for part in chunks(byte_tokens(data), cuts)]
    parts.append(detokenizer.flush())
    assert "".join(parts) == data.decode("utf-8", errors="replace")
    assert TOKENIZER.decode(byte_tokens(data)) == "".join(parts)


@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), skip=st.booleans())
def test_token_by_token_equals_decode(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    text = "".join([*(detokenizer.add([i]) for i in ids), detokenizer.flush()])
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(
    text=st.text("abé", max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=12),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_split(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stops, include_stop_str_in_output=include)
    output = ""
    for part in chunks(byte_tokens(text.encode()), cuts):
        output += detokenizer.add(part)
        assert text.startswith(output)
    output += detokenizer.flush()
    expected = first_stop(text, stops)
    if expected is None:
        assert detokenizer.stop_reason is None
        assert output == text
    else:
        stop, end = expected
        assert detokenizer.stop_reason == stop
        assert output == text[: end if include else end - len(stop)]


def test_half_a_character_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    parts = [detokenizer.add([i]) for i in byte_tokens("👍!".encode())]
    assert parts == ["", "", "", "👍", "!"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["x"])
    assert detokenizer.add(byte_tokens(b"a\xe2\x82")) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["</end>"])
    assert detokenizer.add(byte_tokens(b"ab</e")) == "ab"
    assert detokenizer.add(byte_tokens(b"x</")) == "</ex"
    assert detokenizer.add(byte_tokens(b"end>more")) == ""
    assert detokenizer.stop_reason == "</end>"
    assert detokenizer.add(byte_tokens(b"more")) == ""
    assert detokenizer.flush() == ""


def test_a_stop_string_cut_off_by_the_end_is_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["END"])
    assert detokenizer.add(byte_tokens(b"the EN")) == "the "
    assert detokenizer.flush() == "EN"
    assert detokenizer.stop_reason is None


def test_a_replacement_character_can_be_a_stop_string() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["\ufffd"])
    assert detokenizer.add(byte_tokens(b"a\xe2\x82")) == "a"
    assert detokenizer.flush() == ""
    assert detokenizer.stop_reason == "\ufffd"


def test_control_tokens_are_skipped_or_shown() -> None:
    end = TOKENIZER.control_tokens["<|im_end|>"]
    ids = [*byte_tokens(b"a"), end, *byte_tokens(b"b")]
    assert Detokenizer(TOKENIZER).add(ids) == "ab"
    shown = Detokenizer(TOKENIZER, skip_special_tokens=False, stop=["<|im_end|>"])
    assert shown.add(ids) == "a"
    assert shown.stop_reason == "<|im_end|>"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="99999"):
        Detokenizer(TOKENIZER).add([99999])


def test_a_token_costs_the_same_late_in_a_long_output() -> None:
    vocabulary = Vocabulary(
        tokens=("a", "b"), types=(TokenType.NORMAL,) * 2, merges=(), pre_tokenizer="gpt-2"
    )
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    detokenizer = Detokenizer(tokenizer, stop=["a" * 1000 + "b", "ab" * 500 + "a"])
    start = time.perf_counter()
    for _ in range(20_000):
        detokenizer.add([0])
    assert time.perf_counter() - start < 2  # searching the held text anew would take minutes
    assert detokenizer.flush() == "a" * 1000
