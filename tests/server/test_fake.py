"""``FakeLLM`` keeps the contract that the server, and users' tests, rely on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from anaphora.errors import (
    ContextTooLong,
    EngineDied,
    EngineUnavailable,
    InvalidRequest,
)
from anaphora.fake import FakeLLM
from anaphora.server.served import ServedLLM
from anaphora.types import CacheScope, CompletionDelta, SamplingParams

PROMPT = list(b"0123456789abcdef" * 2)


async def collect(llm: FakeLLM, prompt: list[int], **options: object) -> list[CompletionDelta]:
    scope = options.pop("scope", CacheScope())
    assert isinstance(scope, CacheScope)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return [delta async for delta in llm.generate(prompt, params, scope=scope)]


def run(llm: FakeLLM, prompt: list[int] = PROMPT, **options: object) -> list[CompletionDelta]:
    return asyncio.run(collect(llm, prompt, **options))


def text_of(deltas: list[CompletionDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_it_is_a_served_llm() -> None:
    members = [name for name in vars(ServedLLM) if not name.startswith("_")]
    assert len(members) == 11
    llm = FakeLLM()
    assert all(hasattr(llm, name) for name in members)


def test_answers_follow_the_script_and_then_echo() -> None:
    llm = FakeLLM()
    llm.enqueue("first")
    llm.enqueue("second")
    assert [text_of(run(llm)) for _ in range(3)] == [
        "first",
        "second",
        "You said: 0123456789abcdef0123456789abcdef",
    ]


def test_choices_are_interleaved_and_each_ends_once() -> None:
    deltas = run(FakeLLM(), n=3, max_tokens=2)
    assert [delta.index for delta in deltas] == [0, 1, 2, 0, 1, 2]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + ["length"] * 3


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)]
)
def test_cached_tokens_are_whole_blocks_and_never_the_whole_prompt(
    length: int, cached: int
) -> None:
    llm = FakeLLM()
    prompt = list(range(length))
    assert run(llm, prompt, max_tokens=1)[0].num_cached_tokens == 0
    assert run(llm, prompt, max_tokens=1)[0].num_cached_tokens == cached
    assert run(llm, [255, *prompt], max_tokens=1)[0].num_cached_tokens == 0
    off = FakeLLM(enable_prefix_caching=False)
    assert [run(off, prompt, max_tokens=1)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_output_is_cached_too() -> None:
    llm = FakeLLM()
    deltas = run(llm)
    output = [token_id for delta in deltas for token_id in delta.token_ids]
    assert (
        run(llm, [*PROMPT, *output])[0].num_cached_tokens == (len(PROMPT + output) - 1) // 16 * 16
    )


@pytest.mark.parametrize(
    "scope",
    [CacheScope(tenant="b"), CacheScope(cache_salt="b"), CacheScope(prompt_cache_key="b")],
)
def test_scopes_share_nothing(scope: CacheScope) -> None:
    llm = FakeLLM()
    run(llm)
    assert run(llm, scope=scope)[0].num_cached_tokens == 0
    assert run(llm, scope=scope)[0].num_cached_tokens == 16


def test_arguments_are_checked_when_called() -> None:
    llm = FakeLLM(max_model_len=8)
    with pytest.raises(InvalidRequest):
        llm.generate([], SamplingParams())
    with pytest.raises(ContextTooLong):
        llm.generate([1] * 8, SamplingParams())
    llm.enqueue(InvalidRequest("no", param="prompt"))
    with pytest.raises(InvalidRequest, match="no"):
        llm.generate([1], SamplingParams())
    llm.refuse("full")
    assert not llm.is_ready
    with pytest.raises(EngineUnavailable, match="full"):
        llm.generate([1], SamplingParams())
    llm.recover()
    assert run(llm, [1])[-1].finish_reason == "length"
    asyncio.run(llm.close())
    with pytest.raises(EngineUnavailable):
        llm.generate([1], SamplingParams())


def test_closing_aborts_and_dying_does_not() -> None:
    llm = FakeLLM()

    async def step_once(request_id: str) -> None:
        stream = llm.generate([1], SamplingParams(), request_id=request_id)
        async with aclosing(stream):
            await anext(stream)

    async def die() -> None:
        stream = llm.generate([1], SamplingParams(), request_id="dead")
        await anext(stream)
        llm.die()
        with pytest.raises(EngineDied):
            await anext(stream)

    asyncio.run(step_once("left"))
    asyncio.run(die())
    assert llm.aborted == ["left"]
    assert llm.stats().num_running == 0


def test_a_dead_engines_cache_is_empty() -> None:
    llm = FakeLLM()
    run(llm)
    llm.die()
    llm.recover()
    assert run(llm)[0].num_cached_tokens == 0
    assert llm.stats().num_engine_restarts == 1


def test_an_answer_can_break_off() -> None:
    llm = FakeLLM()
    llm.enqueue("abc", then=RuntimeError("broken"))
    texts = []

    async def read() -> None:
        async for delta in llm.generate([1], SamplingParams()):
            texts.append(delta.text)  # noqa: PERF401  the loop ends in an exception

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read())
    assert "".join(texts) == "abc"
