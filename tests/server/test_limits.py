"""Limits by requests and tokens a minute, on a clock of the tests' own."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.errors import RateLimited
from anaphora.server.limits import Limiter
from anaphora.server.registry import LimitTerms


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def limiter(clock, terms=None, **options):
    made = Limiter(cached_weight=0.1, clock=clock, **({"max_requests": 100} | options))
    made.update(terms or {})
    return made


def refused(found, *arguments):
    with pytest.raises(RateLimited) as caught:
        found.admit(*arguments)
    return caught.value


def test_without_limits_everybody_gets_in(clock):
    found = limiter(clock)
    assert found.admit("a", "chat", 10**9, 10**9).headers == {}
    assert found._accounts == {}


def test_requests_a_minute_refill_evenly(clock):
    found = limiter(clock, {("a", "*"): LimitTerms(requests_per_minute=6)})
    for _ in range(6):
        found.admit("a", "chat", 1, 1)
    error = refused(found, "a", "other", 1, 1)  # all endpoints together
    assert error.retry_after == pytest.approx(10)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert "6 requests a minute" in str(error)
    found.admit("b", "chat", 1, 1)  # nobody else is touched
    clock.now += 10
    found.admit("a", "chat", 1, 1)
    refused(found, "a", "chat", 1, 1)


def test_tokens_are_reserved_and_what_was_not_used_is_given_back(clock):
    terms = LimitTerms(input_tokens_per_minute=1000, output_tokens_per_minute=100)
    found = limiter(clock, {("*", "chat"): terms})
    first = found.admit("a", "chat", 600, 80)
    assert first.headers["x-ratelimit-remaining-input-tokens"] == "400"
    assert first.headers["x-ratelimit-remaining-tokens"] == "20"
    assert refused(found, "a", "chat", 10, 30).retry_after == pytest.approx(6)  # output
    first.settle(num_cached=500, num_output=5)
    first.settle(num_cached=500, num_output=5)  # a second time does nothing
    second = found.admit("a", "chat", 800, 95)  # 450 of the cached 500 and 75 of 80 came back
    assert second.headers["x-ratelimit-remaining-input-tokens"] == "50"
    found.admit("b", "chat", 1000, 100)  # each tenant has its own
    found.admit("a", "other", 1000, 100)


def test_what_is_larger_than_a_minutes_worth_is_let_in_when_nothing_is_used(clock):
    found = limiter(clock, {("a", "*"): LimitTerms(input_tokens_per_minute=100)})
    found.admit("a", "chat", 300, 1).settle(num_cached=0, num_output=1)
    assert refused(found, "a", "chat", 1, 1).retry_after == pytest.approx(120.6)
    clock.now += 120
    refused(found, "a", "chat", 1, 1)
    clock.now += 1
    found.admit("a", "chat", 1, 1)


def test_a_limit_of_zero_lets_nobody_in(clock):
    found = limiter(clock, {("a", "*"): LimitTerms(requests_per_minute=0)})
    assert refused(found, "a", "chat", 1, 1).retry_after == 60


def test_requests_at_a_time(clock):
    found = limiter(clock, {("a", "*"): LimitTerms(concurrent_requests=2)}, max_requests=3)
    held = [found.admit("a", "chat", 1, 1) for _ in range(2)]
    assert "2 requests running" in str(refused(found, "a", "chat", 1, 1))
    held.append(found.admit("b", "chat", 1, 1))
    assert "as many as it takes" in str(refused(found, "c", "chat", 1, 1))
    held[0].settle(num_cached=0, num_output=0)
    found.admit("a", "chat", 1, 1)


def test_new_limits_hold_at_once_and_running_requests_still_count(clock):
    found = limiter(clock, {("a", "*"): LimitTerms(concurrent_requests=2)})
    held = found.admit("a", "chat", 1, 1)
    found.update({("a", "*"): LimitTerms(concurrent_requests=1)})
    refused(found, "a", "chat", 1, 1)
    held.settle(num_cached=0, num_output=0)
    found.admit("a", "chat", 1, 1)
    found.update({})
    found.admit("a", "chat", 1, 1)


def test_a_tenants_own_limit_wins_over_everybodys(clock):
    terms = {
        ("*", "*"): LimitTerms(requests_per_minute=1),
        ("vip", "*"): LimitTerms(requests_per_minute=2),
    }
    found = limiter(clock, terms)
    found.admit("vip", "chat", 1, 1)
    found.admit("vip", "chat", 1, 1)
    found.admit("a", "chat", 1, 1)
    refused(found, "a", "chat", 1, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 50),
            st.integers(1, 50),
            st.floats(0, 5),
            st.floats(0, 1),
            st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_over_time_nobody_gets_more_than_the_limit(requests):
    """Whatever is asked and given back: used tokens never pass the limit times the time, plus one
    bucket and one request."""
    clock = Clock()
    terms = LimitTerms(input_tokens_per_minute=120, output_tokens_per_minute=60)
    found = limiter(clock, {("a", "*"): terms})
    used_input = used_output = 0.0
    held = []
    for num_input, num_output, pause, cached_share, output_share in requests:
        clock.now += pause
        with contextlib.suppress(RateLimited):
            reservation = found.admit("a", "x", num_input, num_output)
            held.append((reservation, num_input, num_output, cached_share, output_share))
        if len(held) > 3:
            reservation, num_in, num_out, cached_share, output_share = held.pop(0)
            cached, output = int(num_in * cached_share), int(num_out * output_share)
            reservation.settle(num_cached=cached, num_output=output)
            used_input += num_in - 0.9 * cached
            used_output += output
        assert used_input <= 120 + 120 * clock.now / 60 + 50
        assert used_output <= 60 + 60 * clock.now / 60 + 50
    for reservation, *_ in held:
        reservation.settle(num_cached=0, num_output=0)
    assert found._num_running == 0
