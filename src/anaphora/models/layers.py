"""Pieces that several architectures share."""

from __future__ import annotations

import math

import numpy as np

from anaphora.models.config import ModelConfig, RopeScaling
from anaphora.ops.api import Array


def rope_inverse_frequencies(config: ModelConfig) -> Array:
    """Angle per position of each pair, [head_dim / 2] (Su et al., 2021), stretched as configured.

    In float32 step by step, as transformers' ``modeling_rope_utils`` computes it.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / np.float32(scaling.factor)
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Array, scaling: RopeScaling) -> Array:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, between is blended."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    original = scaling.original_max_position_embeddings
    low = original / scaling.low_freq_factor
    high = original / scaling.high_freq_factor
    stretched = frequencies / np.float32(scaling.factor)
    smooth = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched + smooth * frequencies
    result = np.where(wavelengths > low, stretched, frequencies)
    between = (wavelengths <= low) & (wavelengths >= high)
    return np.where(between, blended, result).astype(np.float32)


def rope_table(inverse_frequencies: Array, num_positions: int) -> tuple[Array, Array]:
    """cos and sin of every position's angles, each [num_positions, head_dim / 2]."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies)
    return np.cos(angles), np.sin(angles)
