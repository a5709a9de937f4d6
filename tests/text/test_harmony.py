from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import InvalidRequest
from anaphora.fake import byte_tokenizer
from anaphora.text.chat import ChatTemplate
from anaphora.text.formats import detect_format
from anaphora.text.harmony import MARKS, HarmonyReader
from anaphora.types import SamplingParams
from tests.text.reading import Answer, read
from tests.text.test_chat import GOLDEN

TOKENIZER = byte_tokenizer([f"<|{name}|>" for name in MARKS])
PARAMS = SamplingParams(output_format="harmony")
ANALYSIS = "<|channel|>analysis<|message|>They ask. é👍<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello 👋!<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "é"}<|call|>'


def parse(script: str, **options: Any) -> Answer:
    num_tokens = options.pop("num_tokens", None)
    params = SamplingParams(output_format="harmony", **options)
    return read(TOKENIZER, script, params, num_tokens=num_tokens)


def test_reasoning_then_an_answer() -> None:
    answer = parse(ANALYSIS + FINAL)
    assert (answer.text, answer.reasoning, answer.calls) == ("Hello 👋!", "They ask. é👍", [])
    assert answer.parts.count("reasoning") == len("They ask. é👍".encode())
    assert answer.parts.count("content") == len("Hello 👋!".encode())


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        '<|channel|>commentary to=functions.f<|message|>{"a": "é"}<|call|>',
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": "é"}<|call|>',
        ' to=functions.f<|channel|>commentary json<|message|>{"a": "é"}<|call|>',
        '<|channel|>analysis to=functions.f code<|message|>{"a": "é"}<|call|>',
        '<|channel|>commentary to=f<|constrain|>json<|message|>{"a": "é"}<|call|>',
        '<|channel|>commentary to=functions.f<|message|>{"a": "é"}',  # the engine ended it
    ],
)
def test_a_call(call: str) -> None:
    answer = parse(ANALYSIS + "<|start|>assistant" + call)
    assert answer.calls == [["f", '{"a": "é"}']]
    assert (answer.text, answer.reasoning) == ("", "They ask. é👍")
    assert parse(call).calls == [["f", '{"a": "é"}']]


def test_a_preamble_is_for_the_user_and_calls_are_numbered() -> None:
    preamble = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    answer = parse(preamble + CALL + "<|start|>assistant" + CALL.replace("{", "[{"))
    assert answer.text == "I look it up."
    assert answer.calls == [["f", '{"a": "é"}'], ["f", '[{"a": "é"}']]


def test_messages_of_one_channel_are_apart() -> None:
    second = ANALYSIS.replace("They ask. é👍", "Well.")
    answer = parse(f"{ANALYSIS}<|start|>assistant{second}{FINAL}{FINAL}")
    assert answer.reasoning == "They ask. é👍\n\nWell."
    assert answer.text == "Hello 👋!\n\nHello 👋!"


def test_a_call_without_arguments_has_none() -> None:
    assert parse("<|channel|>commentary to=functions.f<|message|><|call|>").calls == [["f", "{}"]]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("Hello", "Hello"),  # a fine-tune that knows no channels
        ("Hello<|return|>", "Hello"),
        ("<|message|>Hello<|return|>", "Hello"),
        ("<|channel|>poem<|message|>Hello<|end|>", "Hello"),
        ("<|channel|>final<|message|>Hello<|end|> there", "Hello\n\n there"),
        ("x" * 200, "x" * 200),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b", "a\n\nb"),
        ("<|channel|>final to=user<|message|>Hello", "Hello"),
        ("<|channel|>final to=functions.<|message|>Hello", "Hello"),
        ("<|start|>assistant<|channel|>fin", ""),
        ("<|end|><|end|><|return|>", ""),
    ],
)
def test_what_is_badly_formed_is_not_lost(script: str, text: str) -> None:
    answer = parse(script)
    assert (answer.text, answer.reasoning, answer.calls) == (text, "", [])


def test_marks_that_are_spelled_stay_text() -> None:
    ids = TOKENIZER.encode("<|end|><|start|>system<|message|>no", add_special_tokens=False)
    assert not any(map(TOKENIZER.is_control, ids))
    head = TOKENIZER.encode(
        "<|channel|>final<|message|>", add_special_tokens=False, parse_special=True
    )
    reader = HarmonyReader(TOKENIZER, PARAMS)
    text = "".join(reader.add(i).text for i in [*head, *ids]) + reader.flush().text
    assert text == "<|end|><|start|>system<|message|>no"


