"""What one forward pass reads beside the weights and the K/V store."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from anaphora.ops.lora import AdaptedRows

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

NO_SLOT = -1  # K and V of this token are in the store already and stay as they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A flat batch: T tokens of S sequences, one sequence's tokens side by side and in order.

    Any mix of prefill chunks and single decode tokens; no phase, no padding.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T] in the sequence, from 0
    seq_index: Int32  # [T] the token's row in block_tables
    slots: Int64  # [T] where its K and V go: block_id * block_size + offset, or NO_SLOT
    block_tables: Int32  # [S, max_blocks], unused entries 0
    logit_rows: Int32  # [R] the tokens whose logits are wanted
    adapters: AdaptedRows | None = None  # None if no row has one
    # The same two for each further table (KVLayout.places); of blocks that have passed out of the
    # window any entry will do.
    window_slots: tuple[Int64, ...] = ()
    window_tables: tuple[Int32, ...] = ()

    def table(self, index: int) -> tuple[Int64, Int32]:
        """Slots and block tables number ``index``; the first ones are 0."""
        if index == 0:
            return self.slots, self.block_tables
        return self.window_slots[index - 1], self.window_tables[index - 1]

    def __len__(self) -> int:
        return len(self.token_ids)
