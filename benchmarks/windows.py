"""What blocks of their own for windowed layers do to hits: the same memory, spent in two ways.

    python benchmarks/windows.py TRACES

Each trace goes through one cache twice: with blocks of all layers, and with blocks of full layers
beside window parts that are freed when they have passed. TRACES as for eviction.py.
"""

from __future__ import annotations

import sys

from anaphora.bench.simulate import hit_rate, make_keys, replay
from anaphora.bench.traces import ReadOptions, read_trace
from anaphora.cache.eviction import POLICIES
from anaphora.cache.windows import Window
from anaphora.config import EngineConfig

AGENTS = "lmcache-agent-trace/agent-traces.tar.xz"
TRACES = [
    ("chat (mooncake)", "mooncake/conversation_trace.jsonl", "*"),
    ("long documents (mooncake)", "mooncake/synthetic_trace.jsonl", "*"),
    ("tool agents (tau-bench)", "tau-bench/gpt-4o-airline.json", "*"),
    ("miniswe", AGENTS, "miniswe/*"),
    ("magagent", AGENTS, "magagent/*"),
]
MODELS = [(1024, 5), (128, 1)]  # window and pages of a part: Gemma 3, GPT-OSS
PARTS = (0.05, 0.1, 0.2, 0.4)  # of what never evicting would take, in blocks of all layers


def compare(folder: str, name: str, source: str, sessions: str) -> None:
    """Prints the rows of one trace."""
    trace = read_trace(f"{folder}/{source}", ReadOptions(sessions=sessions))
    keys = make_keys(trace)
    policy = POLICIES[EngineConfig().eviction_policy]
    for part in PARTS:
        blocks = max(8, int(part * trace.num_unique))
        whole = replay(trace, keys, policy, blocks)
        cells = [f"{hit_rate(trace, whole.hits, 0):.4f}"]
        for num_tokens, num_pages in MODELS:
            window = Window(
                num_tokens=max(1, num_tokens // trace.block_size),
                num_pages=num_pages,
                block_size=1,
                max_chunk=max(1, 128 // trace.block_size),
            )
            apart = replay(trace, keys, policy, blocks * (1 + num_pages), window=window)
            cells.append(f"{hit_rate(trace, apart.hits, 0):.4f}")
        print(f"| {name} | {blocks:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("| trace | blocks of all layers | all layers | Gemma 3 apart | GPT-OSS apart |")
    print("|---|---|---|---|---|")
    for row in TRACES:
        compare(sys.argv[1], *row)
