"""Choosing tokens: each rule by its definition, and independence of neighbours."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from anaphora.cache.hashing import BlockHash
from anaphora.cache.pool import NOBODY
from anaphora.engine.accounts import Account
from anaphora.engine.sampler import adjust, candidates, logprob, sample
from anaphora.engine.sequence import Sequence
from anaphora.errors import NoTokenLeft
from anaphora.types import SamplingParams
from tests.engine.driving import make_driver, prompt

EOS = frozenset({2})
LOGITS = np.array([1.0, 3.0, 2.0, 0.0, -1.0, 3.0], np.float32)


def make_sequence(generated=(), prompt_ids=(0,), **params):
    seq = Sequence(
        "r",
        0,
        list(prompt_ids),
        SamplingParams(**params),
        BlockHash(bytes(32)),
        max_tokens=100,
        owner=NOBODY,
        account=Account(0),
    )
    for token_id in generated:
        seq.append(token_id, frozenset())
    return seq


def draws(count=4000, logits=LOGITS, **params):
    seq = make_sequence(seed=1, **params)
    return Counter(sample(logits, seq, EOS) for _ in range(count))


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum()


def test_greedy_takes_the_first_of_equal_best():
    assert sample(LOGITS, make_sequence(temperature=0), EOS) == 1


def test_temperature_gives_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        counts = draws(temperature=temperature)
        expected = softmax(LOGITS / temperature)
        for token_id in range(len(LOGITS)):
            # 4,000 draws: five standard deviations are at most 0.04
            assert counts[token_id] / 4000 == pytest.approx(expected[token_id], abs=0.04)


def test_top_k_keeps_the_best():
    assert set(draws(top_k=1)) == {1}
    assert set(draws(top_k=2)) == {1, 5}
    assert set(draws(top_k=3)) == {1, 5, 2}
    assert set(draws(top_k=100)) <= set(range(6))


def test_top_p_keeps_the_fewest_that_reach_it():
    p = softmax(LOGITS)
    best = float(p[1])
    assert set(draws(top_p=best * 0.99)) == {1}
    assert set(draws(top_p=best * 1.01)) == {1, 5}
    assert set(draws(top_p=2 * best + float(p[2]) * 0.5)) == {1, 5, 2}


def test_top_p_over_more_tokens_than_it_first_sorts():
    logits = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 0.01
    token_ids, weights = candidates(logits, make_sequence(top_p=0.9))
    p = softmax(logits)
    order = np.argsort(-p, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), 0.9)) + 1
    assert set(token_ids) == set(order[:count])
    assert len(weights) == count


@pytest.mark.parametrize("temperature", [1e-308, 1e-45, 1e-30, 1e-6, 0.01])
@pytest.mark.parametrize("more", [{}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_tiny_temperature_takes_the_best(temperature, more):
    assert set(draws(count=20, temperature=temperature, **more)) <= {1, 5}


def test_min_p_is_relative_to_the_best():
    ratio = float(np.exp(-1.0))  # token 2 against the best
    assert set(draws(min_p=ratio * 1.01)) == {1, 5}
    assert set(draws(min_p=ratio * 0.99)) == {1, 5, 2}


def test_penalties():
    seq = make_sequence(generated=(1, 1, 3), prompt_ids=(2,), repetition_penalty=2.0)
    np.testing.assert_array_equal(adjust(LOGITS, seq, EOS), [1, 1.5, 1, 0, -1, 3])
    seq = make_sequence(generated=(4,), repetition_penalty=2.0)
    np.testing.assert_array_equal(adjust(LOGITS, seq, EOS), [0.5, 3, 2, 0, -2, 3])
    seq = make_sequence(generated=(1, 1, 3), prompt_ids=(2,), frequency_penalty=0.5)
    np.testing.assert_array_equal(adjust(LOGITS, seq, EOS), [1, 2, 2, -0.5, -1, 3])
    seq = make_sequence(generated=(1, 1, 3), presence_penalty=-1.0)
    np.testing.assert_array_equal(adjust(LOGITS, seq, EOS), [1, 4, 2, 1, -1, 3])


def test_logit_bias_forces_and_forbids():
    assert sample(LOGITS, make_sequence(temperature=0, logit_bias={3: 100.0}), EOS) == 3
    banned = make_sequence(temperature=0, logit_bias={1: -100.0, 5: -100.0})
    assert sample(LOGITS, banned, EOS) == 2


def test_min_tokens_keeps_every_end_away():
    logits = np.array([0.0, 5.0, 9.0, 7.0], np.float32)  # 2 is the end of sequence
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (3,)}
    assert sample(logits, make_sequence(**params), EOS) == 1
    assert sample(logits, make_sequence(generated=(1,), **params), EOS) == 1
    assert sample(logits, make_sequence(generated=(1, 1), **params), EOS) == 2


def test_adjusting_leaves_the_logits_as_they_are():
    before = LOGITS.copy()
    sample(LOGITS, make_sequence(generated=(1,), frequency_penalty=1.0, logit_bias={0: 5.0}), EOS)
    np.testing.assert_array_equal(LOGITS, before)


def test_logprobs_are_the_models_own():
    expected = np.log(softmax(LOGITS))
    found = logprob(LOGITS, 2, num_top=3)
    assert found.logprob == pytest.approx(expected[2], abs=1e-12)
    assert [i for i, _ in found.top] == [1, 5, 2]
    assert [p for _, p in found.top] == pytest.approx(expected[[1, 5, 2]])
    assert logprob(LOGITS, 2, num_top=0).top == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad):
    with pytest.raises(FloatingPointError):
        sample(np.array([0, bad], np.float32), make_sequence(), EOS)


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch(tiny_path):
    params = {"temperature": 1.0, "seed": 42, "top_p": 0.95, "max_tokens": 20, "n": 2}
    alone = make_driver(tiny_path)
    first = alone.add(prompt(1, 30), **params)
    alone.finish()
    crowd = make_driver(tiny_path)
    for i in range(6):
        crowd.add(prompt(10 + i, 20 + i), temperature=1.0, max_tokens=15)
        crowd.step()
    second = crowd.add(prompt(1, 30), **params)
    crowd.finish()
    for index in range(2):
        assert alone.tokens(first, index) == crowd.tokens(second, index)
    assert alone.tokens(first, 0) != alone.tokens(first, 1)


def test_unseeded_requests_differ(tiny_path):
    driver = make_driver(tiny_path)
    ids = [driver.add(prompt(1, 30), temperature=1.0, max_tokens=20) for _ in range(2)]
    driver.finish()
    assert driver.tokens(ids[0]) != driver.tokens(ids[1])


def test_ends(tiny_path):
    driver = make_driver(tiny_path)
    free = driver.add(prompt(1, 30), max_tokens=6)
    driver.finish()
    tokens = driver.tokens(free)
    assert driver.outputs[f"{free}/0"][-1].finish_reason == "length"
    stopped = driver.add(prompt(1, 30), max_tokens=6, stop_token_ids=(tokens[2],))
    driver.finish()
    last = driver.outputs[f"{stopped}/0"][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", tokens[2])
    assert driver.tokens(stopped) == tokens[: tokens.index(tokens[2]) + 1]


def test_end_of_sequence_and_ignoring_it(tiny_path):
    driver = make_driver(tiny_path)
    params = {"max_tokens": 6, "logit_bias": {2: 100.0}}
    ended = driver.add(prompt(1, 30), ignore_eos=False, **params)
    ignored = driver.add(prompt(1, 30), ignore_eos=True, **params)
    late = driver.add(prompt(1, 30), ignore_eos=False, min_tokens=4, **params)
    driver.finish()
    assert driver.tokens(ended) == [2]
    assert driver.tokens(ignored) == [2] * 6
    tokens = driver.tokens(late)
    assert len(tokens) == 5
    assert 2 not in tokens[:4]
    assert tokens[4] == 2


def test_allowed_tokens_are_the_only_ones():
    assert set(draws(allowed_token_ids=(3, 4))) == {3, 4}
    assert set(draws(allowed_token_ids=(3, 4), logit_bias={1: 100.0})) == {3, 4}
    mask = np.array([True, False, False, False, True, False])
    seq = make_sequence(allowed_token_ids=(3, 4))
    assert sample(LOGITS, seq, EOS, mask) == 4
    with pytest.raises(NoTokenLeft, match="allowed_token_ids leaves no token"):
        sample(LOGITS, make_sequence(allowed_token_ids=(3,)), EOS, mask)


def test_runs_of_bad_tokens_are_not_completed():
    params = {"temperature": 0, "bad_token_ids": ((1, 5), (5, 1), (0, 1))}
    assert sample(LOGITS, make_sequence(**params), EOS) == 1  # (0, 1) would begin in the prompt
    assert sample(LOGITS, make_sequence([1], **params), EOS) == 1
    assert sample(LOGITS, make_sequence([5], **params), EOS) == 5
    assert sample(LOGITS, make_sequence([4, 0], **params), EOS) == 5
    seq = make_sequence(bad_token_ids=tuple((i,) for i in range(6)))
    with pytest.raises(NoTokenLeft, match="bad_words"):
        sample(LOGITS, seq, EOS)
