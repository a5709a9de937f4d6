"""The blocking face, with the real model."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import anaphora
from anaphora import LLM, AsyncLLM, CacheScope, Constraint, EngineConfig, SamplingParams
from anaphora.errors import ConfigError, InvalidRequest, RequestError
from anaphora.fake import byte_tokenizer
from anaphora.llm import Completion, RequestOutputs, ToolCall
from anaphora.text.harmony import MARKS
from anaphora.types import SequenceOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), kv_cache_memory=2**28) as llm:
        yield llm


def test_a_batch_comes_back_in_order(llm):
    prompts = ["The capital of France is", llm.tokenizer.encode("Two plus two is"), "A B C D"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [c.text for c in together] == [c.text for c in alone]
    assert "Paris" in together[0].text


def test_choices_stand_side_by_side(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True, logprobs=2)
    found = llm.generate(["One", "Two"], params)
    assert [c.index for c in found] == [0, 1, 0, 1]
    assert all(len(c.token_ids) == len(c.logprobs) == 5 for c in found)


def test_a_chat_hits_its_own_past(llm):
    messages = [{"role": "user", "content": "Tell me about rivers. " * 10}]
    first = llm.chat(messages, GREEDY)
    second = llm.chat(messages, GREEDY)
    assert second.num_cached_tokens == (second.num_prompt_tokens - 1) // 16 * 16
    assert first.text == second.text
    assert llm.chat(messages, GREEDY, scope=CacheScope(tenant="b")).num_cached_tokens == 0


def test_stop_strings_cut(llm):
    params = SamplingParams(temperature=0, max_tokens=40, stop=("five",))
    found = llm.generate("One, two, three,", params)[0]
    assert found.stop_reason == "five"
    assert "five" not in found.text
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        ({"prompt_token_ids": [5]}, GREEDY, "prompts is a dict"),
        (3, GREEDY, "prompts is a int"),
        (None, GREEDY, "prompts is a NoneType"),
        ([5, 6], GREEDY, "a prompt is a int"),
        ("hi", {"max_tokens": 3}, "params is a dict"),
        (["hi"], [GREEDY], "params is a list"),
        ([[1.5]], GREEDY, "token ids are integers"),
        ([[]], GREEDY, "the prompt is empty"),
    ],
)
def test_wrong_arguments_are_named(llm, prompts, params, text):
    with pytest.raises(RequestError, match=text):
        llm.generate(prompts, params)
    assert llm.stats().num_waiting == 0


def test_threads_take_turns(llm):
    expected = llm.generate("The capital of France is", GREEDY)[0].text
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: llm.generate("The capital of France is", GREEDY), range(12))
        )
    assert {completions[0].text for completions in found} == {expected}


def test_one_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", [10**9]], GREEDY)
    assert llm.stats().num_waiting == llm.stats().num_used_blocks == 0
    assert llm.generate("The capital of France is", GREEDY)[0].text


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_wrong_options_are_named(face, smollm2_path):
    with pytest.raises(
        ConfigError, match="there is no option 'kv_cache'; there are audit_hits, block_size"
    ):
        face(str(smollm2_path), kv_cache=5)
    with pytest.raises(ConfigError, match="kv_cache_memory is '2GiB'; it must be a whole number"):
        face(str(smollm2_path), kv_cache_memory="2GiB")
    with pytest.raises(ConfigError, match="int8, float32"):
        face(EngineConfig(model=str(smollm2_path)), dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": "five"}, "stop"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 2**70}, "top_k"),
    ],
)
def test_sampling_of_a_wrong_type_is_named(options, param):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**options)
    assert error.value.param == param


def test_a_forced_call(llm):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(max_tokens=60, temperature=0)
    answer = llm.chat(messages, params, tools=tools, must_call=True)
    [call] = answer.tool_calls
    assert (call.name, answer.text) == ("f", "")
    assert json.loads(call.arguments)["a"] in (1, 2)
    with pytest.raises(InvalidRequest, match="there are no tools"):
        llm.chat(messages, must_call=True)


def test_a_constraint(llm):
    params = SamplingParams(n=3, seed=1, constraint=Constraint("regex", r"[a-z]{3}-\d{2}"))
    answers = llm.generate("A code: ", params)
    assert all(re.fullmatch(r"[a-z]{3}-\d{2}", answer.text) for answer in answers)
    with pytest.raises(InvalidRequest, match="look-around"):
        llm.generate("A", SamplingParams(constraint=Constraint("regex", "(?=a)")))


def test_what_the_engine_gives_is_taken_apart():
    tokenizer = byte_tokenizer([f"<|{name}|>" for name in MARKS])
    script = (
        "<|channel|>analysis<|message|>Hm é.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f<|message|>{"a": 1}<|call|>'
    )
    ids = tokenizer.encode(script, add_special_tokens=False, parse_special=True)
    outputs = RequestOutputs(tokenizer, SamplingParams(n=2, output_format="harmony"))
    completions = [Completion(), Completion()]
    for position, token_id in enumerate(ids):
        for index, completion in enumerate(completions):
            if index and position > 24:
                continue  # the second is cut in its reasoning
            delta = outputs.add(
                SequenceOutput(
                    request_id="r",
                    index=index,
                    num_cached_tokens=0,
                    token_id=token_id,
                    finish_reason={len(ids) - 1: "stop", 24: "length" if index else None}.get(
                        position
                    ),
                )
            )
            completion.extend(delta)
    assert outputs.is_finished
    assert completions[0].reasoning == "Hm é."
    assert completions[0].tool_calls == [ToolCall("f", '{"a": 1}')]
    assert completions[0].text == completions[1].text == ""
    assert (completions[1].finish_reason, completions[1].tool_calls) == ("length", [])


def test_the_version_is_known():
    assert anaphora.__version__.count(".") == 2
