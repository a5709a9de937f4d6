"""The engine as a process: streaming, aborts, death and recovery, with the real model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import zmq

from anaphora import async_llm
from anaphora.async_llm import AsyncLLM
from anaphora.config import EngineConfig
from anaphora.errors import (
    ConfigError,
    ContextTooLong,
    CorruptCheckpoint,
    EngineDied,
    EngineUnavailable,
    InvalidRequest,
)
from anaphora.types import CacheScope, SamplingParams
from tests.models.tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(runner, smollm2_path):
    llm = AsyncLLM(EngineConfig(model=str(smollm2_path), kv_cache_memory=2**29))
    runner.run(llm.start())
    yield llm
    runner.run(llm.close())


async def collect(generator):
    return [delta async for delta in generator]


async def until(condition, seconds=30.0):
    """Waits for a condition; fails after a generous time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.01)


def chat(llm, text):
    return llm.chat_template.encode([{"role": "user", "content": text}])


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def test_streams_an_answer(runner, llm):
    prompt = chat(llm, "What is the capital of France?")
    deltas = runner.run(collect(llm.generate(prompt, GREEDY)))
    assert "Paris" in text_of(deltas)
    assert deltas[-1].finish_reason == "stop"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_a_second_request_hits(runner, llm):
    prompt = chat(llm, "Tell me about the sea. " * 20)
    first = runner.run(collect(llm.generate(prompt, GREEDY)))
    second = runner.run(collect(llm.generate(prompt, GREEDY)))
    assert first[-1].num_cached_tokens < 48  # no more than the template's own beginning
    assert second[-1].num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert text_of(first) == text_of(second)
    other = runner.run(collect(llm.generate(prompt, GREEDY, scope=CacheScope(tenant="other"))))
    assert other[-1].num_cached_tokens == 0


def test_a_stop_string_ends_the_choice_in_the_engine_too(runner, llm):
    prompt = chat(llm, "Count from one to one hundred.")
    params = SamplingParams(temperature=0, max_tokens=500, stop=("algebra",), ignore_eos=True)

    async def scenario():
        deltas = await collect(llm.generate(prompt, params))
        await until(lambda: llm.stats().num_running == 0)
        return deltas

    deltas = runner.run(scenario())
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == "algebra"
    assert "algebra" not in text_of(deltas)


def test_stop_strings_wait_for_min_tokens(runner, llm):
    prompt = chat(llm, "Count from one to one hundred.")
    early = SamplingParams(temperature=0, max_tokens=60, stop=("e",), ignore_eos=True)
    late = SamplingParams(temperature=0, max_tokens=60, stop=("e",), ignore_eos=True, min_tokens=20)
    short = runner.run(collect(llm.generate(prompt, early)))
    long = runner.run(collect(llm.generate(prompt, late)))
    assert len(short) < 20 <= len(long)


def test_n_choices_are_interleaved_and_complete(runner, llm):
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    deltas = runner.run(collect(llm.generate(chat(llm, "Invent a word."), params)))
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        assert len(mine) == 12
        assert mine[-1].finish_reason == "length"


def test_closing_the_stream_frees_its_blocks_within_a_second(runner, llm):
    async def scenario():
        stream = llm.generate(chat(llm, "Hello"), LONG)
        await anext(stream)
        await until(lambda: llm.stats().num_used_blocks > 0)
        await stream.aclose()
        await until(lambda: llm.stats().num_used_blocks == 0, seconds=1.0)

    runner.run(scenario())


def test_cancelling_the_reader_frees_its_blocks_within_a_second(runner, llm):
    async def scenario():
        task = asyncio.create_task(collect(llm.generate(chat(llm, "Hello"), LONG)))
        await until(lambda: llm.stats().num_used_blocks > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: llm.stats().num_used_blocks == 0, seconds=1.0)

    runner.run(scenario())


def test_refuses_at_the_call(runner, llm):
    async def scenario():
        with pytest.raises(ContextTooLong):
            llm.generate([5] * 9000, GREEDY)

    runner.run(scenario())


