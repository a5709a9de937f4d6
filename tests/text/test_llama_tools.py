from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.fake import byte_tokenizer
from anaphora.types import SamplingParams
from tests.text.reading import Answer, read

TOKENIZER = byte_tokenizer(["<|python_tag|>", "<|eot_id|>", "<|eom_id|>"])
CALL = '{"name": "f", "parameters": {"city": "Zürich", "n": 2}}'
PARAMETERS = '{"city": "Zürich", "n": 2}'


def parse(script: str, **options: Any) -> Answer:
    num_tokens = options.pop("num_tokens", None)
    params = SamplingParams(output_format="llama3", tool_names=("f", "g"), **options)
    return read(TOKENIZER, script, params, num_tokens=num_tokens)


@pytest.mark.parametrize(
    "script",
    [
        CALL,
        CALL + "<|eot_id|>",
        f"<|python_tag|>{CALL}<|eom_id|>",
        f"\n  {CALL}\n",
        CALL.replace("parameters", "arguments"),
        '{"type": "function", ' + CALL[1:],
        '{"parameters": {"city": "Zürich", "n": 2}, "name": "f"}',
        CALL.replace(" ", "").replace(":", " : "),
    ],
)
def test_a_call(script: str) -> None:
    answer = parse(script)
    assert answer.calls == [["f", PARAMETERS]]
    assert answer.text == ""


LOOKALIKES = [
    "{",
    "{}",
    "[" + CALL + "]",
    "Sure: " + CALL,
    CALL + " Done.",
    CALL + ";" + CALL,
    CALL[:-1],
    CALL.replace('"f"', '"unknown"'),
    CALL.replace('"f"', "5"),
    '{"name": "f"}',
    '{"name": "f", "parameters": [1]}',
    '{"name": "f", "parameters": {}, "arguments": {}}',
    '{"name": "f", "parameters": {}, "more": 1}',
    '{"name": "f", "type": "object", "parameters": {}}',
    '{"name": "f", "parameters": {"x": NaN}}',
    '{"name": "f", "parameters": {"x": "\\ud800"}}',
    '{"nam": 1}',
    '{ "a": 1}',
    '{"name": ' + "[" * 3000,
    '  {"name": "Ada", "age": 36}',
    "f(city='Paris')",
]


@pytest.mark.parametrize("script", LOOKALIKES, ids=lambda text: text[:30])
def test_what_only_looks_like_a_call_is_text(script: str) -> None:
    answer = parse(script)
    assert answer.text == script
    assert answer.calls == []
    tagged = parse("<|python_tag|>" + script)
    assert (tagged.text, tagged.calls) == (script, [])


def test_text_before_the_tag_is_content() -> None:
    answer = parse(f"I look. <|python_tag|>{CALL}<|eom_id|>")
    assert (answer.text, answer.calls) == ("I look. ", [["f", PARAMETERS]])
    two = parse(f"<|python_tag|>{CALL}<|python_tag|>{CALL}")
    assert (two.text, two.calls) == (CALL, [["f", PARAMETERS]])  # the template takes one


def test_text_is_streamed_as_soon_as_it_is_no_call() -> None:
    answer = parse('{"nb": 1}')
    assert answer.steps[:5] == ["", "", "", '{"nb', '"']
    assert parse("Hello").steps[0] == "H"


def test_stop_strings() -> None:
    answer = parse(CALL, stop=("city",))
    assert answer.text == '{"name": "f", "parameters": {"'
    assert answer.stop_reason == "city"
    assert parse("Hello", stop=("lo",)).text == "Hel"


@given(cut=st.integers(0, len(CALL.encode()) - 1))
def test_a_cut_call_is_text(cut: int) -> None:
    answer = parse(CALL, num_tokens=cut)
    assert answer.calls == []
    assert answer.text == CALL.encode()[:cut].decode(errors="replace")


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    )
)
def test_arguments_are_the_json_that_was_written(value: Any) -> None:
    try:
        written = json.dumps({"name": "g", "parameters": {"v": value}})
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    [[name, arguments]] = parse(written).calls
    assert name == "g"
    assert json.loads(arguments) == {"v": value}


@given(st.text(st.sampled_from('{}":, namefprtsg1\n'), max_size=40))
def test_nothing_is_ever_lost(text: str) -> None:
    answer = parse(text)
    assert answer.text == text or (answer.calls and not answer.text)
