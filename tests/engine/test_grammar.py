"""Constraints in the engine: random logits of the tiny model, tokens that stand for bytes."""

from __future__ import annotations

import itertools
import json
import re
import time

import jsonschema
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from anaphora.config import EngineConfig
from anaphora.constraints import Constraint, compose, json_constraint
from anaphora.engine import sampler
from anaphora.engine.accounts import Account
from anaphora.engine.engine import Engine
from anaphora.engine.grammar import Grammars
from anaphora.engine.sequence import Sequence
from anaphora.errors import NoTokenLeft
from anaphora.fake import FakeLLM
from anaphora.types import SamplingParams, TokenTable
from tests.engine.driving import BLOCK_BYTES, Driver, assert_bit_equal, prompt

EOS = 2
_PIECES = [b'{"', b'":', b'", "', b"true", b"null", b"12", b"ab", b"  ", "é".encode(), b"[]"]
TOKENS = [b"<s>", b"<unk>", b"</s>", *(bytes([i]) for i in range(256))]
TOKENS += [piece * repeat for repeat in (1, 2, 3) for piece in _PIECES]
TOKENS += [b""] * (331 - len(TOKENS))
TABLE = TokenTable(TOKENS, [0, 1, 2])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINT = json_constraint(PERSON, "response_format")


def make(path, num_blocks=64, **options) -> Driver:
    defaults = {"dtype": "float32", "threads": 1, "max_num_seqs": 16}
    config = EngineConfig(
        model=str(path), kv_cache_memory=num_blocks * BLOCK_BYTES, **(defaults | options)
    )
    driver = Driver(Engine(config))
    driver.engine.grammars.table = TABLE
    return driver


@pytest.fixture(scope="module")
def driver(tiny_path):
    return make(tiny_path)


def text(token_ids) -> str:
    return b"".join(TOKENS[i] for i in token_ids if i is not None and i != EOS).decode()


def run(driver, constraint=CONSTRAINT, *, length=20, n=1, **params) -> list[str]:
    defaults = {"temperature": 1.0, "seed": 1, "max_tokens": 400, "ignore_eos": False}
    request_id = driver.add(prompt(1, length), constraint=constraint, n=n, **(defaults | params))
    driver.finish()
    assert all(driver.outputs[f"{request_id}/{i}"][-1].finish_reason == "stop" for i in range(n))
    return [text(driver.tokens(request_id, i)) for i in range(n)]


class TestAnswers:
    def test_an_answer_is_valid(self, driver) -> None:
        for temperature in (0.0, 1.0, 2.0):
            [answer] = run(driver, temperature=temperature)
            jsonschema.validate(json.loads(answer), PERSON)

    def test_each_choice_has_its_own_state(self, driver) -> None:
        answers = run(driver, n=3, temperature=2.0)
        assert len(set(answers)) == 3
        for answer in answers:
            jsonschema.validate(json.loads(answer), PERSON)

    def test_expressions_choices_and_grammars(self, driver) -> None:
        [answer] = run(driver, Constraint("regex", r"^\d{3}-[a-f]{2}/[a-z/]{1,9}$"))
        assert re.fullmatch(r"\d{3}-[a-f]{2}/[a-z/]+", answer)
        [answer] = run(driver, Constraint("choice", '["yes", "no", "per\\"haps\\n"]'))
        assert answer in ("yes", "no", 'per"haps\n')
        [answer] = run(driver, Constraint("grammar", 'start: "<" /[a-c]{1,9}/ ">"'))
        assert re.fullmatch("<[a-c]+>", answer)
        [answer] = run(driver, Constraint("grammar", 'root ::= "<" [a-c] [a-c]? ">"'))
        assert re.fullmatch("<[a-c]+>", answer)

    def test_a_composed_grammar_with_control_tokens(self, driver) -> None:
        parts = {"content": CONSTRAINT}
        frame = compose("start: TEXT <[1]> @content\nTEXT: /[a-z]{1,5}/", parts, "x")
        request_id = driver.add(prompt(2, 9), constraint=frame, ignore_eos=False, max_tokens=400)
        driver.finish()
        tokens = driver.tokens(request_id)
        jsonschema.validate(json.loads(text(tokens[tokens.index(1) + 1 :])), PERSON)

    def test_white_space_is_bounded(self, driver) -> None:
        space = TOKENS.index(b"      ")
        [answer] = run(driver, logit_bias={space: 100.0, TOKENS.index(b" "): 50.0})
        assert max(map(len, re.findall(r"\s+", answer))) <= 40

    def test_the_end_waits_as_long_as_something_else_is_allowed(self, driver) -> None:
        digits = Constraint("regex", "[0-9]+")
        for params in (
            {"min_tokens": 30, "max_tokens": 40},
            {"ignore_eos": True, "max_tokens": 30},
        ):
            bias = {EOS: 100.0}
            request_id = driver.add(prompt(3, 9), constraint=digits, logit_bias=bias, **params)
            driver.finish()
            tokens = driver.tokens(request_id)
            assert EOS not in tokens[: params.get("min_tokens", 30)]
        [answer] = run(driver, Constraint("regex", "[0-9]{5}"), min_tokens=30)
        assert len(answer) == 5

    def test_cut_by_max_tokens(self, driver) -> None:
        request_id = driver.add(prompt(4, 9), constraint=CONSTRAINT, max_tokens=4)
        driver.finish()
        assert driver.outputs[f"{request_id}/0"][-1].finish_reason == "length"

    def test_logprobs_are_the_models_own(self, driver) -> None:
        request_id = driver.add(prompt(5, 9), constraint=CONSTRAINT, max_tokens=3, logprobs=2)
        driver.finish()
        for output, row in zip(
            driver.outputs[f"{request_id}/0"], driver.result(request_id), strict=True
        ):
            assert output.logprob == sampler.logprob(row, output.token_id, 2)
            assert output.logprob.top[0][0] == int(np.argmax(row))