def test_two_hundred_requests_at_once(runner, llm):
    async def scenario():
        params = SamplingParams(temperature=0, max_tokens=4)
        streams = [llm.generate(chat(llm, f"Number {i}"), params) for i in range(200)]
        return await asyncio.gather(*map(collect, streams))

    results = runner.run(scenario())
    assert all(deltas[-1].finish_reason is not None for deltas in results)
    assert llm.stats().num_used_blocks == 0


def test_engine_death_is_told_and_mended(runner, llm):
    """kill -9 in the middle of four streams: each gets an error, and a fresh engine answers."""

    async def scenario():
        prompt = chat(llm, "Tell me a long story.")
        tasks = [asyncio.create_task(collect(llm.generate(prompt, LONG))) for _ in range(4)]
        await until(lambda: llm.stats().num_running == 4)
        before = llm.stats()
        os.kill(llm.engine_pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDied) for result in results)
        assert not llm.is_ready
        with pytest.raises(EngineUnavailable) as refusal:
            llm.generate(prompt, GREEDY)
        assert refusal.value.retry_after > 0
        await until(lambda: llm.is_ready)
        deltas = await collect(llm.generate(prompt, GREEDY))
        assert deltas[-1].num_cached_tokens == 0  # nothing outlives the process
        return before, llm.stats()

    before, after = runner.run(scenario())
    assert after.num_engine_restarts == before.num_engine_restarts + 1
    assert after.prefix_cache_queries > before.prefix_cache_queries
    assert after.num_steps > before.num_steps


def test_an_engine_that_is_dead_but_not_yet_missed_is_told_too(runner, llm):
    """The process has gone, the event loop was busy and has not heard of it."""

    async def scenario():
        prompt = chat(llm, "Hello")
        running = llm.generate(prompt, LONG)
        await anext(running)
        restarts = llm.stats().num_engine_restarts
        os.kill(llm.engine_pid, signal.SIGKILL)
        time.sleep(0.1)  # blocks the loop on purpose
        tasks = [asyncio.create_task(collect(llm.generate(prompt, GREEDY))) for _ in range(3)]
        closing = asyncio.create_task(running.aclose())
        results = await asyncio.wait_for(
            asyncio.gather(*tasks, closing, return_exceptions=True), 20
        )
        assert all(isinstance(result, EngineUnavailable | EngineDied) for result in results[:3])
        assert results[3] is None
        await until(lambda: llm.stats().num_engine_restarts > restarts and llm.is_ready)
        assert text_of(await collect(llm.generate(prompt, GREEDY)))

    runner.run(scenario())


def test_closing_does_not_wait_for_an_engine_that_has_just_died(runner, smollm2_path):
    async def scenario():
        llm = AsyncLLM(EngineConfig(model=str(smollm2_path), kv_cache_memory=2**26))
        await llm.start()
        os.kill(llm.engine_pid, signal.SIGKILL)
        time.sleep(0.1)  # blocks the loop on purpose: nobody has noticed
        await asyncio.wait_for(llm.close(), 20)
        assert not llm.is_ready

    runner.run(scenario())


