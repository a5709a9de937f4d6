"""What an operator may write, and what the error says otherwise."""

from __future__ import annotations

import pytest

from anaphora.config import EngineConfig, format_size, parse_size
from anaphora.errors import ConfigError, ContextTooLong, InvalidRequest
from anaphora.types import EngineRequest, SamplingParams


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("96MiB", 96 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2", 2 * 2**30),
        ("0.5", 2**29),
        ("1.5 GB", 1_500_000_000),
        ("64kib", 64 * 2**10),
        ("1000B", 1000),
        (" 1 TiB ", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "1 XB", "-1", "1e9", "GiB", "1GiBx", "nan", "0x10"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="is not a size; write for example 96MiB"):
        parse_size(text)


def test_sizes_beyond_all_limits_are_still_numbers():
    assert parse_size("9" * 400) == parse_size("999999999TiB") == 2**64
    with pytest.raises(ConfigError, match="--kv-cache-memory: 'lots' is not a size"):
        parse_size("lots", "--kv-cache-memory")


def test_sizes_are_shown_in_binary_units():
    assert [format_size(n) for n in (5, 2048, 3 * 2**20, 5 * 2**29)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "int4"}, "--dtype is 'int4'; choose one of int8, float32"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is 'fp8'"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"max_model_len": -1}, "--max-model-len is -1"),
        ({"threads": 0}, "--threads is 0"),
        ({"chat_date": "1.2.2026"}, "--chat-date is '1.2.2026'; write a date as YYYY-MM-DD"),
        ({"chat_date": "20260102"}, "--chat-date is '20260102'"),
        ({"chat_date": 5}, "--chat-date is 5"),
        ({"block_size": 8}, "--block-size is 8; it must be 16, 32, 64, 128 or 256"),
        ({"block_size": 48}, "--block-size is 48"),
        ({"block_size": 512}, "--block-size is 512"),
        ({"kv_cache_memory": 0}, "--kv-cache-memory is 0"),
        ({"kv_cache_memory": 2**64}, "at most 9223372036854775807"),
        ({"max_model_len": 2**40}, "--max-model-len is 1099511627776"),
        ({"threads": 1025}, "--threads is 1025; it must be at least 1 and at most 1024"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization is 0.0"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization is nan"),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 64},
            "--max-num-batched-tokens is 64, less than --max-num-seqs",
        ),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert text in str(error.value)


def test_auto_keeps_kv_beside_the_weights():
    assert EngineConfig(dtype="int8").resolved_kv_cache_dtype == "int16"
    assert EngineConfig(dtype="float32").resolved_kv_cache_dtype == "float32"
    assert EngineConfig(dtype="int8", kv_cache_dtype="float32").resolved_kv_cache_dtype == "float32"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_wrong_sampling_is_named(options, param):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**options)
    assert error.value.param == param


def test_a_request_is_checked_against_the_model():
    def check(length, max_tokens):
        request = EngineRequest(
            request_id="r",
            prompt_token_ids=[1] * length,
            params=SamplingParams(max_tokens=max_tokens),
        )
        request.check(max_model_len=100, vocab_size=10)

    check(99, None)
    check(60, 40)
    with pytest.raises(ContextTooLong, match="the prompt has 100 tokens"):
        check(100, None)
    with pytest.raises(ContextTooLong, match="ask for at most 40 tokens"):
        check(60, 41)
