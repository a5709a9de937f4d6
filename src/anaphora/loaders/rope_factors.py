"""Llama 3's rotary scaling from the tensor ``rope_freqs.weight``.

Converters to GGUF do not write the parameters of config.json but what follows from them: one factor
for each frequency. We want the parameters back, so that both formats of a model are one model.

With t = L * frequency / 2 pi, the turns within the original context of length L:

    t > high       factor 1
    t < low        factor f
    else           1 / ((1 - s) / f + s),   s = (t - low) / (high - low)

Scaling L, low and high together changes nothing, so ``low`` can be taken as 1.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from anaphora.errors import UnsupportedModel
from anaphora.models.config import RopeScaling

_TOLERANCE = 1e-5  # of a float32 factor computed in float32


def llama3_factors(
    scaling: RopeScaling, rope_theta: float, num_factors: int
) -> npt.NDArray[np.float64]:
    """By what each of the ``num_factors`` rotary frequencies is divided, ``[num_factors]``."""
    frequency = rope_theta ** (-np.arange(num_factors) / num_factors)
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth), np.float64)


def recover_llama3(
    factors: npt.NDArray[np.float32], rope_theta: float, path: Path
) -> RopeScaling | None:
    """The parameters that give ``factors``, None when all are 1.

    Raises ``UnsupportedModel`` when no parameters of Llama 3's kind do.
    """
    if np.all(factors == 1):
        return None
    candidates: list[RopeScaling | None] = []
    if np.all(np.isfinite(factors)) and factors.min() > 0:
        factor = float(str(factors.max()))
        candidates.append(RopeScaling(rope_type="llama3", factor=factor))  # Llama 3.1, 3.2, 3.3
        candidates.append(_fit(factors.astype(np.float64), factor, rope_theta))
    for scaling in candidates:
        if scaling is not None:
            expected = llama3_factors(scaling, rope_theta, len(factors))
            if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
                return scaling
    raise UnsupportedModel(
        f"{path}: rope_freqs.weight is not Llama 3's rotary scaling; other kinds are not supported"
    )


def _fit(factors: npt.NDArray[np.float64], factor: float, rope_theta: float) -> RopeScaling | None:
    """``s`` is a line over the frequency; two points between the ends give it."""
    frequency = rope_theta ** (-np.arange(len(factors)) / len(factors))
    inner = np.flatnonzero((factors > 1) & (factors < factor))
    if factor <= 1 or len(inner) < 2:
        return None
    smooth = (1 / factors[inner] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(frequency[inner], smooth, 1)
    if slope <= 0 or offset >= 0:
        return None
    high = 1 - 1 / offset
    return RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=round(high, 3),
        original_max_position_embeddings=round(slope * 2 * math.pi * (high - 1)),
    )
