"""How fast this machine could be at most, from its measured peaks and the model's sizes.

Attention is left out, so the limits are a little too high and never too low.
"""

from __future__ import annotations

import dataclasses

from anaphora.bench.workloads import Decode, Prefill, Workload
from anaphora.ops.native import Peaks
from anaphora.types import ModelInfo


@dataclasses.dataclass(frozen=True)
class Limits:
    """A model on a machine."""

    info: ModelInfo
    peaks: Peaks

    def throughput(self, workload: Workload) -> float | None:
        """Tokens per second that ``workload`` cannot exceed; None where nothing simple is known."""
        if isinstance(workload, Prefill):
            return workload.num_prompt_tokens / self._seconds(workload.num_prompt_tokens, 1)
        if isinstance(workload, Decode):
            num_streams = workload.num_streams
            return num_streams / self._seconds(num_streams, num_streams)
        return None

    def _seconds(self, num_tokens: int, num_logit_rows: int) -> float:
        """Of one step: to multiply all weights or to read them once, whichever takes longer."""
        num_products = (
            self.info.num_multiplied_weights * num_tokens
            + self.info.num_head_weights * num_logit_rows
        )
        is_int8 = self.info.dtype == "int8"
        peak = self.peaks.int8_ops_per_second if is_int8 else self.peaks.float_ops_per_second
        return max(
            2 * num_products / peak,
            self.info.step_weight_bytes / self.peaks.memory_bytes_per_second,
        )
