"""In which order a table's columns and rows share the longest prefixes, found from the data.

After "Optimizing LLM Queries in Relational Data Analytics Workloads" (arXiv 2403.05821): its greedy
group recursion (GGR) takes the value that saves most, puts its rows side by side with that column
first, and goes on inside the group and with the other rows. A column that is constant within the
group comes along at once, which covers the paper's functional dependencies and those that hold in
one group only. What differs from the paper: a saving is counted in characters, not in their
squares; groups are also sought behind columns that all rows begin with; and rows that share no
value begin with the column whose cells share the longest beginnings.

A template has one order for all rows: `fixed_order` looks for the best of those.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NUM_COLUMNS_EXACT = 7  # up to here all orders are compared
NUM_CELLS_SEARCHED = 400_000_000  # above, until the search for one ends: some seconds


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Orders for a table, and hit rates as `hit_rate` counts them, of cells without separators."""

    column_order: list[str]  # one for all rows
    row_order: list[int]  # goes with it: rows that share a prefix are neighbours
    hit_before: float  # columns as they were
    hit_after: float  # in `column_order`
    hit_per_row: float  # if each row had an order of its own
    row_column_orders: list[tuple[str, ...]]  # [num_rows], what `hit_per_row` is of


def hit_rate(texts: Iterable[str]) -> float:
    """Characters that begin an earlier text too, of all: what an unlimited cache would save.

    Each text is matched with the earlier one that shares most, as in a trie of characters; the sum
    does not depend on the order of the texts.
    """
    ordered = sorted(texts)
    num_shared = sum(itertools.starmap(num_shared_characters, itertools.pairwise(ordered)))
    return num_shared / max(1, sum(map(len, ordered)))


