"""Three classes of work on one server: does provisioned throughput get what it bought?

Starts `anaphora serve` with three endpoints: `chat` (interactive, three tenants), `gold`
(provisioned, a part of the machine) and `night` (batch, a file of requests that share an
instruction). Phases:

1. gold alone, Poisson arrivals within its units: its TTFT alone.
2. the same arrivals beside all that the others can ask for.
3. gold asks for more than it bought, beside the same others: what does it get in any ten seconds?
4. nobody but batch: it takes what is left.

Usage: python benchmarks/classes.py [--seconds 60] [--units-share 0.3] [--burst] [--plot FILE]
Run `anaphora bench --capacity` first, on the machine as it is now. What the classes are served
comes from the engine's own counters, a sample a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from anaphora.capacity import UNIT_TOKENS_PER_SECOND, CapacityFile
from anaphora.loaders.sources import capacity_path
from anaphora.machine import usable_cores

MODEL = "smollm2"
NUM_PROMPT, NUM_OUTPUT = 256, 32
NUM_CHAT_CLIENTS = 24
CLASSES = ("provisioned", "interactive", "batch")
COLOURS = {"provisioned": "#c58a00", "interactive": "#1f6feb", "batch": "#8b949e"}
LABELS = ("1 gold alone", "2 all, gold within its units", "3 all, gold wants more", "4 batch alone")


@dataclasses.dataclass
class Phase:
    """What was seen of one phase. Times in seconds."""

    label: str
    start: float
    ttfts: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0


class Load:
    """Clients of one server."""

    def __init__(self, url: str, keys: dict[str, str], rate: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.keys = keys
        self.rate = rate  # gold's requests a second
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self.samples: list[tuple[float, dict[str, float], float]] = []
        self.errors: list[str] = []

    def prompt(self) -> list[int]:
        return [self.rng.randrange(100, 40_000) for _ in range(NUM_PROMPT)]

    async def ask(self, model: str, tenant: str, phase: Phase | None = None) -> None:
        body = {"model": model, "prompt": self.prompt(), "max_tokens": NUM_OUTPUT, "stream": True}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        start, first = time.perf_counter(), None
        body |= {"ignore_eos": True, "temperature": 0}
        request = self.http.stream("POST", "/v1/completions", json=body, headers=headers)
        async with request as response:
            async for line in response.aiter_lines():
                if first is None and line.startswith("data:"):
                    first = time.perf_counter() - start
        if response.status_code != 200:
            self.errors.append(f"{model}: {response.status_code}")
        elif phase is not None and first is not None:
            phase.ttfts.append(first)

    async def chat_client(self, number: int) -> None:
        while True:
            await self.ask("chat", f"chat{number % 3}")

    async def gold_arrivals(self, phase: Phase, seconds: float) -> None:
        rng = random.Random(5)  # the same arrivals in every phase
        due = start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while (due := due + rng.expovariate(self.rate)) < start + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self.ask("gold", "owner", phase))

    async def gold_client(self) -> None:
        while True:
            await self.ask("gold", "owner")

    async def start_batch(self, num_lines: int) -> str:
        instruction = " ".join(f"rule {i}: be brief about {i * 7}." for i in range(40))
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "night",
                    "max_tokens": 8,
                    "temperature": 0,
                    "messages": [
                        {"role": "system", "content": instruction},
                        {"role": "user", "content": f"Row {i}: {self.rng.random()} and so on."},
                    ],
                },
            }
            for i in range(num_lines)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        headers = {"authorization": f"Bearer {self.keys['night']}"}
        upload = await self.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": content}, headers=headers
        )
        body = {
            "input_file_id": upload.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        created = await self.http.post("/v1/batches", json=body, headers=headers)
        return str(created.raise_for_status().json()["id"])

    async def cancel_batch(self, batch_id: str) -> None:
        headers = {"authorization": f"Bearer {self.keys['night']}"}
        await self.http.post(f"/v1/batches/{batch_id}/cancel", headers=headers)

    async def sample(self) -> None:
        headers = {"authorization": f"Bearer {self.keys['owner']}"}
        while True:
            text = (await self.http.get("/metrics", headers=headers)).text
            served, bought = {}, 0.0
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "anaphora_served_tokens_total":
                        served[sample.labels["class"]] = sample.value
                    elif sample.name == "anaphora_bought_tokens_total":
                        bought = sample.value
            self.samples.append((time.perf_counter(), served, bought))
            await asyncio.sleep(1.0)


async def run(load: Load, seconds: float) -> list[Phase]:
    phases: list[Phase] = []

    def begin(label: str) -> Phase:
        if phases:
            phases[-1].end = phases[-1].end or time.perf_counter()
        phases.append(Phase(label, time.perf_counter()))
        return phases[-1]

    sampling = asyncio.create_task(load.sample())
    await load.ask("gold", "owner")  # the first request warms nothing but the code
    await load.gold_arrivals(begin(LABELS[0]), seconds)
    phases[0].end = time.perf_counter()
    batch_id = await load.start_batch(20_000)
    clients = [asyncio.create_task(load.chat_client(i)) for i in range(NUM_CHAT_CLIENTS)]
    await asyncio.sleep(5)
    await load.gold_arrivals(begin(LABELS[1]), seconds)
    begin(LABELS[2])
    greedy = [asyncio.create_task(load.gold_client()) for _ in range(16)]
    await asyncio.sleep(seconds)
    for task in (*greedy, *clients):
        task.cancel()
    await asyncio.gather(*greedy, *clients, return_exceptions=True)
    begin(LABELS[3])
    await asyncio.sleep(seconds / 3)
    phases[-1].end = time.perf_counter()
    await load.cancel_batch(batch_id)
    sampling.cancel()
    await load.http.aclose()
    return phases


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rates(load: Load, phase: Phase) -> dict[str, float]:
    inside = [s for s in load.samples if phase.start <= s[0] <= phase.end]
    (t0, first, _), (t1, last, _) = inside[0], inside[-1]
    return {name: (last.get(name, 0) - first.get(name, 0)) / (t1 - t0) for name in CLASSES}


def windows(load: Load, phase: Phase, seconds: float = 10.0) -> list[float]:
    """Bought tokens a second in every window of the phase, once what was saved up is used."""
    inside = [s for s in load.samples if phase.start + seconds <= s[0] <= phase.end]
    found = []
    for i, (t0, _, first) in enumerate(inside):
        later = [(t, bought) for t, _, bought in inside[i:] if t - t0 >= seconds]
        if later:
            t1, last = later[0]
            found.append((last - first) / (t1 - t0))
    return found


def report(load: Load, phases: list[Phase], bought: float) -> None:
    table = Table(title="Weighted tokens a second by class, and gold's TTFT", title_justify="left")
    for name in ("phase", *CLASSES, "gold TTFT P50", "P99"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in phases:
        found = rates(load, phase)
        cells = [f"{found[name]:,.0f}" for name in CLASSES]
        if phase.ttfts:
            cells += [f"{percentile(phase.ttfts, share) * 1e3:,.0f} ms" for share in (0.5, 0.99)]
        else:
            cells += ["", ""]
        table.add_row(phase.label, *cells)
    console = Console(width=110)
    console.print(table)
    ratio = percentile(phases[1].ttfts, 0.99) / percentile(phases[0].ttfts, 0.99)
    got = windows(load, phases[2])
    low, high = min(got) / bought, max(got) / bought
    console.print(
        f"gold bought {bought:,.0f} tokens a second; P99 of its TTFT beside the others is "
        f"{ratio:.2f} x that alone ({len(phases[0].ttfts)} and {len(phases[1].ttfts)} requests).\n"
        f"Asking for more, it got {low:.1%} to {high:.1%} of what it bought in {len(got)} windows "
        f"of ten seconds, {statistics.mean(got) / bought:.1%} on average. Errors: {load.errors}"
    )
    print(json.dumps({"p99_ratio": ratio, "lowest": low, "highest": high, "bought": bought}))


def plot(load: Load, phases: list[Phase], bought: float, path: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "anaphora"
    from matplotlib import pyplot

    start = phases[0].start
    times = [
        (a[0] + b[0]) / 2 - start for a, b in zip(load.samples, load.samples[1:], strict=False)
    ]
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    lines = [
        [
            (b[1].get(name, 0) - a[1].get(name, 0)) / (b[0] - a[0])
            for a, b in zip(load.samples, load.samples[1:], strict=False)
        ]
        for name in CLASSES
    ]
    axes.stackplot(times, lines, labels=CLASSES, colors=[COLOURS[c] for c in CLASSES], alpha=0.85)
    axes.axhline(bought, color="#5a3e00", linewidth=1, linestyle="--")
    axes.annotate("bought", (25, bought), textcoords="offset points", xytext=(2, 3), fontsize=8)
    top = axes.get_ylim()[1]
    for phase in phases:
        axes.axvline(phase.start - start, color="black", linewidth=0.6)
        axes.annotate(phase.label, (phase.start - start, top), textcoords="offset points",
                      xytext=(3, 4), fontsize=7.5)  # fmt: skip
    axes.set_xlim(0, phases[-1].end - start)
    axes.set_xlabel("seconds")
    axes.set_ylabel("weighted tokens a second")
    axes.legend(loc="center left", fontsize=8, framealpha=0.9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


@contextlib.contextmanager
def serving(folder: Path, units: int, *, burst: bool):
    config = folder / "anaphora.yaml"
    config.write_text(
        "endpoints:\n  - name: chat\n  - name: gold\n    class: provisioned\n"
        f"    model_units: {units}\n    burst: {str(burst).lower()}\n"
        "  - name: night\n    class: batch\n"
    )
    names = ("chat0", "chat1", "chat2", "owner", "night")
    keys = {name: f"key-of-{name}" for name in names}
    command = [sys.executable, "-m", "anaphora", "serve", MODEL, "--config", str(config)]
    command += ["--port", "0", "--database", str(folder / "a.db"), "--kv-cache-memory", "1GiB"]
    given = {"ANAPHORA_API_KEY": ",".join(f"{k}={v}" for k, v in keys.items()), "COLUMNS": "200"}
    with (folder / "log").open("w+b") as log:
        server = subprocess.Popen(command, env=os.environ | given, stdout=log, stderr=log)
        try:
            while not (found := re.search(rb"(http://\S+)/v1", (folder / "log").read_bytes())):
                if server.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.1)
            yield found[1].decode(), keys
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase")
    parser.add_argument("--units-share", type=float, default=0.3, help="of the machine for gold")
    parser.add_argument("--burst", action="store_true", help="gold may use more than it bought")
    parser.add_argument("--plot", help="SVG file for tokens a second by class over time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    capacity = CapacityFile(capacity_path()).get(MODEL, "int8", usable_cores())
    if capacity is None:
        raise SystemExit("run 'anaphora bench --capacity' first")
    units = int(capacity.model_units * options.units_share)
    bought = units * UNIT_TOKENS_PER_SECOND
    cost = NUM_PROMPT + (NUM_OUTPUT - 1) * capacity.output_weight
    print(f"{capacity.model_units} units; gold buys {units}; a request costs {cost:.0f} tokens")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), units, burst=options.burst) as (url, keys),
    ):
        load = Load(url, keys, 0.6 * bought / cost, options.seed)
        phases = asyncio.run(run(load, options.seconds))
    report(load, phases, bought)
    if options.plot:
        plot(load, phases, bought, options.plot)


if __name__ == "__main__":
    main()
