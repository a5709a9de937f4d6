"""Low-rank adapters (Hu et al., 2021) as the operations read them: out += B (A x).

A linear may be several of a checkpoint's modules in one matrix (q | k | v). Each part has an A and
a B of its own, or none; their ranks stand side by side, padded part by part to whole panels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from anaphora.ops.api import Linear

Array = npt.NDArray[np.float32]

RANKS = 16  # that share a scale when A x is rounded to int8, as kPanel in csrc/kernels.h


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What an adapter adds to one part of a linear."""

    out_features: int
    a: Array | None = None  # [rank, in]; None if it adds nothing
    b: Array | None = None  # [out, rank], the adapter's scaling within

    @property
    def num_ranks(self) -> int:
        """Ranks with their padding."""
        return 0 if self.a is None else -(-len(self.a) // RANKS) * RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """What an adapter adds to one linear, as its backend packed it."""

    a: Linear  # [ranks, in]
    b: Linear | None  # [out, ranks]; None if ``handle`` has it
    num_bytes: int
    handle: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter in memory. ``deltas`` are by ``Linear.place``."""

    digest: str  # SHA-256 of all that decides its results, in hexadecimal
    rank: int  # the largest
    deltas: tuple[Delta | None, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of all its matrices."""
        return sum(delta.num_bytes for delta in self.deltas if delta is not None)


@dataclasses.dataclass(eq=False)
class AdaptedRows:
    """Which rows of a batch have which adapter: (adapter, first row, end), ascending."""

    segments: tuple[tuple[Adapter, int, int], ...]
    handle: Any = None  # its backend's


def stack(parts: Sequence[Part], in_features: int) -> tuple[Array, Array]:
    """A [ranks, in] and B [out, ranks] of all parts, with zeros where there is nothing."""
    num_ranks = sum(part.num_ranks for part in parts)
    a = np.zeros((num_ranks, in_features), np.float32)
    b = np.zeros((sum(part.out_features for part in parts), num_ranks), np.float32)
    row = rank = 0
    for part in parts:
        if part.a is not None and part.b is not None:
            a[rank : rank + len(part.a)] = part.a
            b[row : row + part.out_features, rank : rank + len(part.a)] = part.b
        row += part.out_features
        rank += part.num_ranks
    return a, b


def spans(parts: Sequence[Part], panel: int, *, in_turn: bool = False) -> npt.NDArray[np.int32]:
    """First rank and number of ranks of each panel of columns, [panels, 2].

    ``in_turn``: whole panels of the parts, all of one size, alternate. Otherwise the parts follow
    each other, and a panel on the border of two needs the ranks of both.
    """
    starts = np.cumsum([0, *(part.num_ranks for part in parts)])
    if in_turn:
        panels = -(-parts[0].out_features // panel)
        each = [(starts[i], part.num_ranks) for i, part in enumerate(parts)]
        return np.array(each * panels, np.int32)
    columns = np.cumsum([0, *(part.out_features for part in parts)])
    result = np.zeros((-(-columns[-1] // panel), 2), np.int32)
    for index in range(len(result)):
        touched = [
            i
            for i, part in enumerate(parts)
            if part.num_ranks
            and columns[i] < (index + 1) * panel
            and columns[i + 1] > index * panel
        ]
        if touched:
            first, end = starts[touched[0]], starts[touched[-1] + 1]
            result[index] = first, end - first
    return result