def num_shared_characters(a: str, b: str) -> int:
    """How long the common beginning of two texts is."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    step = 16  # most beginnings are short beside the texts
    while low + step < high and a.startswith(b[low : low + step], low):
        low += step
        step *= 2
    high = min(high, low + step)
    while high - low > 1:  # a[:low] is shared, a[:high] is not
        middle = (low + high) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle
    return low


def propose(columns: Mapping[str, Sequence[str]]) -> Proposal:
    """Orders for ``columns``: name → one cell for each row.

    The same table gets the same orders, and never one that is worse than its own. Raises
    ``ValueError`` if columns have different numbers of rows.
    """
    names = list(columns)
    cells = [list(columns[name]) for name in names]
    if len(set(map(len, cells))) > 1:
        sizes = ", ".join(f"{name!r} has {len(c)}" for name, c in zip(names, cells, strict=True))
        raise ValueError(f"columns must have the same number of rows: {sizes}")
    num_rows = len(cells[0]) if cells else 0
    kept = list(range(len(names)))
    before = hit_rate(_joined(cells, [kept] * num_rows))
    if num_rows < 2 or len(names) < 2:
        found = per_row = [kept] * num_rows
        hit_after = hit_per_row = before
    else:
        table = Table(cells)
        found, hit_after = _best(cells, [[kept] * num_rows, [fixed_order(table)] * num_rows])
        begun = sorted({0, len(names) // 4, len(names) // 2})
        tried = [row_orders(table, found[0][:num]) for num in begun]
        per_row, hit_per_row = _best(cells, [found, *tried])
    order = found[0] if found else kept
    return Proposal(
        column_order=[names[c] for c in order],
        row_order=sorted(range(num_rows), key=lambda row: [cells[c][row] for c in order]),
        hit_before=before,
        hit_after=hit_after,
        hit_per_row=hit_per_row,
        row_column_orders=[tuple(names[c] for c in order) for order in per_row],
    )


def _best(cells: list[list[str]], choices: list[list[list[int]]]) -> tuple[list[list[int]], float]:
    """The first of the best, orders of columns for each row, and its hit rate."""
    rates = [hit_rate(_joined(cells, orders)) for orders in choices]
    best = rates.index(max(rates))
    return choices[best], rates[best]


def _joined(cells: list[list[str]], orders: Sequence[Sequence[int]]) -> Iterable[str]:
    return ("".join(cells[c][row] for c in order) for row, order in enumerate(orders))


class Table:
    """Cells as numbers. ``values[row, c]``: which value, unique over all columns; the values of one
    column are numbered in the order of their texts. ``lengths[value]``: its characters.
    """

    def __init__(self, cells: Sequence[Sequence[str]]) -> None:
        self.values: Ints = np.empty((len(cells[0]), len(cells)), np.int64)
        texts: list[str] = []
        shared = [0]  # [num_values + 1], characters that value i - 1 and value i begin with
        for c, column in enumerate(cells):
            distinct = sorted(set(column))
            numbers = {text: i for i, text in enumerate(distinct, start=len(texts))}
            self.values[:, c] = [numbers[cell] for cell in column]
            shared += map(num_shared_characters, distinct, distinct[1:])
            shared.append(0)
            texts += distinct
        self.lengths: Ints = np.array([len(text) for text in texts], np.int64)
        # [level, i]: the least of shared[i : i + 2**level]
        self._least = [np.array(shared, np.int64)]
        while 2 ** len(self._least) <= len(shared):
            half = 2 ** (len(self._least) - 1)
            last = self._least[-1]
            self._least.append(np.minimum(last[:-half], last[half:]))

    def num_shared(self, low: Ints, high: Ints) -> Ints:
        """Characters that two values of one column begin with; ``low`` < ``high``, elementwise."""
        found = np.empty(low.shape, np.int64)
        level_of = np.frexp((high - low).astype(np.float64))[1] - 1
        for level in np.unique(level_of):
            where = level_of == level
            least = self._least[level]
            found[where] = np.minimum(
                least[low[where] + 1], least[high[where] + 1 - 2 ** int(level)]
            )
        return found


def row_orders(table: Table, start: Sequence[int] = ()) -> list[list[int]]:
    """GGR: an order of columns for each row, behind ``start``, with which all rows begin."""
    num_rows, num_columns = table.values.shape
    orders = [list(start) for _ in range(num_rows)]
    groups = np.unique(table.values[:, list(start)], axis=0, return_inverse=True)[1].ravel()
    columns = np.setdiff1d(np.arange(num_columns), start)
    waiting = [(np.flatnonzero(groups == group), columns) for group in range(groups.max() + 1)]
    while waiting:
        rows, columns = waiting.pop()
        values = table.values[rows][:, columns]
        is_constant = (values == values[0]).all(axis=0)
        for row in rows:
            orders[row] += columns[is_constant].tolist()
        columns, values = columns[~is_constant], values[:, ~is_constant]
        if not len(columns):
            continue
        members, alone = _groups(table, values)
        waiting += [(rows[of_one], columns) for of_one in members]
        if len(alone):
            columns = _alike_first(table, columns, values[alone])
            for row in rows[alone]:
                orders[row] += columns.tolist()
    return orders


def _groups(table: Table, values: Ints) -> tuple[list[Ints], Ints]:
    """Rows that go together, those whose value saves most first, and rows that share no value."""
    num_rows, num_columns = values.shape
    if num_rows == 2:  # the columns that are equal are gone
        return [], np.arange(2)
    distinct, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    numbers = numbers.reshape(values.shape)
    if counts.max() < 2:
        return [], np.arange(num_rows)
    saved = _lengths_together(table.lengths[distinct], numbers, counts)
    by_value = np.argsort(numbers, axis=None, kind="stable") // num_columns
    ends = np.cumsum(counts)
    heap = [
        (-saved[v] * (counts[v] - 1), int(v), int(counts[v])) for v in np.flatnonzero(counts > 1)
    ]
    heapq.heapify(heap)
    is_free = np.ones(num_rows, bool)
    groups = []
    while heap:
        _, v, count = heapq.heappop(heap)
        members = by_value[ends[v] - counts[v] : ends[v]]
        members = members[is_free[members]]
        if len(members) == count:
            is_free[members] = False
            groups.append(members)
        elif len(members) > 1:  # others have taken some of its rows
            heapq.heappush(heap, (-saved[v] * (len(members) - 1), v, len(members)))
    return groups, np.flatnonzero(is_free)


def _lengths_together(lengths: Ints, numbers: Ints, counts: Ints) -> Ints:
    """Of each value that repeats: its characters, and those of the columns constant beside it."""
    found = np.zeros(len(lengths), np.int64)
    for c in np.flatnonzero((counts[numbers] > 1).any(axis=0)):
        rows = np.flatnonzero(counts[numbers[:, c]] > 1)
        rows = rows[np.argsort(numbers[rows, c], kind="stable")]
        mine = numbers[rows, c]
        starts = np.flatnonzero(np.diff(mine, prepend=-1))
        first = numbers[rows[starts]]
        differs = numbers[rows] != np.repeat(first, np.diff(starts, append=len(rows)), axis=0)
        is_constant = ~np.logical_or.reduceat(differs, starts, axis=0)
        found[mine[starts]] = (lengths[first] * is_constant).sum(axis=1)
    return found


def _alike_first(table: Table, columns: Ints, values: Ints) -> Ints:
    """The column whose cells share most of their beginnings, before the others."""
    if len(values) < 2:
        return columns
    ordered = np.sort(values, axis=0)
    best = int(table.num_shared(ordered[:-1], ordered[1:]).sum(axis=0).argmax())
    return np.concatenate([columns[best : best + 1], np.delete(columns, best)])


def fixed_order(table: Table, num_cells: int = NUM_CELLS_SEARCHED) -> list[int]:
    """One order of columns for all rows: the one with the smallest trie, if there are few columns.

    Else a greedy one, in which single columns are moved while that helps, until ``num_cells`` cells
    have been looked at.
    """
    search = _Search(table)
    if table.values.shape[1] <= NUM_COLUMNS_EXACT:
        return search.completed(search.exact())
    order = search.greedy()
    least = search.num_characters(order)
    is_better = True
    while is_better:
        is_better = False
        for start, end in itertools.permutations(range(len(order)), 2):
            if search.num_cells > num_cells:
                return order
            moved = order.copy()
            moved.insert(end, moved.pop(start))
            found = search.num_characters(moved, enough=least)
            if found < least:
                order, least, is_better = search.completed(moved), found, True
    return order


@dataclasses.dataclass(frozen=True)
class _Beginning:
    """Columns that come first, in whatever order, and the rows that are still equal to another."""

    columns: frozenset[int]
    groups: Ints  # [num_rows], one number for equal rows
    rows: Ints  # [num_rows], which ones they are; none if there are no more columns


@dataclasses.dataclass(frozen=True)
class _Step:
    """A column behind a beginning, and with it the columns that split no group of equal rows."""

    columns: list[int]
    num_characters: (
        int  # what the trie grows by, by the rest of rows that have no equal any more too
    )
    length_by_repeats: float
    after: _Beginning


class _Search:
    """Sizes of the tries of orders; a beginning that was seen is not computed again."""

    def __init__(self, table: Table) -> None:
        self.num_cells = 0  # looked at so far
        self._table = table
        self._steps: dict[tuple[frozenset[int], int], _Step] = {}
        self._rests: dict[frozenset[int], tuple[int, list[int]]] = {}
        num_rows, self._num_columns = table.values.shape
        nothing = _Beginning(frozenset(), np.zeros(num_rows, np.int64), np.arange(num_rows))
        self._first, self._constant, _ = self._settled(nothing)

    def exact(self) -> list[int]:
        """The columns that decide, in the best order."""
        return self._rest(self._first)[1]

    def _rest(self, now: _Beginning) -> tuple[int, list[int]]:
        """What the trie grows by behind a beginning, and with which columns, at best."""
        if not len(now.rows):
            return 0, []
        if now.columns not in self._rests:
            found = []
            for column in self._left(now):
                step = self._step(now, column)
                more, order = self._rest(step.after)
                found.append((step.num_characters + more, [column, *order]))
            self._rests[now.columns] = min(found)
        return self._rests[now.columns]

    def greedy(self) -> list[int]:
        """Next is always what is longest, times how often it repeats."""
        order, now = [], self._first
        while len(now.rows):
            steps = [self._step(now, column) for column in self._left(now)]
            best = max(steps, key=lambda step: step.length_by_repeats)
            order.append(best.columns[0])
            now = best.after
        return self.completed(order)

    def num_characters(self, order: Sequence[int], enough: int | None = None) -> int:
        """Of the trie, without its first columns if they are constant; counts up to ``enough``."""
        total, now = 0, self._first
        for column in order:
            if not len(now.rows) or (enough is not None and total >= enough):
                break
            if column not in now.columns:
                step = self._step(now, column)
                total += step.num_characters
                now = step.after
        return total

    def completed(self, order: Sequence[int]) -> list[int]:
        """All columns, each where it comes."""
        found, now = self._constant.copy(), self._first
        for column in order:
            if column not in now.columns and len(now.rows):
                step = self._step(now, column)
                found += step.columns
                now = step.after
        return list(dict.fromkeys([*found, *order, *range(self._num_columns)]))

    def _left(self, now: _Beginning) -> list[int]:
        return [c for c in range(self._num_columns) if c not in now.columns]

    def _step(self, now: _Beginning, column: int) -> _Step:
        if (now.columns, column) not in self._steps:
            self._steps[now.columns, column] = self._computed(now, column)
        return self._steps[now.columns, column]

    def _computed(self, now: _Beginning, column: int) -> _Step:
        lengths = self._table.lengths
        values = self._table.values[now.rows]
        self.num_cells += values.size + 10 * len(values)  # the sort is worth some ten columns
        keys = now.groups * len(lengths) + values[:, column]
        distinct, groups, counts = np.unique(keys, return_inverse=True, return_counts=True)
        parents, cells = np.divmod(distinct, len(lengths))
        beside = np.flatnonzero(np.diff(parents) == 0)
        num_shared = self._table.num_shared(cells[beside], cells[beside + 1]).sum()
        is_equal = counts[groups] > 1
        others = [c for c in self._left(now) if c != column]
        alone = lengths[values[~is_equal][:, others]].sum()
        after, along, of_groups = self._settled(
            _Beginning(
                now.columns | {column},
                (np.cumsum(counts > 1) - 1)[groups[is_equal]],
                now.rows[is_equal],
            )
        )
        columns = [column, *along]
        return _Step(
            columns,
            int(lengths[cells].sum() - num_shared + alone + of_groups),
            float(lengths[values[:, columns]].sum() / len(distinct)),
            after,
        )

    def _settled(self, now: _Beginning) -> tuple[_Beginning, list[int], int]:
        """With the columns that split no group; these; and their characters, once for a group."""
        if not len(now.rows):
            return now, [], 0
        values = self._table.values
        first = np.zeros(int(now.groups.max()) + 1, np.int64)  # a row of each group
        first[now.groups] = now.rows
        left = self._left(now)
        of_rows, of_groups = values[now.rows][:, left], values[first][:, left]
        is_along = (of_rows == of_groups[now.groups]).all(axis=0)
        along = [c for c, is_one in zip(left, is_along, strict=True) if is_one]
        num_left = 0 if is_along.all() else len(now.rows)
        columns = now.columns.union(along)
        after = _Beginning(columns, now.groups[:num_left], now.rows[:num_left])
        return after, along, int(self._table.lengths[of_groups[:, is_along]].sum())