def test_nothing_is_left_behind(runner, smollm2_path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spawn, modes = asyncio.create_subprocess_exec, []

    def look_and_spawn(*args, **options):
        modes.extend(folder.stat().st_mode & 0o777 for folder in tmp_path.iterdir())
        return spawn(*args, **options)

    async def scenario():
        monkeypatch.setattr(asyncio, "create_subprocess_exec", look_and_spawn)
        llm = AsyncLLM(EngineConfig(model=str(smollm2_path), kv_cache_memory=2**26))
        await llm.start()
        pid = llm.engine_pid
        assert modes == [0o700]  # the socket's folder
        await llm.close()
        return pid

    pid = runner.run(scenario())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def fails(llm, awaited):
    """The error of a request that must not hang."""
    with pytest.raises(EngineDied):
        await asyncio.wait_for(awaited, 20)
    await until(lambda: llm.is_ready)


def test_an_unreadable_message_replaces_the_engine(runner, llm, monkeypatch):
    async def scenario():
        real, prompt = async_llm.decode_up, chat(llm, "Hello")
        stream = llm.generate(prompt, LONG)
        await anext(stream)
        calls = iter([b"nonsense"])
        monkeypatch.setattr(async_llm, "decode_up", lambda data: real(next(calls, data)))
        await fails(llm, collect(stream))
        assert await collect(llm.generate(prompt, GREEDY))

    runner.run(scenario())


def test_a_failed_restart_is_tried_again(runner, llm, monkeypatch, tmp_path):
    async def scenario():
        spawn, failures = llm._spawn, iter([zmq.ZMQError(24), OSError("no process")])

        async def fail_twice():
            if (failure := next(failures, None)) is not None:
                raise failure
            return await spawn()

        monkeypatch.setattr(llm, "_spawn", fail_twice)
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: not llm.is_ready)
        await until(lambda: llm.is_ready)

    runner.run(scenario())


def test_no_process_leaves_no_folder(runner, smollm2_path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))

    async def scenario():
        llm = AsyncLLM(EngineConfig(model=str(smollm2_path)))
        with pytest.raises(OSError, match="none"):
            await llm.start()
        await llm.close()

    runner.run(scenario())
    assert not list(tmp_path.iterdir())


def test_another_event_loop_is_refused(llm):
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(collect(llm.generate([5], GREEDY)))


@pytest.mark.parametrize("wrong", [5.0, True, "5", None])
def test_token_ids_of_a_wrong_type_are_refused(runner, llm, wrong):
    with pytest.raises(InvalidRequest, match="token ids are integers"):
        llm.generate([5, wrong], GREEDY)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"kv_cache_memory": 1000}, ConfigError, "raise --kv-cache-memory"),
        ({"max_model_len": 10**6}, ConfigError, "trained for 8192"),
        ({"max_model_len": 8000, "kv_cache_memory": 2**26}, ConfigError, "lower it or raise"),
        ({"gpu_memory_utilization": 0.001}, ConfigError, "raise --gpu-memory-utilization"),
    ],
)
def test_what_cannot_start_says_why(runner, smollm2_path, options, error, text):
    async def scenario():
        llm = AsyncLLM(EngineConfig(model=str(smollm2_path), **options))
        with pytest.raises(error, match=text):
            await llm.start()
        await llm.close()

    runner.run(scenario())


def test_a_damaged_model_is_named_by_the_engine(runner, tmp_path, smollm2_path):
    """The text side can be read, a tensor cannot."""
    path = write_tiny_llama(tmp_path / "tiny")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")

    async def scenario():
        llm = AsyncLLM(EngineConfig(model=str(smollm2_path)))
        llm._config = EngineConfig(model=str(path))
        with pytest.raises(CorruptCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight"):
            await llm.start()

    runner.run(scenario())


@pytest.mark.parametrize("seconds", [0.05, 0.5, None])
def test_the_engine_ends_when_its_parent_is_killed(smollm2_path, seconds):
    """Killed ``seconds`` after the engine was started, or once it is ready."""
    script = """
        import asyncio, sys
        from anaphora.async_llm import AsyncLLM
        from anaphora.config import EngineConfig

        spawn = asyncio.create_subprocess_exec

        async def spawn_and_tell(*args, **options):
            process = await spawn(*args, **options)
            print(process.pid, flush=True)
            return process

        async def main():
            asyncio.create_subprocess_exec = spawn_and_tell
            llm = AsyncLLM(EngineConfig(model=sys.argv[1], kv_cache_memory=2**26))
            await llm.start()
            print("ready", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(smollm2_path)], stdout=subprocess.PIPE
    )
    with parent:
        pid = int(parent.stdout.readline())
        if seconds is None:
            assert parent.stdout.readline() == b"ready\n"
        else:
            time.sleep(seconds)
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the orphaned engine is still there"
        time.sleep(0.05)
