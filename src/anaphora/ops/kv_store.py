"""The paged K/V store: the memory that blocks name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora.machine import map_memory

PANEL = 16  # keys that are scored side by side, as kPanel in csrc/kernels.h


STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int16": np.int16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """How many bytes a block of the store has and where its parts lie.

    A block is one contiguous run, K and V of ``num_layers`` layers and ``block_size`` tokens::

        float32, float16, bfloat16
            [num_layers][ K: [num_kv_heads][block_size/16][head_dim][16]
                          V: [num_kv_heads][block_size][head_dim]        ]
        int16
            [num_layers][ K: [num_kv_heads][block_size/16][head_dim/2][16][2], scales
                          V: [num_kv_heads][block_size/2][head_dim][2],        scales ]
            with float32 scales [num_kv_heads][block_size], one for each token and head

    ``places`` says for each layer of the model which of a sequence's block tables it reads, and
    which layer of these blocks it is; empty if there is one table and all layers are in its blocks.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # a key of STORAGE
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_windows(cls, layer_windows: Sequence[int], **sizes: Any) -> KVLayout:
        """Blocks of as many layers as see everything; the windowed ones have blocks of their own.

        ``layer_windows``: the tokens that each layer sees, 0 for all. Old blocks of windowed layers
        can then be freed while the others stay. Without many windows, all layers are together.
        """
        windowed = [i for i, window in enumerate(layer_windows) if window]
        full = [i for i, window in enumerate(layer_windows) if not window]
        if not full or len(windowed) < len(full):
            return cls(num_layers=len(layer_windows), **sizes)
        places = {layer: (0, i) for i, layer in enumerate(full)}
        places |= {layer: (1 + i // len(full), i % len(full)) for i, layer in enumerate(windowed)}
        return cls(
            num_layers=len(full), places=tuple(places[i] for i in range(len(places))), **sizes
        )

    @property
    def num_window_tables(self) -> int:
        """Block tables beside the first one: blocks that windowed layers take for 16 tokens."""
        return max((table for table, _ in self.places), default=0)

    @property
    def is_ragged(self) -> bool:
        """Whether the blocks of the last table have layers that no layer of the model is."""
        return len(self.places) < self.num_layers * (1 + self.num_window_tables)

    def place(self, layer: int) -> tuple[int, int]:
        """Block table and layer in its blocks of a layer of the model."""
        return self.places[layer] if self.places else (0, layer)

    @property
    def part_elements(self) -> int:
        """Numbers of K, or of V, of one layer in a block; a scale takes the room of two int16."""
        scales = 2 * self.block_size if self.dtype == "int16" else 0
        return self.num_kv_heads * (self.block_size * self.head_dim + scales)

    @property
    def block_elements(self) -> int:
        """Numbers in a block."""
        return 2 * self.num_layers * self.part_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_elements * np.dtype(STORAGE[self.dtype]).itemsize


class KVStore:
    """``num_blocks`` blocks of K/V in memory of this process only (``map_memory``)."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, lock: bool = False) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._memory = map_memory(
            layout.block_bytes * num_blocks, option="--kv-cache-memory", lock=lock
        )
        # [num_blocks, block_elements]
        self.data: npt.NDArray[np.generic] = np.frombuffer(
            self._memory, dtype=STORAGE[layout.dtype]
        ).reshape(num_blocks, layout.block_elements)

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, writable."""
        start = block_id * self.layout.block_bytes
        return memoryview(self._memory)[start : start + self.layout.block_bytes]

    def parts(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Views of one layer's K and V in all blocks, as stored, without scales.

        K ``[num_blocks, num_kv_heads, block_size/16, 16, ...]`` and V ``[num_blocks, num_kv_heads,
        block_size/n, n, ...]`` for a token's block, two parts of its offset, and its elements.
        """
        lay = self.layout
        parts = self.data.reshape(self.num_blocks, lay.num_layers, 2, lay.part_elements)
        k, v = parts[:, layer, 0], parts[:, layer, 1]
        heads, panels, dim = lay.num_kv_heads, lay.block_size // PANEL, lay.head_dim
        if lay.dtype == "int16":
            k = _split(k, heads, panels, dim // 2, PANEL, 2).swapaxes(3, 4)
            return k, _split(v, heads, lay.block_size // 2, dim, 2).swapaxes(3, 4)
        k = _split(k, heads, panels, dim, PANEL).swapaxes(3, 4)
        return k, _split(v, heads, lay.block_size, 1, dim)

    def scales(self, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Views of one layer's scales of K and V, ``[num_blocks, num_kv_heads, block_size]``."""
        lay = self.layout
        parts = self.data.reshape(self.num_blocks, lay.num_layers, 2, lay.part_elements)
        count = 2 * lay.num_kv_heads * lay.block_size
        k, v = (
            parts[:, layer, part, -count:]
            .view(np.float32)
            .reshape(-1, lay.num_kv_heads, lay.block_size)
            for part in (0, 1)
        )
        return k, v


def _split(part: npt.NDArray[Any], *shape: int) -> npt.NDArray[Any]:
    """``part`` [num_blocks, elements] as a view [num_blocks, *shape]."""
    item = part.itemsize
    strides = [item * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return np.lib.stride_tricks.as_strided(part, (len(part), *shape), (part.strides[0], *strides))
