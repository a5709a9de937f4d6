"""GPT-OSS at its real width without its weights: layers of the 20B's shapes, random, in GGUF.

    python benchmarks/gpt_oss.py make FILE [--layers 2]    write one (0.7 GB for two layers)
    python benchmarks/gpt_oss.py measure FILE              load it and time steps, in this process

``anaphora bench FILE`` and ``make compare COMPARE="--model FILE"`` measure it as a server.
The vocabulary is bytes and pairs of letters, 512 tokens, so that the head does not hide the layers.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from pathlib import Path

import gguf
import numpy as np

HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, DIM = 2880, 2880, 32, 64, 8, 64
VOCAB = 512


def make(path: Path, num_layers: int) -> None:
    """Random weights: four-bit experts, the rest in Q8_0, as converters write them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150000.0)
    writer.add_sliding_window(128)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(4)
    writer.add_string("gpt-oss.rope.scaling.type", "yarn")
    writer.add_float32("gpt-oss.rope.scaling.factor", 32.0)
    writer.add_uint32("gpt-oss.rope.scaling.original_context_length", 4096)
    add_tokenizer(writer)

    def floats(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32) * np.float32(0.1))

    def matrix(name: str, *shape: int) -> None:
        weight = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    def experts(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (EXPERTS, rows, columns // 32, 17), np.uint8)
        blocks[..., 0] = rng.integers(119, 122, blocks.shape[:-1])
        writer.add_tensor(
            name,
            blocks.reshape(EXPERTS, rows, -1),
            raw_dtype=gguf.GGMLQuantizationType.MXFP4,
        )

    matrix("token_embd.weight", VOCAB, HIDDEN)
    matrix("output.weight", VOCAB, HIDDEN)
    floats("output_norm.weight", HIDDEN)
    for i in range(num_layers):
        layer = f"blk.{i}."
        floats(f"{layer}attn_norm.weight", HIDDEN)
        floats(f"{layer}post_attention_norm.weight", HIDDEN)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        for part, size in sizes.items():
            matrix(f"{layer}attn_{part}.weight", size, HIDDEN)
            floats(f"{layer}attn_{part}.bias", size)
        matrix(f"{layer}attn_output.weight", HIDDEN, HEADS * DIM)
        floats(f"{layer}attn_output.bias", HIDDEN)
        floats(f"{layer}attn_sinks.weight", HEADS)
        floats(f"{layer}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        floats(f"{layer}ffn_gate_inp.bias", EXPERTS)
        for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN)):
            experts(f"{layer}ffn_{part}_exps.weight", rows, columns)
            floats(f"{layer}ffn_{part}_exps.bias", EXPERTS, rows)
        experts(f"{layer}ffn_down_exps.weight", HIDDEN, INNER)
        floats(f"{layer}ffn_down_exps.bias", EXPERTS, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes in GPT-2's spelling, and pairs of letters up to the size of the vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    tokens = [chars[byte] for byte in range(256)] + ["th"]
    pairs = (a + b for a in "abcdefghijklmnop" for b in "abcdefghijklmnopq")
    tokens += [*itertools.islice(pairs, VOCAB - 259), "<|bos|>", "<|eos|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCAB - 2) + [3] * 2)
    writer.add_token_merges([f"{chars[0x74]} {chars[0x68]}"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)


def measure(path: Path) -> None:
    """Prints the load, its memory, and steps of several sizes."""
    from anaphora.config import EngineConfig
    from anaphora.engine.engine import Engine
    from anaphora.types import CacheScope, EngineRequest, SamplingParams

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    before, start = peak(), time.perf_counter()
    engine = Engine(EngineConfig(model=str(path), kv_cache_memory=2**30))
    seconds = time.perf_counter() - start
    info = engine.info
    print(
        f"{info.num_parameters / 1e9:.2f} G parameters, {info.weight_bytes / 2**30:.2f} GiB, "
        f"{info.weight_bytes / info.num_parameters:.3f} bytes a parameter; loaded in {seconds:.1f} "
        f"s, peak {peak() - before:.2f} GiB"
    )
    rng = np.random.default_rng(1)

    def run(num_prompts: int, length: int, num_new: int) -> float:
        for _ in range(num_prompts):
            engine.add(
                EngineRequest(
                    request_id=str(rng.integers(2**60)),
                    prompt_token_ids=rng.integers(0, 256, length).tolist(),
                    params=SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True),
                    scope=CacheScope(),
                )
            )
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start

    run(1, 128, 1)
    prefill = statistics.median(512 / run(1, 512, 1) for _ in range(5))
    print(f"prefill of 512 tokens: {prefill:.0f} tok/s")
    for streams in (1, 8):
        rates = []
        for _ in range(5):
            short, long = run(streams, 16, 1), run(streams, 16, 33)
            rates.append(32 * streams / (long - short))
        print(f"decode, {streams} streams: {statistics.median(rates):.1f} tok/s")
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("make", "measure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if options.command == "make":
        make(options.file, options.layers)
    else:
        measure(options.file)