def test_stop_strings_are_looked_for_in_content_alone() -> None:
    answer = parse(ANALYSIS + FINAL, stop=("ask", "lo", "final"))
    assert (answer.text, answer.reasoning) == ("Hel", "They ask. é👍")
    assert answer.stop_reason == "lo"
    assert parse(ANALYSIS + FINAL, stop=("lo",), include_stop_str_in_output=True).text == "Hello"
    whole = parse(ANALYSIS + FINAL, stop=("lo",), min_tokens=200)
    assert (whole.text, whole.stop_reason) == ("Hello 👋!", None)
    assert parse("Hello", stop=("lo",)).text == "Hel"
    assert parse(CALL, stop=("{",)).calls == [["f", '{"a": "é"}']]


@given(cut=st.integers(0, 200))
def test_a_cut_answer_is_the_beginning_of_the_whole_one(cut: int) -> None:
    script = ANALYSIS + "<|start|>assistant" + CALL + FINAL
    whole, part = parse(script), parse(script, num_tokens=cut)
    assert whole.reasoning.startswith(part.reasoning.removesuffix("\ufffd"))
    assert whole.text.startswith(part.text.removesuffix("\ufffd"))
    for (name, arguments), (whole_name, whole_arguments) in zip(
        part.calls, whole.calls, strict=False
    ):
        assert name == whole_name
        assert whole_arguments.startswith(arguments.removesuffix("\ufffd"))


def test_text_is_streamed_as_it_comes() -> None:
    steps = parse("<|channel|>final<|message|>abc").steps
    assert [step for step in steps if step] == ["a", "b", "c"]


PIECES = [*(f"<|{name}|>" for name in MARKS), "analysis", "final", " to=functions.f", "x", "é", " "]


@given(script=st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_order_of_marks_breaks_it(script: str) -> None:
    answer = parse(script)
    for part in (answer.text, answer.reasoning, *(a for _, a in answer.calls)):
        assert "<|" not in part


class TestHistory:
    template = ChatTemplate(GOLDEN["templates"]["harmony"], TOKENIZER)
    user: dict[str, Any] = {"role": "user", "content": "Hi"}  # noqa: RUF012
    call: dict[str, Any] = {  # noqa: RUF012
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Paris"}'},
    }
    result: dict[str, Any] = {"role": "tool", "content": "21", "tool_call_id": "a"}  # noqa: RUF012

    def render(self, *messages: dict[str, Any], **options: Any) -> str:
        return self.template.render(list(messages), **options)

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_before_a_call_goes_on_until_the_answer(self, field: str) -> None:
        calling = {"role": "assistant", "content": None, "tool_calls": [self.call], field: "Why?"}
        text = self.render(self.user, calling, self.result)
        assert "<|channel|>analysis<|message|>Why?<|end|>" in text
        assert 'to=functions.f<|channel|>commentary json<|message|>{"city": "Paris"}' in text
        answer = {"role": "assistant", "content": "21", field: "Secret."}
        text = self.render(self.user, calling, self.result, answer, self.user)
        assert "Why?" not in text
        assert "Secret." not in text

    def test_content_before_a_call_is_refused_by_no_template(self) -> None:
        calling = {"role": "assistant", "content": "Look.", "tool_calls": [self.call]}
        assert "analysis<|message|>Look.<|end|>" in self.render(self.user, calling)
        text = self.render(self.user, calling | {"reasoning": "Why?"})
        assert "analysis<|message|>Why?\n\nLook.<|end|>" in text

    def test_two_calls_in_a_message_are_refused(self) -> None:
        calling = {"role": "assistant", "content": None, "tool_calls": [self.call] * 2}
        with pytest.raises(InvalidRequest, match="2 calls") as error:
            self.render(self.user, calling)
        assert error.value.param == "messages[1].tool_calls"

    def test_a_tool_without_description(self) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
        assert "// \ntype f = " in self.render(self.user, tools=[tool])

    def test_arguments_stay_as_written_where_the_template_takes_text(self) -> None:
        source = (
            "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments if "
            "c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}"
            "{% endfor %}"
        )
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert ChatTemplate(source, TOKENIZER).render([message]) == '{"a":1}'


def test_the_format_follows_from_template_and_vocabulary() -> None:
    template = GOLDEN["templates"]["harmony"]
    assert detect_format(template, TOKENIZER) == "harmony"
    assert detect_format(template, byte_tokenizer()) == "text"
    assert detect_format(GOLDEN["templates"]["chatml"], TOKENIZER) == "text"
    llama = byte_tokenizer(["<|python_tag|>", "<|eot_id|>"])
    assert detect_format(GOLDEN["templates"]["llama3"], llama) == "llama3"
    assert detect_format(GOLDEN["templates"]["llama3"], TOKENIZER) == "text"
    assert detect_format(GOLDEN["templates"]["chatml"], llama) == "text"
