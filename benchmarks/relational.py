"""Three queries over joined tables: what ordering rows, and columns too, is worth.

Modelled on those of "Optimizing LLM Queries in Relational Data Analytics Workloads" (arXiv
2403.05821), on generated tables whose columns repeat (`benchmarks/tables.py`, seeded):

- filter: reviews joined with films; is the film one for children? Yes or no.
- projection: reviews joined with products; a few words about each.
- join: order lines joined with customers, products, carriers and shops, 17 columns; one of four
  classes for each.

A row is written as one line for each column behind one instruction. Each query runs with its rows
and columns as the join gives them, with rows ordered (the batch's plan), and with the columns in
the order that `anaphora.batch.columns` proposes as well; in a cache so small that what was
computed is gone unless it is used soon, and in a large one. Every run has an engine of its own,
started cold.

Usage: python benchmarks/relational.py [--rows 1000] [--repeats 3] [--query filter]
           [--cache-mib 192] [--large-cache-mib 4096] [--plot FILE.svg]
The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tables import Columns, goods, movies, orders

from anaphora.batch.client import Client
from anaphora.batch.columns import propose
from anaphora.config import EngineConfig

MODEL = "smollm2"
NUM_SEQS = 16  # that run at a time; their blocks have to fit into the small cache
AS_JOINED, ROWS, BOTH = "as joined", "rows", "rows and columns"  # what is ordered
COLOURS = {AS_JOINED: "#8b949e", ROWS: "#6ea8fe", BOTH: "#1f6feb"}


@dataclasses.dataclass(frozen=True)
class Query:
    """A table, what is asked about its rows, and how an answer is bounded."""

    table: Callable[[int, int], Columns]
    instruction: str
    answer: dict[str, Any]


QUERIES = {
    "filter": Query(
        movies,
        "You get one review of a film with what is known of the film. Say whether the film is one "
        "that a child of ten can watch alone. Answer yes or no.",
        {"max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}},
    ),
    "projection": Query(
        goods,
        "You get one review of a product with the product's description. Write in a few words what "
        "the customer says about the part that the review is mostly about.",
        {"max_tokens": 12},
    ),
    "join": Query(
        orders,
        "You get one line of an order with its customer, product, carrier and shop. Say which desk "
        "has to look at it: sales, transport, repair or nobody.",
        {"max_tokens": 4,
         "structured_outputs": {"choice": ["sales", "transport", "repair", "nobody"]}},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    hit_rate: float  # cached tokens of all prompts' tokens
    num_prompt: int
    num_cache_tokens: int  # that the cache holds
    answers: list[str]


def bodies(query: Query, columns: Columns, names: list[str]) -> list[dict[str, Any]]:
    """One chat for each row, columns in the order of ``names``."""
    rows = zip(*(columns[name] for name in names), strict=True)
    return [
        {
            "messages": [
                {"role": "system", "content": query.instruction},
                {
                    "role": "user",
                    "content": "\n".join(f"{n}: {c}" for n, c in zip(names, row, strict=True)),
                },
            ],
            "temperature": 0,
            **query.answer,
        }
        for row in rows
    ]


def run(asked: list[dict[str, Any]], cache_bytes: int, *, is_planned: bool) -> Measured:
    """In a fresh engine."""
    config = EngineConfig(model=MODEL, kv_cache_memory=cache_bytes, max_num_seqs=NUM_SEQS)
    with Client(config) as client:
        client.complete([{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}])
        begin = time.perf_counter()
        replies = client.complete(asked, is_planned=is_planned)
        seconds = time.perf_counter() - begin
        info = client.info
    assert info is not None
    errors = [reply.error for reply in replies if reply.error]
    if errors:
        raise SystemExit(f"{len(errors)} rows failed: {errors[0]}")
    num_prompt = sum(reply.usage()[0] for reply in replies)
    num_cached = sum(reply.usage()[1] for reply in replies)
    num_cache_tokens = info.num_blocks * info.block_size
    texts = [reply.text for reply in replies]
    return Measured(seconds, num_cached / num_prompt, num_prompt, num_cache_tokens, texts)


Found = dict[tuple[str, str, str], list[Measured]]  # query, cache, order


def measure(options: argparse.Namespace) -> tuple[Found, dict[str, float]]:
    """All repeats, and the seconds that each query's order of columns took to find."""
    names = options.query or list(QUERIES)
    caches = {"small": options.cache_mib << 20, "large": options.large_cache_mib << 20}
    console = Console(stderr=True)
    found: Found = {}
    planning: dict[str, float] = {}
    for repeat in range(options.repeats):
        for name in names:
            query = QUERIES[name]
            columns = query.table(options.rows, options.seed)
            begin = time.perf_counter()
            ordered = propose(columns).column_order
            planning[name] = time.perf_counter() - begin
            for cache, num_bytes in caches.items():
                for order in (AS_JOINED, ROWS, BOTH):
                    asked = bodies(query, columns, ordered if order == BOTH else list(columns))
                    one = run(asked, num_bytes, is_planned=order != AS_JOINED)
                    found.setdefault((name, cache, order), []).append(one)
                    console.print(
                        f"{name}, {cache} cache, {order}, repeat {repeat + 1}: "
                        f"{one.seconds:.1f} s, hit rate {one.hit_rate:.1%}"
                    )
    return found, planning


