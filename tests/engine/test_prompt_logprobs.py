"""Log-probabilities of prompts: those of the logits, however the prompt is computed."""

from __future__ import annotations

import pytest

from anaphora.engine.sampler import logprob
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.models.registry import load_model
from anaphora.ops.native import NativeOps
from tests.engine.driving import make_driver, prompt
from tests.models.running import all_logits

PROMPT = prompt(3, 70)


@pytest.fixture(scope="module")
def expected(tiny_path):
    with open_checkpoint(tiny_path) as checkpoint:
        model = load_model(checkpoint, NativeOps("float32", 1))
    logits = all_logits(model, PROMPT)
    return [logprob(row, target, 3) for row, target in zip(logits, PROMPT[1:], strict=False)]


def of(driver, request_id, index=0):
    first, *rest = driver.outputs[f"{request_id}/{index}"]
    assert not any(output.prompt_logprobs for output in rest)
    return first.prompt_logprobs


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}])
def test_they_are_those_of_the_models_logits(tiny_path, expected, options) -> None:
    driver = make_driver(tiny_path, **options)
    for _ in range(2):  # the second time it is in the cache, and computed all the same
        request_id = driver.add(PROMPT, prompt_logprobs=3, n=2)
        driver.finish()
        for index in range(2):
            assert of(driver, request_id, index) == expected
        assert driver.num_cached(request_id) == 0
        report = driver.outputs[f"{request_id}/0"][0].cache_report
        assert (report.miss_reason, report.num_missed_tokens) == ("prompt_logprobs", 70)


def test_nothing_else_changes(tiny_path) -> None:
    driver = make_driver(tiny_path)
    plain, _ = driver.run(PROMPT)
    scored, _ = driver.run(PROMPT, prompt_logprobs=0)
    warm, num_cached = driver.run(PROMPT)
    assert num_cached == 64
    assert plain.tobytes() == scored.tobytes() == warm.tobytes()


def test_after_preemption_and_among_others(tiny_path, expected) -> None:
    driver = make_driver(tiny_path, num_blocks=12, max_num_batched_tokens=32)
    driver.add(prompt(8, 60), max_tokens=60)
    for _ in range(40):
        driver.step()
    scored = [driver.add(PROMPT, prompt_logprobs=3, max_tokens=30) for _ in range(2)]
    driver.finish()
    assert driver.engine.scheduler.num_preemptions
    for request_id in scored:
        assert of(driver, request_id) == expected


def test_without_a_token(tiny_path, expected) -> None:
    driver = make_driver(tiny_path)
    request_id = driver.add(PROMPT, prompt_logprobs=3, max_tokens=0)
    short = driver.add([5], prompt_logprobs=3, max_tokens=0)
    driver.finish()
    [output] = driver.outputs[f"{request_id}/0"]
    assert (output.token_id, output.finish_reason) == (None, "length")
    assert output.prompt_logprobs == expected
    assert driver.outputs[f"{short}/0"][0].prompt_logprobs == []
