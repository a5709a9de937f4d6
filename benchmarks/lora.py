"""What adapters cost a step: four of them, rank 16 on all seven modules, beside the model alone.

    python benchmarks/lora.py [--dtype int8] [--rounds 9] [--rank 16]

Steps with and without adapters take turns in one process, so that both see the same minutes of the
machine; the ratio is the median over the rounds of their ratios. Bound: 1.35.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.loaders.sources import resolve
from anaphora.models.lora import AdapterPlace, check_adaptable
from anaphora.types import CacheScope, EngineRequest, LoadAdapter, SamplingParams

NUM_ADAPTERS = 4
DECODE_STEPS = 12
PREFILL_STEPS = 4
PREFILL_TOKENS = 128


def write_adapter(folder: Path, places: list[AdapterPlace], rank: int, seed: int) -> Path:
    """A random PEFT directory for every module of the model."""
    folder.mkdir()
    rng, tensors, names = np.random.default_rng(seed), {}, set()
    for place in places:
        for name, size in place.parts:
            names.add(name.rpartition(".")[2])
            for matrix, shape in (("A", (rank, place.in_features)), ("B", (size, rank))):
                values = rng.standard_normal(shape).astype(np.float32) * 0.02
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Bench:
    """An engine with its adapters loaded."""

    def __init__(self, dtype: str, rank: int) -> None:
        config = EngineConfig(
            model=str(resolve("smollm2").path),
            dtype=dtype,  # type: ignore[arg-type]
            kv_cache_memory=2**28,
            enable_prefix_caching=False,
            max_loras=NUM_ADAPTERS,
            max_lora_rank=rank,
        )
        self.engine = Engine(config)
        self.num_requests = 0
        model = check_adaptable(self.engine.runner.model, "")
        self.scopes = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(NUM_ADAPTERS):
                path = write_adapter(Path(folder) / str(seed), model.adapter_places, rank, seed)
                info = self.engine.command(LoadAdapter(path=str(path))).adapter
                assert info is not None
                self.scopes.append(CacheScope(adapter=info.digest))

    def add(self, num_tokens: int, max_tokens: int, index: int, *, is_adapted: bool) -> str:
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=random.Random(request_id).choices(
                    range(100, 40_000), k=num_tokens
                ),
                params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                scope=self.scopes[index % NUM_ADAPTERS] if is_adapted else CacheScope(),
            )
        )
        return request_id

    def step_seconds(self) -> float:
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def decode(self, num_rows: int, is_adapted: bool) -> float:
        """Median seconds of a step that decodes so many sequences."""
        ids = [self.add(16, DECODE_STEPS + 40, i, is_adapted=is_adapted) for i in range(num_rows)]
        while self.engine.scheduler.waiting or any(
            seq.num_generated_tokens < 2 for seq in self.engine.scheduler.running
        ):
            self.engine.step()
        seconds = [self.step_seconds() for _ in range(DECODE_STEPS)]
        for request_id in ids:
            self.engine.abort(request_id)
        return statistics.median(seconds)

    def prefill(self, is_adapted: bool) -> float:
        """Median seconds of a step that computes four prompts of 32 tokens."""
        seconds = []
        for _ in range(PREFILL_STEPS):
            for index in range(NUM_ADAPTERS):
                self.add(PREFILL_TOKENS // NUM_ADAPTERS, 1, index, is_adapted=is_adapted)
            seconds.append(self.step_seconds())
            assert not self.engine.has_work
        return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="int8", choices=("int8", "float32"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    bench = Bench(options.dtype, options.rank)
    cases: dict[str, Callable[[bool], float]] = {
        "decode, 8 rows": lambda adapted: bench.decode(8, adapted),
        "decode, 32 rows": lambda adapted: bench.decode(32, adapted),
        f"prefill, {PREFILL_TOKENS} tokens": bench.prefill,
    }
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, measure in cases.items():
            pairs[name].append((measure(False), measure(True)))
    table = Table("step", "model alone", "four adapters", "ratio")
    for name, found in pairs.items():
        alone, adapted = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
        ratios = [with_adapters / without for without, with_adapters in found]
        low, high = min(ratios), max(ratios)
        ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        table.add_row(name, f"{alone:.1f} ms", f"{adapted:.1f} ms", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