def add_seeded(driver, **params) -> str:
    defaults = {"temperature": 0.8, "seed": 7, "max_tokens": 100, "ignore_eos": False}
    return driver.add(prompt(1, 50), constraint=CONSTRAINT, **(defaults | params))


@pytest.fixture(scope="module")
def cold(tiny_path):
    driver = make(tiny_path, enable_prefix_caching=False)
    request_id = add_seeded(driver)
    driver.finish()
    return driver.tokens(request_id), driver.result(request_id)


class TestExactness:
    """Same tokens and same logits, whatever else happens."""

    def assert_same(self, driver, request_id, cold) -> None:
        assert driver.tokens(request_id) == cold[0]
        assert_bit_equal(driver.result(request_id), cold[1])

    def test_warm(self, tiny_path, cold) -> None:
        driver = make(tiny_path)
        for _ in range(2):
            request_id = add_seeded(driver)
            driver.finish()
            self.assert_same(driver, request_id, cold)
        assert driver.num_cached(request_id) == 48

    def test_in_a_batch(self, tiny_path, cold) -> None:
        driver = make(tiny_path, num_blocks=256)
        others = [add_seeded(driver, seed=i) for i in range(9)]
        request_id = add_seeded(driver)
        free = [driver.add(prompt(i, 30), temperature=1.0, seed=i) for i in range(4)]
        driver.finish()
        self.assert_same(driver, request_id, cold)
        for other in others:
            jsonschema.validate(json.loads(text(driver.tokens(other))), PERSON)
        assert all(len(driver.tokens(other)) == 8 for other in free)

    def test_preempted(self, tiny_path, cold) -> None:
        driver = make(tiny_path, num_blocks=12)
        first = driver.add(prompt(8, 60), max_tokens=60)
        request_id = add_seeded(driver)
        driver.finish()
        assert driver.engine.scheduler.num_preemptions
        assert len(driver.tokens(first)) == 60
        self.assert_same(driver, request_id, cold)