def report(found: Found, planning: dict[str, float], num_rows: int) -> list[dict[str, Any]]:
    shown = Table(title=f"{num_rows:,} rows, medians", title_justify="left")
    for name in ("query", "cache", "tokens", "of prompts", "ordered", "hit rate", "seconds",
                 "spread", "speedup", "other answers"):  # fmt: skip
        is_text = name in ("query", "cache", "ordered")
        shown.add_column(name, justify="left" if is_text else "right")
    figures = []
    for (query, cache, order), runs in found.items():
        base = found[query, cache, AS_JOINED]
        seconds = [run.seconds for run in runs]
        median = statistics.median(seconds)
        speedup = statistics.median(run.seconds for run in base) / median
        # Ordering rows changes no prompt, so no answer; other columns are another prompt.
        pairs = list(zip(runs[0].answers, base[0].answers, strict=True))
        num_differing = sum(a != b for a, b in pairs)
        hit_rate = statistics.median(run.hit_rate for run in runs)
        shown.add_row(
            query,
            cache,
            f"{runs[0].num_cache_tokens:,}",
            f"{runs[0].num_prompt:,}",
            order,
            f"{hit_rate:.1%}",
            f"{median:.1f}",
            f"{(max(seconds) - min(seconds)) / median:.0%}",
            f"{speedup:.2f} x",
            str(num_differing),
            end_section=order == BOTH,
        )
        figures.append(
            {"query": query, "cache": cache, "order": order, "hit_rate": hit_rate,
             "seconds": seconds, "times_as_fast": speedup, "num_differing": num_differing}
        )  # fmt: skip
    console = Console(width=130)
    console.print(shown)
    for query, seconds_taken in planning.items():
        console.print(f"{query}: the order of columns was found in {seconds_taken:.2f} s")
    return figures


def plot(found: Found, path: Path) -> None:
    """Seconds of each query in the small cache and in the large one; hit rates beside the bars."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "anaphora"
    from matplotlib import pyplot

    queries = list(dict.fromkeys(query for query, _, _ in found))
    caches = list(dict.fromkeys(cache for _, cache, _ in found))
    figure, all_axes = pyplot.subplots(
        1, len(caches), figsize=(9, 0.8 + 1.0 * len(queries)), sharey=True, sharex=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, cache in zip(all_axes[0], caches, strict=True):
        for i, order in enumerate((AS_JOINED, ROWS, BOTH)):
            for height, query in enumerate(queries):
                runs = found[query, cache, order]
                median = statistics.median(run.seconds for run in runs)
                y = height + (i - 1) * 0.27
                axes.barh(
                    y, median, height=0.25, color=COLOURS[order], zorder=2,
                    label=order if height == 0 else None,
                )  # fmt: skip
                hit = statistics.median(run.hit_rate for run in runs)
                axes.annotate(f"{hit:.0%}", (median, y), textcoords="offset points",
                              xytext=(3, -3), fontsize=7.5)  # fmt: skip
        num_tokens = found[queries[0], cache, AS_JOINED][0].num_cache_tokens
        axes.set_title(f"{cache} cache, {num_tokens:,} tokens", fontsize=9)
        axes.set_xlabel("seconds; beside each bar its hit rate")
        axes.set_yticks(range(len(queries)), queries)
        axes.grid(axis="x", color="#dddddd", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].invert_yaxis()
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the tables")
    parser.add_argument("--query", action="append", choices=[*QUERIES], help="only this")
    parser.add_argument("--cache-mib", type=int, default=192, help="the small cache")
    parser.add_argument("--large-cache-mib", type=int, default=4096)
    parser.add_argument("--plot", type=Path, help="SVG file")
    options = parser.parse_args()
    found, planning = measure(options)
    figures = report(found, planning, options.rows)
    if options.plot:
        plot(found, options.plot)
    print(json.dumps({"rows": options.rows, "seed": options.seed, "figures": figures}))


if __name__ == "__main__":
    main()
