"""What a comparison says: medians, ratios to the best peer, Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from anaphora.bench.report import Line, format_value

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"

_MARKS = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"), ("D", "#cc79a7"))

Rows = dict[tuple[str, str], dict[str, Line]]  # (workload, figure) → system → line


def to_rows(lines: Sequence[Line]) -> Rows:
    """The lines of all systems side by side."""
    rows: Rows = {}
    for line in lines:
        rows.setdefault((line.workload, line.figure.name), {})[line.system] = line
    return rows


def times_better(one: Line, other: Line) -> float:
    """How many times better ``one`` is; below 1 it is worse."""
    ratio = one.median / other.median
    return ratio if one.figure.is_higher_better else 1 / ratio


def best_peer(row: Mapping[str, Line], ours: str) -> Line | None:
    """The best of the others; None if none gave this figure."""
    best: Line | None = None
    for system, line in row.items():
        if system != ours and (best is None or times_better(line, best) > 1):
            best = line
    return best


def ratio_to_best(row: Mapping[str, Line], ours: str) -> float | None:
    """How many times better we are than the best peer; None if one of the two is missing."""
    best = best_peer(row, ours)
    return None if best is None or ours not in row else times_better(row[ours], best)


def table(rows: Rows, systems: Sequence[str]) -> list[list[str]]:
    """Cells with a header; the first of ``systems`` is ours."""
    ours = systems[0]
    cells = [["workload", "figure", *systems, "to the best peer"]]
    for (workload, figure), row in rows.items():
        values = [
            format_value(row[system].median, row[system].figure.unit) if system in row else "failed"
            for system in systems
        ]
        ratio = ratio_to_best(row, ours)
        cells.append([workload, figure, *values, "-" if ratio is None else f"{ratio:.2f} x"])
    return cells


def to_markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its header, numbers are to the right."""
    header, *rows = cells
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def replace_section(document: str, section: str) -> str:
    """``document`` with ``section`` between its two markers."""
    before, found, rest = document.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"the document lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section.strip()}\n\n{END}{after}"


def plot(rows: Rows, systems: Sequence[str], path: Path) -> None:
    """Each system's figures relative to ours, on a logarithmic axis: right is better."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "anaphora"  # the same picture, the same file
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ours, *peers = systems
    shown = {key: row for key, row in rows.items() if ours in row}
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.34 * len(shown)), layout="constrained")
    axes.axvline(1, color="black", linewidth=1.5, label=ours)
    for peer, (marker, color) in zip(peers, _MARKS, strict=False):
        points = [
            (times_better(row[peer], row[ours]), height)
            for height, row in enumerate(shown.values())
            if peer in row
        ]
        axes.scatter(
            *zip(*points, strict=True), label=peer, marker=marker, color=color, s=36, zorder=3
        )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if low <= t <= high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(shown)), [f"{workload}, {name}" for workload, name in shown])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"times as good as {ours} (left of the line: slower)")
    figure.legend(loc="outside upper center", ncols=len(systems), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