class TestFailures:
    def test_a_bad_constraint_ends_its_request_and_no_other(self, driver) -> None:
        good = driver.add(prompt(1, 9), constraint=CONSTRAINT, ignore_eos=False, max_tokens=300)
        bad = driver.add(prompt(1, 9), constraint=Constraint("regex", "(", "guided_regex"), n=2)
        driver.finish()
        jsonschema.validate(json.loads(text(driver.tokens(good))), PERSON)
        for index in range(2):
            [output] = driver.outputs[f"{bad}/{index}"]
            assert (output.finish_reason, output.error_param) == ("error", "guided_regex")
            assert "unclosed group" in output.error

    def test_a_limit_in_mid_answer_ends_that_choice(self, driver) -> None:
        costly = Constraint("regex", "((a{1000}){1000}){1000}")
        bad = driver.add(prompt(1, 9), constraint=costly, max_tokens=400)
        good = driver.add(prompt(1, 9), constraint=CONSTRAINT, ignore_eos=False, max_tokens=300)
        driver.finish()
        last = driver.outputs[f"{bad}/0"][-1]
        assert (last.finish_reason, last.error_param) == ("error", "constraint")
        assert "too many" in last.error
        jsonschema.validate(json.loads(text(driver.tokens(good))), PERSON)

    def test_abort_in_every_state(self, driver) -> None:
        for num_steps in range(6):
            request_id = driver.add(prompt(1, 9), constraint=CONSTRAINT, n=2, max_tokens=50)
            for _ in range(num_steps):
                driver.step()
            driver.engine.abort(request_id)
            driver.finish()
            assert not driver.engine._requests
            assert not driver.engine._compiled

    def test_an_empty_mask_is_an_error_of_its_own(self) -> None:
        params = SamplingParams(constraint=CONSTRAINT)
        seq = Sequence("r", 0, [1], params, b"", max_tokens=1, owner=_owner(), account=Account(0))
        logits = np.zeros(331, np.float32)
        with pytest.raises(NoTokenLeft, match="response_format leaves no token"):
            sampler.sample(logits, seq, frozenset({EOS}), np.zeros(331, np.bool_))

    @pytest.mark.parametrize(
        "regex", ["(a|b)*a(a|b){30}", r"(?s:.*)(a.{1,200}b|c.{1,300}d)(?s:.*)", r"(\p{L}|\s)*x"]
    )
    def test_no_mask_takes_long(self, regex) -> None:
        grammars = Grammars(331, frozenset({EOS}))
        grammars.table = TABLE
        matcher = grammars.compile(Constraint("regex", regex))
        rng = np.random.default_rng(0)
        slowest = 0.0
        for _ in range(100):
            start = time.process_time()
            allowed = np.flatnonzero(grammars.masks([matcher])[0])
            slowest = max(slowest, time.process_time() - start)
            others = allowed[allowed != EOS]
            if not len(others):
                break
            try:
                matcher.advance(int(rng.choice(others)))
            except NoTokenLeft:
                break
        assert slowest < 0.2


def test_a_choice_whose_masks_take_long_ends(monkeypatch) -> None:
    grammars = Grammars(331, frozenset({EOS}))
    grammars.table = TABLE
    matcher = grammars.compile(Constraint("regex", "a*"))
    times = itertools.count(0.0, 0.03)
    monkeypatch.setattr("anaphora.engine.grammar.time.thread_time", lambda: next(times))
    for _ in range(3):
        grammars.masks([matcher])
        matcher.advance(3 + ord("a"))
    grammars.masks([matcher])
    with pytest.raises(NoTokenLeft, match="take too long"):
        matcher.advance(3 + ord("a"))


def _owner():
    from anaphora.cache.shares import Owner

    return Owner("t", "interactive", "")


def test_many_masks_at_once_equal_one_at_a_time() -> None:
    grammars = Grammars(331, frozenset({EOS}))
    grammars.table = TABLE
    first = grammars.compile(CONSTRAINT)
    matchers = [first.copy() for _ in range(12)]
    for steps, matcher in enumerate(matchers):
        for char in '{"name": "x'[:steps].encode():
            matcher.advance(3 + char)
    together = grammars.masks(matchers)
    for matcher, row in zip(matchers, together, strict=True):
        np.testing.assert_array_equal(grammars.masks([matcher])[0], row)
        assert not row[[0, 1]].any()
        assert not row[289:].any()  # tokens that stand for nothing


_SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.text('ab"\\é', max_size=3), min_size=1)),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
)


def _nested(inner):
    objects = st.builds(
        lambda properties, num_required: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        },
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, low, size: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + size,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


@seed(0)
@settings(max_examples=60, deadline=None, database=None)
@given(st.recursive(_SCALARS, _nested, max_leaves=6), st.integers(0, 2**31))
def test_random_schemas_give_valid_answers_from_random_logits(schema, entropy) -> None:
    grammars = Grammars(331, frozenset({EOS}))
    grammars.table = TABLE
    matcher = grammars.compile(json_constraint(schema, "x"))
    seq = Sequence(
        "r", 0, [1], SamplingParams(), b"", max_tokens=9, owner=_owner(), account=Account(0)
    )
    rng = np.random.default_rng(entropy)
    tokens: list[int] = []
    while len(tokens) < 3000:
        logits = rng.normal(size=331).astype(np.float32) * 3
        token_id = sampler.sample(logits, seq, frozenset({EOS}), grammars.masks([matcher])[0])
        if token_id == EOS:
            break
        matcher.advance(token_id)
        tokens.append(token_id)
    assert len(tokens) < 3000
    jsonschema.validate(json.loads(text(tokens)), schema)


