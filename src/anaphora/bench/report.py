"""What was measured, as a table for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anaphora.bench.hitrate import LOAD, SHARES, Gain, Loops, Sweep
from anaphora.bench.limits import Limits
from anaphora.bench.rounds import CACHING_OFF, CACHING_ON, Samples
from anaphora.bench.workloads import THROUGHPUT, Figure, Workload
from anaphora.types import ModelInfo

_FOOTNOTE = f"""\
closed: 8 clients, each sends when it has its answer. service: one client, so no waiting. open: \
Poisson arrivals at {LOAD:.0%} of the baseline's closed-loop capacity, measured just before, the \
same arrivals for all rows. Times are medians of whole requests (480 tokens in, 16 out).
The gains are ratios to the baseline. Skipped compute is the ratio of service times. Throughput \
gains that times shared loads: hits that run together read weights and shared blocks once. \
Open-loop latency gains skipped compute times shorter queues: at the same arrivals a faster \
server has less waiting before it. Both factors are what remains after dividing by skipped compute.
A claim often quoted for prefix caching at 30 %: 2.5 times the input throughput and a median \
latency 3 times lower."""


@dataclasses.dataclass(frozen=True)
class Line:
    """All repeats of one figure of one workload on one system."""

    workload: str
    system: str
    figure: Figure
    samples: list[float]
    cached_share: float | None
    limit: float | None

    @property
    def median(self) -> float:
        """Over the repeats."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Largest less smallest, as a share of the median."""
        return (max(self.samples) - min(self.samples)) / self.median

    def to_builtins(self) -> dict[str, Any]:
        """For the JSON document."""
        return {
            "workload": self.workload,
            "system": self.system,
            "figure": self.figure.name,
            "unit": self.figure.unit,
            "is_higher_better": self.figure.is_higher_better,
            "median": self.median,
            "limit": self.limit,
            "share_of_limit": None if self.limit is None else self.median / self.limit,
            "cached_share": self.cached_share,
            "spread": self.spread,
            "samples": self.samples,
        }


def make_lines(
    workloads: Sequence[Workload], samples: Samples, limits: Limits | None = None
) -> list[Line]:
    """In the workloads' order; with the cache off and on, also how many times it pays."""
    lines = []
    for workload in workloads:
        by_system = samples[workload.name]
        for figure in workload.figures:
            limit = None
            if figure is THROUGHPUT and limits is not None:
                limit = limits.throughput(workload)
            lines += [
                Line(
                    workload.name,
                    system,
                    figure,
                    [sample.values[figure.name] for sample in repeats],
                    _mean([0.0 if figure.is_cold else s.cached_share for s in repeats]),
                    limit,
                )
                for system, repeats in by_system.items()
            ]
            if set(by_system) == {CACHING_ON, CACHING_OFF} and figure.unit == "s":
                lines.append(_ratio(lines[-1], lines[-2]))
    return lines


