"""Adapters from Python: by name, loaded and replaced while the model is there."""

from __future__ import annotations

import asyncio

import pytest

from anaphora import LLM, AsyncLLM, SamplingParams
from anaphora.errors import InvalidRequest, UnknownModel, UnusableAdapter
from tests.loaders.tiny import CONFIG, random_weights, write_directory
from tests.models.adapters import write_adapter

PROMPT = list(range(3, 60))
PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_directory(path, CONFIG, random_weights(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    config = {"head_dim": CONFIG["hidden_size"] // CONFIG["num_attention_heads"]} | CONFIG
    return [str(write_adapter(root / str(i), config, rank=4, seed=i)) for i in range(3)]


def options(folders):
    return {
        "lora_modules": (f"one={folders[0]}",),
        "max_loras": 2,
        "kv_cache_memory": 2**24,
        "threads": 1,
    }


def logprobs(completion):
    return [entry.logprob for entry in completion.logprobs]


def test_llm(model, folders):
    with LLM(model, **options(folders)) as llm:
        [base] = llm.generate([PROMPT], PARAMS)
        [one] = llm.generate([PROMPT], PARAMS, adapter="one")
        assert logprobs(one) != logprobs(base)
        assert one.num_cached_tokens == 0
        info = llm.load_adapter("two", folders[1])
        assert (info.path, info.rank) == (folders[1], 4)
        assert list(llm.adapters) == ["one", "two"]
        [two] = llm.generate([PROMPT], PARAMS, adapter="two")
        assert len({tuple(logprobs(c)) for c in (base, one, two)}) == 3
        with pytest.raises(InvalidRequest, match="--max-loras is 2"):
            llm.load_adapter("three", folders[2])
        with pytest.raises(InvalidRequest, match="load_inplace"):
            llm.load_adapter("two", folders[2])
        with pytest.raises(UnusableAdapter, match=r"adapter_config\.json"):
            llm.load_adapter("two", model, load_inplace=True)
        llm.load_adapter("two", folders[0], load_inplace=True)
        [again] = llm.generate([PROMPT], PARAMS, adapter="two")
        assert logprobs(again) == logprobs(one)
        assert again.num_cached_tokens > 0  # the same weights under another name
        llm.unload_adapter("one")
        [still] = llm.generate([PROMPT], PARAMS, adapter="two")
        assert still.num_cached_tokens > 0  # they still have a name
        llm.unload_adapter("two")
        for name in ("one", "two"):
            with pytest.raises(UnknownModel, match="loaded are: none"):
                llm.generate([PROMPT], PARAMS, adapter=name)
            with pytest.raises(UnknownModel, match="no adapter of this name"):
                llm.unload_adapter(name)
        [last] = llm.generate([PROMPT], PARAMS)
        assert logprobs(last) == logprobs(base)


def test_async_llm(model, folders):
    async def ask(llm, adapter):
        deltas = llm.generate(PROMPT, PARAMS, adapter=adapter)
        return [entry.logprob async for delta in deltas for entry in delta.logprobs]

    async def scenario():
        llm = AsyncLLM(model, **options(folders))
        await llm.start()
        try:
            base, one = await asyncio.gather(ask(llm, None), ask(llm, "one"))
            await llm.load_adapter("two", folders[1])
            two, both = await asyncio.gather(ask(llm, "two"), ask(llm, "one"))
            assert one == both
            assert len({tuple(x) for x in (base, one, two)}) == 3
            # One that was asked for in time, but not begun, is refused.
            late = llm.generate(PROMPT, PARAMS, adapter="two")
            begun = llm.generate(PROMPT, PARAMS, adapter="two")
            first = await anext(begun)
            await llm.unload_adapter("two")
            with pytest.raises(UnknownModel, match="not any more"):
                await anext(late)
            rest = [first, *[delta async for delta in begun]]
            assert [entry.logprob for delta in rest for entry in delta.logprobs] == two
            with pytest.raises(UnknownModel):
                llm.generate(PROMPT, PARAMS, adapter="two")
            with pytest.raises(UnusableAdapter):
                await llm.load_adapter("two", "/nowhere")
            results = await asyncio.gather(
                *(llm.load_adapter(f"x{i}", folders[i]) for i in range(3)), return_exceptions=True
            )
            assert sum(isinstance(result, InvalidRequest) for result in results) == 2
            assert len(llm.adapters) == 2
        finally:
            await llm.close()

    asyncio.run(scenario())