class TestFrames:
    """What stands around a constraint in the formats that have other parts."""

    TOOLS = [  # noqa: RUF012
        {"type": "function", "function": {"name": "weather", "parameters": PERSON}},
        {"type": "function", "function": {"name": "now"}},
    ]
    ARGUMENTS = '{"name": "x", "age": 5}'

    def takes(self, output_format, answer, *, constraint=None, tools=(), **choice) -> bool:
        """Whether the whole of ``answer`` is allowed, and may end there."""
        llm = FakeLLM(output_format=output_format)
        params = SamplingParams(constraint=constraint)
        params = llm.chat_template.reading(params, list(tools), **choice)
        tokenizer = llm.tokenizer
        ends = {tokenizer.eos_token_id, tokenizer.token_id("<|return|>")} - {None}
        grammars = Grammars(tokenizer.vocab_size, frozenset(ends))
        grammars.table = TokenTable(
            [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
            sorted(tokenizer.control_tokens.values()),
        )
        matcher = grammars.compile(params.constraint)
        end = next(iter(ends))
        for token_id in tokenizer.encode(answer, add_special_tokens=False, parse_special=True):
            if not grammars.masks([matcher])[0][token_id]:
                return False
            matcher.advance(token_id)
        return bool(grammars.masks([matcher])[0][end])

    def test_harmony_reasons_freely_and_answers_as_asked(self) -> None:
        thought = '<|channel|>analysis<|message|>Hm: {"a": ] \n\n é<|end|><|start|>assistant'
        for before in ("", thought, thought * 2):
            for header in ("final", "final <|constrain|>json"):
                start = f"{before}<|channel|>{header}<|message|>"
                assert self.takes("harmony", start + self.ARGUMENTS, constraint=CONSTRAINT)
                assert not self.takes("harmony", start + "Sure.", constraint=CONSTRAINT)
        assert not self.takes("harmony", self.ARGUMENTS, constraint=CONSTRAINT)

    def test_harmony_calls(self) -> None:
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        final = "<|channel|>final<|message|>"
        for header in (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.weather<|message|>",
            " to=functions.weather<|channel|>commentary json<|message|>",
        ):
            for start in (header, thought + header):
                call = start + self.ARGUMENTS
                assert self.takes("harmony", call, tools=self.TOOLS, must_call=True)
                assert not self.takes("harmony", start + "{}", tools=self.TOOLS, must_call=True)
                assert self.takes("harmony", call, tools=self.TOOLS, constraint=CONSTRAINT)
        now = "<|channel|>commentary to=functions.now<|message|>{}"
        assert self.takes("harmony", now, tools=self.TOOLS, must_call=True)
        assert not self.takes("harmony", final + "x", tools=self.TOOLS, must_call=True)
        only = {"tools": self.TOOLS[:1], "only_these": True}
        assert self.takes("harmony", final + "Some words.", **only)
        assert not self.takes("harmony", now, **only)

    @pytest.mark.parametrize("output_format", ["text", "llama3"])
    def test_calls_as_json(self, output_format) -> None:
        call = f'{{"name": "weather", "parameters": {self.ARGUMENTS}}}'
        assert self.takes(output_format, call, tools=self.TOOLS, must_call=True)
        now = '{"name": "now", "parameters": {}}'
        assert self.takes(output_format, now, tools=self.TOOLS, must_call=True)
        assert not self.takes(output_format, now, tools=self.TOOLS[:1], must_call=True)
        assert not self.takes(output_format, "Sure.", tools=self.TOOLS, must_call=True)
        for answer in (call, self.ARGUMENTS):  # which begin alike
            assert self.takes(output_format, answer, tools=self.TOOLS, constraint=CONSTRAINT)
        assert self.takes(output_format, self.ARGUMENTS, constraint=CONSTRAINT)

    def test_references_in_parameters(self) -> None:
        schema = {"properties": {"who": {"$ref": "#/$defs/p"}}, "required": ["who"]}
        schema |= {"$defs": {"p": {"anyOf": [PERSON, {"$ref": "#/$defs/q"}]}, "q": {"const": 5}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for who, is_right in ((self.ARGUMENTS, True), ("5", True), ("6", False)):
            call = f'{{"name": "f", "parameters": {{"who": {who}}}}}'
            assert self.takes("text", call, tools=tools, must_call=True) == is_right
            call = f' to=functions.f<|channel|>commentary<|message|>{{"who": {who}}}'
            assert self.takes("harmony", call, tools=tools, must_call=True) == is_right
