"""The paged K/V store: the memory that blocks name."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap

import numpy as np
import numpy.typing as npt

from anaphora.config import format_size
from anaphora.errors import ConfigError

PANEL = 16  # keys that are scored side by side, as kPanel in csrc/kernels.h


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """How many bytes a block has and where its parts lie.

    A block is one contiguous run, all layers' K and V of ``block_size`` tokens::

        [num_layers][ K: [num_kv_heads][block_size/16][head_dim][16]
                      V: [num_kv_heads][block_size][head_dim]        ]
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float16" or "float32"

    @property
    def block_elements(self) -> int:
        """Numbers in a block."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_elements * np.dtype(self.dtype).itemsize


class KVStore:
    """``num_blocks`` blocks of K/V in memory of this process only.

    The pages are committed by the system when they are first written, and stay out of core dumps.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = layout.block_bytes * num_blocks
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{format_size(num_bytes)} for the K/V cache cannot be had ({error}); "
                "lower --kv-cache-memory (a bare number means GiB)"
            ) from None
        for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel may be built without it
                    self._memory.madvise(getattr(mmap, advice))
        # [num_blocks, block_elements]
        self.data: npt.NDArray[np.generic] = np.frombuffer(
            self._memory, dtype=layout.dtype
        ).reshape(num_blocks, layout.block_elements)

    def keys_and_values(self, block_id: int) -> tuple[npt.NDArray[np.float32], ...]:
        """One block's K and V as ``[num_layers, num_kv_heads, block_size, head_dim]`` copies."""
        lay = self.layout
        parts = self.data[block_id].reshape(lay.num_layers, 2, -1)
        panels = lay.block_size // PANEL
        keys = parts[:, 0].reshape(-1, lay.num_kv_heads, panels, lay.head_dim, PANEL)
        keys = keys.swapaxes(3, 4).reshape(-1, lay.num_kv_heads, lay.block_size, lay.head_dim)
        values = parts[:, 1].reshape(-1, lay.num_kv_heads, lay.block_size, lay.head_dim)
        return keys.astype(np.float32), values.astype(np.float32)
