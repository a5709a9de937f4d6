"""The numbers of the int8 mode: weights per output channel, activations per token.

An int8 product is a sum of K terms of at most 127 * qmax, and it must fit int32, so qmax, the
largest activation, is 2047 (12 bits) as long as K allows and less for longer rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WEIGHT_MAX = 127
ACTIVATION_MAX = 2047


def activation_max(in_features: int) -> int:
    """The largest quantised activation whose product over ``in_features`` cannot overflow."""
    return min(ACTIVATION_MAX, (2**31 - 1) // (in_features * WEIGHT_MAX))


def quantize_weight(
    weight: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """``weight`` [N, K] as int8 [N, K] and scales [N] with weight ~ int8 * scale."""
    largest = np.abs(weight).max(axis=1)
    scale = (largest / np.float32(WEIGHT_MAX)).astype(np.float32)
    inverse = np.divide(WEIGHT_MAX, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(weight * inverse[:, None]).astype(np.int8), scale