def _ratio(first: Line, second: Line) -> Line:
    if first.system == CACHING_ON:
        first, second = second, first
    ratios = [a / b for a, b in zip(first.samples, second.samples, strict=True)]
    figure = Figure("off / on", "x", is_higher_better=True)
    return Line(first.workload, CACHING_ON, figure, ratios, None, None)


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return statistics.mean(known) if len(known) == len(shares) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One run of ``anaphora bench``."""

    url: str | None  # None: our own server
    model: str
    info: ModelInfo | None
    seed: int
    repeats: int
    limits: Limits | None
    lines: list[Line]
    sweep: Sweep | None

    def to_json(self) -> bytes:
        """One line."""
        document = {
            "url": self.url,
            "model": self.model,
            "info": self.info,
            "seed": self.seed,
            "repeats": self.repeats,
            "peaks": None if self.limits is None else self.limits.peaks,
            "figures": [line.to_builtins() for line in self.lines],
            "hit_rate": None if self.sweep is None else _sweep_builtins(self.sweep),
        }
        return msgspec.json.encode(document)

    def show(self, console: Console) -> None:
        """The tables."""
        where = self.url or "this machine"
        title = f"{escape(self.model)} on {where}, medians of {self.repeats}, seed {self.seed}"
        if self.info is not None:
            title += f"; {self.info.dtype}, {self.info.kernels}, {self.info.threads} threads"
        if self.lines:
            console.print(_figures_table(title, self.lines))
        if self.sweep is not None:
            for table in _sweep_tables(title, self.sweep, is_own=self.url is None):
                console.print(table)
            console.print(_FOOTNOTE, soft_wrap=True)


def _figures_table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("workload", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for name in ("median", "limit", "of limit", "cached", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.workload,
            "uncached" if line.system == CACHING_OFF else line.figure.name,
            format_value(line.median, line.figure.unit),
            "-" if line.limit is None else format_value(line.limit, line.figure.unit),
            "-" if line.limit is None else f"{line.median / line.limit:.0%}",
            "-" if line.cached_share is None else f"{line.cached_share:.0%}",
            f"{line.spread:.0%}" if len(line.samples) > 1 else "-",
        )
    return table


def _sweep_tables(title: str, sweep: Sweep, *, is_own: bool) -> list[Table]:
    measured = Table(title=f"hit rate: {title}", title_justify="left")
    measured.add_column("known", no_wrap=True)
    for name in ("cached", "closed", "P50 closed", "service", "P50 open"):
        measured.add_column(name, justify="right", no_wrap=True)
    gains = Table(title="times better than the baseline", title_justify="left")
    gains.add_column("known")
    for name in _GAINS:
        gains.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    if is_own:
        measured.add_row(CACHING_OFF, *_loop_cells(sweep, None))
    for share in SHARES:
        measured.add_row(f"{share:.0%}", *_loop_cells(sweep, share))
        values = (sweep.median_gain(share, value) for value in _GAINS.values())
        gains.add_row(f"{share:.0%}", *(format_value(value, "x") for value in values))
    return [measured, gains]


_GAINS: dict[str, Callable[[Gain], float]] = {
    "throughput": lambda gain: gain.throughput,
    "p50_closed": lambda gain: gain.p50_closed,
    "p50_open": lambda gain: gain.p50_open,
    "skipped_compute": lambda gain: gain.skipped_compute,
    "shared_loads": lambda gain: gain.shared_loads,
    "shorter_queues": lambda gain: gain.shorter_queues,
}
_LOOPS: dict[str, tuple[str, Callable[[Loops], float]]] = {
    "throughput": ("tok/s", lambda loops: loops.throughput),
    "p50_closed": ("s", lambda loops: loops.p50_closed),
    "p50_alone": ("s", lambda loops: loops.p50_alone),
    "p50_open": ("s", lambda loops: loops.p50_open),
}


def _loop_cells(sweep: Sweep, share: float | None) -> list[str]:
    cached = _mean([loops.cached_share for loops in _loops(sweep, share)])
    cells = ["-" if cached is None else f"{cached:.0%}"]
    for unit, value in _LOOPS.values():
        cells.append(format_value(sweep.median(share, value), unit))
    return cells


def _loops(sweep: Sweep, share: float | None) -> list[Loops]:
    return sweep.baseline if share is None else sweep.shares[share]


def _sweep_builtins(sweep: Sweep) -> dict[str, Any]:
    def of(share: float | None) -> dict[str, Any]:
        medians = {name: sweep.median(share, value) for name, (_, value) in _LOOPS.items()}
        return {"median": medians, "samples": _loops(sweep, share)}

    shares = {}
    for share in SHARES:
        gains = {name: sweep.median_gain(share, value) for name, value in _GAINS.items()}
        shares[f"{share:g}"] = of(share) | {"gain": gains}
    return {"baseline": of(None), "shares": shares}


def format_value(value: float, unit: str) -> str:
    """For people: three digits, seconds below one as milliseconds."""
    if unit == "s" and value < 1:
        return f"{value * 1000:,.3g} ms" if value < 0.0995 else f"{value * 1000:,.0f} ms"
    if unit == "x":
        return f"{value:,.2f} x" if value < 10 else f"{value:,.0f} x"
    return f"{value:,.2f} {unit}" if value < 10 else f"{value:,.0f} {unit}"
