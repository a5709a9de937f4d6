"""Prints the eviction suite of docs/simulator.md: every workload, every capacity, three policies.

    python benchmarks/eviction.py TRACES

TRACES holds the folders mooncake, kv-cache-tester, lmcache-agent-trace and tau-bench, each as it
was published. It takes half an hour, nearly all of it for the 13 million blocks of W3.
"""

from __future__ import annotations

import sys

from anaphora.bench.simulate import Point, SimulateOptions, Simulation, run
from anaphora.bench.traces import ReadOptions

AGENTS = "lmcache-agent-trace/agent-traces.tar.xz"
CODING = "kv-cache-tester/traces-710.tar.xz"
# Name, source, sessions, capacities. A source without a slash is generated.
SUITE: list[tuple[str, str, str, tuple[str, ...]]] = [
    (
        "W1 chat",
        "mooncake/conversation_trace.jsonl",
        "*",
        ("3000", "6000", "10000", "30000"),
    ),
    (
        "W2 long documents",
        "mooncake/synthetic_trace.jsonl",
        "*",
        ("3000", "6000", "10000", "20000"),
    ),
    ("W6 tool agent", "tau-bench/gpt-4o-airline.json", "*", ("121", "303")),
    ("W7 loop, miniswe", AGENTS, "miniswe/*", ("10%", "20%")),
    ("W7 loop, magagent", AGENTS, "magagent/*", ("10%", "20%")),
    ("W9 gsp", "gsp", "*", ("10%", "25%")),
    ("W9 prefix-repetition", "prefix-repetition", "*", ("10%", "25%")),
    ("W9 llm-d", "llm-d", "*", ("10%", "25%")),
    ("W3 coding agents", CODING, "*0.json", ("4200", "8500", "21000", "42000")),
]


def row(name: str, point: Point) -> str:
    """One line of the table."""
    gap = "-" if point.gap_closed is None else f"{point.gap_closed:.0%}"
    rates = " | ".join(f"{rate:.4f}" for rate in (point.policy, point.lru, point.optimum))
    return f"| {name} | {point.capacity:,} | {rates} | {gap} |"


def simulate(folder: str, source: str, sessions: str, capacities: tuple[str, ...]) -> Simulation:
    """One workload."""
    return run(
        SimulateOptions(
            trace=f"{folder}/{source}" if "/" in source else source,
            capacities=capacities,
            reading=ReadOptions(sessions=sessions),
        )
    )


if __name__ == "__main__":
    print("| workload | blocks | reuse | LRU | optimum | gap closed |")
    print("|---|---|---|---|---|---|")
    for name, *workload in SUITE:
        for point in simulate(sys.argv[1], *workload).points:
            print(row(name, point), flush=True)
