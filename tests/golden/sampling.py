"""What the golden script and the tests must agree on."""

from __future__ import annotations

import numpy as np

NUM_SAMPLED_LOGITS = 64


def sample_vocabulary(vocab_size: int) -> np.ndarray:
    """The token ids whose logits are kept: enough to see any error, few enough to store."""
    return np.sort(np.random.default_rng(11).choice(vocab_size, NUM_SAMPLED_LOGITS, replace=False))
