"""Anaphora beside other engines, the same prompts to all, in turn: ``make compare``.

All servers stay up for the whole run; a workload goes to one after the other while the rest are
stopped, and a repeat of everything comes before the next one. A system that does not start, or
fails in a workload, is reported as such.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import secrets
import signal
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import systems
from results import Rows, plot, replace_section, table, to_markdown, to_rows
from rich.console import Console
from rich.table import Table
from systems import HERE, OURS, PEERS, Peer, System

from anaphora.bench.report import make_lines
from anaphora.bench.rounds import Rounds, Samples
from anaphora.bench.run import showing_progress
from anaphora.bench.workloads import (
    Chat,
    ClosedLoop,
    Decode,
    Hot,
    Prefill,
    SharedPrefix,
    Workload,
)
from anaphora.errors import MeasurementError
from anaphora.loaders.sources import resolve

ROOT = HERE.parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "compare.svg"
WORKLOADS: tuple[Workload, ...] = (
    Prefill(512),
    Hot(2048),  # its miss is the long prefill
    Decode(1),
    Decode(8),
    Decode(32),
    SharedPrefix(),
    Chat(),
    ClosedLoop(share=0.3, num_requests=16, num_clients=8),
    ClosedLoop(share=0.8, num_requests=16, num_clients=8),
)
PROCESSOR = Path("/proc/cpuinfo")


@dataclasses.dataclass
class Comparison:
    """What came out of a run."""

    samples: Samples
    failures: list[str]
    seed: int
    repeats: int


async def compare(options: argparse.Namespace, workloads: list[Workload]) -> Comparison:
    """Starts all systems, measures, ends them."""
    model = resolve(options.model).path
    chosen = _keys(options)
    pythons = {key: systems.install(PEERS[key], options.venvs / key) for key in chosen}
    systems.convert(model, options.weights, pythons)
    options.logs.mkdir(parents=True, exist_ok=True)
    peers = [(peer, pythons[key]) for key in chosen for peer in _shown(key, options)]
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    failures: list[str] = []
    running: dict[str, System] = {}
    vocab_size = 0
    with showing_progress() as notice:
        async with contextlib.AsyncExitStack() as stack:
            for peer, python in [(OURS, Path(sys.executable)), *peers]:
                notice(f"starting {peer.name}")
                log = options.logs / f"{peer.name.replace(' ', '-')}.log"
                start = systems.running(
                    peer, python=python, model=model, weights=options.weights, log=log
                )
                try:
                    system = await stack.enter_async_context(start)
                except MeasurementError as error:
                    failures.append(f"{peer.name} did not start: {error}")
                    continue
                vocab_size = vocab_size or system.client.vocab_size or 0  # ours says it
                system.pause()
                running[peer.name] = system
            rounds = Rounds(
                seed=seed, vocab_size=vocab_size, repeats=options.repeats, notice=notice
            )
            samples = await _measure(rounds, running, workloads, failures)
    return Comparison(samples, failures, seed, options.repeats)


def _keys(options: argparse.Namespace) -> list[str]:
    return [options.variants] if options.variants else systems.names(options.system)


def _shown(key: str, options: argparse.Namespace) -> list[Peer]:
    return PEERS[key].alternatives() if options.variants else [PEERS[key]]


async def _measure(
    rounds: Rounds, running: dict[str, System], workloads: list[Workload], failures: list[str]
) -> Samples:
    samples: Samples = {workload.name: defaultdict(list) for workload in workloads}
    failed: set[tuple[str, str]] = set()

    async def run(workload: Workload, name: str, repeat: int | str) -> None:
        if (workload.name, name) in failed:
            return
        rounds.notice(f"{workload.name}, {name}, {repeat}")
        system = running[name]
        measured = workload.smaller() if repeat == "warm-up" else workload
        await system.resume()
        try:
            sample = await measured.measure(system.client, rounds.prompts(workload.name, repeat))
        except MeasurementError as error:
            failed.add((workload.name, name))
            samples[workload.name].pop(name, None)
            failures.append(f"{name} failed in {workload.name}: {error}")
        else:
            if repeat != "warm-up":
                samples[workload.name][name].append(sample)
        finally:
            system.pause()

    for repeat in ("warm-up", *range(rounds.repeats)):
        for workload in workloads:
            for name in running:
                await run(workload, name, repeat)
    return samples


def describe_machine() -> str:
    """Processor and cores, for the document."""
    from anaphora.machine import usable_cores
    from anaphora.ops.native import kernel_name

    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{usable_cores()} cores of {models[0] if models else 'a processor'}, {kernel_name()}"


def to_section(
    comparison: Comparison, rows: Rows, names: list[str], chosen: list[Peer], *, note: str
) -> str:
    """The generated part of the document."""
    today = datetime.date.today().isoformat()
    spreads = [line.spread for row in rows.values() for line in row.values()]
    parts = [
        f"`make compare` on {today}, {describe_machine()}, medians of {comparison.repeats} (seed "
        f"{comparison.seed}; spread {statistics.median(spreads):.0%} in the middle, "
        f"{max(spreads):.0%} at most). The last column is how many times better Anaphora is than "
        f"the best of the others. {note}".strip(),
        to_markdown(table(rows, names)),
        f"![Every figure of every system relative to Anaphora's]({PLOT.name})",
        "\n".join(f"- **{peer.name}** ({peer.version}): {peer.tried}" for peer in chosen),
    ]
    if comparison.failures:
        parts.append("Failed:\n\n" + "\n".join(f"- {failure}" for failure in comparison.failures))
    return "\n\n".join(parts)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure Anaphora beside other engines.")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--model", default="smollm2", help="a GGUF file or an alias")
    parser.add_argument("--system", action="append", choices=[*PEERS], help="only this peer")
    parser.add_argument("--variants", choices=[*PEERS], help="this peer, with each of its options")
    parser.add_argument("--workload", action="append", choices=names, help="only this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--venvs", type=Path, default=HERE / ".venvs", help="environments")
    parser.add_argument("--weights", type=Path, default=HERE / ".weights", help="converted weights")
    parser.add_argument("--logs", type=Path, default=HERE / ".logs", help="the servers' output")
    parser.add_argument("--note", default="", help="a sentence for the document")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, the plot")
    options = parser.parse_args()
    options.system = options.system or []
    for name in ("venvs", "weights", "logs"):
        setattr(options, name, getattr(options, name).resolve())
    return options


def main() -> None:
    """Measure, show, write if asked, print the JSON line."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its servers
    workloads = [w for w in WORKLOADS if not options.workload or w.name in options.workload]
    comparison = asyncio.run(compare(options, workloads))
    # not how many times a hit pays: a slow miss is no merit
    made = make_lines(workloads, comparison.samples)
    lines = [line for line in made if line.figure.unit != "x"]
    rows = to_rows(lines)
    keys = _keys(options)
    chosen = [peer for key in keys for peer in _shown(key, options)]
    names = [OURS.name, *(peer.name for peer in chosen)]
    header, *cells = table(rows, names)
    shown = Table(title=f"medians of {comparison.repeats}", title_justify="left")
    for index, name in enumerate(header):
        shown.add_column(name, justify="left" if index < 2 else "right")
    for row in cells:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    for failure in comparison.failures:
        console.print(failure, style="red", soft_wrap=True)
    if options.write and not options.variants:
        plot(rows, names, PLOT)
        section = to_section(comparison, rows, names, chosen, note=options.note)
        DOCUMENT.write_text(replace_section(DOCUMENT.read_text(), section))
    document = {
        "seed": comparison.seed,
        "repeats": comparison.repeats,
        "failures": comparison.failures,
        "figures": [line.to_builtins() for line in lines],
    }
    print(json.dumps(document))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
