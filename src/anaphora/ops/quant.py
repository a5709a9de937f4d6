"""The numbers of the int8 mode: weights per output channel, activations per group of 32 inputs.

A group's products are summed in integers, exactly; one multiplication by the activations' scale
and one addition per group follow, groups in ascending order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

INT8_MAX = 127
GROUP = 32  # inputs of a row that share a scale, as kGroup in csrc/kernels.h
_ROWS = 4096  # of a weight that are rounded at a time
_SMALLEST = np.float32(1e-30)  # a group without a larger value is zero: 127 / x must stay finite


# Four-bit floats (E2M1) in halves: bit 3 is the sign.
FP4_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A matrix [N, K] of four-bit floats with a power of two for each 32 of a row (OCP MX, 2023).

    ``blocks`` [N, K / 32, 16] have element 2 i in the low half of byte i, 2 i + 1 in the high half;
    ``exponents`` [N, K / 32] are biased by 127.
    """

    blocks: npt.NDArray[np.uint8]
    exponents: npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return len(self.blocks), self.blocks.shape[1] * GROUP

    def halves(self) -> npt.NDArray[np.int8]:
        """The elements [N, K / 32, 32] as whole numbers of halves."""
        both = np.stack([self.blocks & 15, self.blocks >> 4], axis=-1)
        return FP4_HALVES[both.reshape(*self.exponents.shape, GROUP)]

    def scales(self) -> npt.NDArray[np.float32]:
        """What the halves are multiplied with, [N, K / 32]; exponents 0 and 1 count as zero."""
        shifted = np.maximum(self.exponents, 1) - np.uint8(1)
        return (shifted.astype(np.uint32) << 23).view(np.float32)

    def dequantized(self) -> npt.NDArray[np.float32]:
        """The matrix in float32."""
        values = self.halves() * self.scales()[..., None]
        return values.reshape(len(values), -1).astype(np.float32, copy=False)


def quantize_weight(
    weight: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """``weight`` [N, K] as int8 [N, K] and scales [N] with weight ~ int8 * scale."""
    quantized = np.empty(weight.shape, np.int8)
    scale = np.empty(len(weight), np.float32)
    for start in range(0, len(weight), _ROWS):  # a head can have 2 GB; not three times in memory
        rows = weight[start : start + _ROWS]
        largest = np.abs(rows).max(axis=1)
        scale[start : start + _ROWS] = largest / np.float32(INT8_MAX)
        inverse = np.divide(INT8_MAX, largest, out=np.zeros_like(largest), where=largest > 0)
        quantized[start : start + _ROWS] = np.rint(rows * inverse[:, None])
    return quantized, scale


def quantize_groups(
    x: npt.NDArray[np.float32], limit: int = INT8_MAX, group: int = GROUP
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """x [M, K], zero-padded, as whole numbers [M, G, group] within +-limit and scales [M, G].

    A group with an infinite or NaN value gets the scale NaN, so that the damage shows.
    """
    num_groups = -(-x.shape[1] // group)
    groups = np.zeros((len(x), num_groups * group), np.float32)
    groups[:, : x.shape[1]] = x
    groups = groups.reshape(len(x), num_groups, group)
    is_sound = np.asarray(np.isfinite(groups).all(axis=2))
    groups = np.where(is_sound[..., None], groups, np.float32(0))
    largest = np.abs(groups).max(axis=2)
    has_values = largest > _SMALLEST
    inverse = np.divide(np.float32(limit), largest, out=np.zeros_like(largest), where=has_values)
    scale = np.where(has_values, largest / np.float32(limit), np.float32(0))
    rounded = np.clip(np.rint(groups * inverse[..., None]), -limit, limit)
    return rounded, np.where(is_sound, scale, np.float32(np.nan))
