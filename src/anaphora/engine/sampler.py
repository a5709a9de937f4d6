"""Chooses a token from one sequence's logits.

Everything here works on one row and its own random stream, so a request gives the same tokens
alone and in a batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from anaphora.engine.grammar import Mask
from anaphora.engine.sequence import Sequence
from anaphora.errors import NoTokenLeft
from anaphora.ops.api import Array
from anaphora.types import SamplingParams, TokenLogprob

_MIN_TEMPERATURE = 1e-30  # below, float32 differences overflow; the best token is certain anyway
_THRESHOLDS = (1e-2, 1e-4, 0.0)  # of weights whose best is 1


def sample(
    logits: Array, seq: Sequence, eos_token_ids: frozenset[int], allowed: Mask | None = None
) -> int:
    """The next token of ``seq`` from its ``logits`` [vocab], of those that ``allowed`` has.

    Raises FloatingPointError on NaN, ``NoTokenLeft`` if nothing is allowed.
    """
    allowed = restrict(allowed, seq, len(logits))
    logits = adjust(logits, seq, eos_token_ids, allowed)
    best = int(np.argmax(logits))
    if allowed is not None and logits[best] == -np.inf:
        raise no_token_left(seq.params)
    if not np.isfinite(logits[best]):
        raise FloatingPointError(f"the model's logits have the maximum {logits[best]}")
    if seq.params.temperature == 0:
        return best
    token_ids, weights = candidates(logits, seq)
    cumulative = np.cumsum(weights, dtype=np.float64)
    drawn = np.searchsorted(cumulative, seq.rng.random() * cumulative[-1], side="right")
    return int(token_ids[min(int(drawn), len(token_ids) - 1)])


def restrict(allowed: Mask | None, seq: Sequence, vocab_size: int) -> Mask | None:
    """``allowed`` without what the request's lists of tokens shut out; None for all tokens."""
    p = seq.params
    if p.allowed_token_ids:
        listed = np.zeros(vocab_size, np.bool_)
        listed[[*p.allowed_token_ids]] = True
        allowed = listed if allowed is None else listed & allowed
    for *before, last in p.bad_token_ids:
        num_before = len(before)
        if num_before > seq.num_generated_tokens:
            continue
        if seq.token_ids[len(seq.token_ids) - num_before :] == before:
            if allowed is None:
                allowed = np.ones(vocab_size, np.bool_)
            allowed[last] = False
    return allowed


def no_token_left(params: SamplingParams) -> NoTokenLeft:
    """The error for a step in which nothing is allowed."""
    if params.constraint is not None:
        param = params.constraint.param
    else:
        param = "allowed_token_ids" if params.allowed_token_ids else "bad_words"
    return NoTokenLeft(
        f"{param} leaves no token that can come next, together with the request's other fields",
        param=param,
    )


def adjust(
    logits: Array, seq: Sequence, eos_token_ids: frozenset[int], allowed: Mask | None = None
) -> Array:
    """Logits after penalties, bias, ``min_tokens`` and mask; the argument itself stays as it is.

    The repetition penalty (Keskar et al., 2019) looks at prompt and output, frequency and presence
    penalties (OpenAI) at the output only. What is not ``allowed`` becomes minus infinity. Ends wait
    for ``min_tokens``, and for ``ignore_eos``, as long as something else is allowed.
    """
    p = seq.params
    is_too_short = seq.num_generated_tokens < p.min_tokens
    has_penalty = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
    if not (is_too_short or has_penalty or p.logit_bias or allowed is not None):
        return logits
    if is_too_short or has_penalty or p.logit_bias:
        logits = logits.copy()
    generated = np.fromiter(seq.token_counts, np.int64, len(seq.token_counts))
    if p.repetition_penalty != 1:
        seen = np.union1d(seq.prompt_vocabulary, generated)
        values = logits[seen]
        logits[seen] = np.where(
            values > 0, values / p.repetition_penalty, values * p.repetition_penalty
        )
    if p.frequency_penalty != 0 or p.presence_penalty != 0:
        counts = np.fromiter(seq.token_counts.values(), np.float32, len(generated))
        logits[generated] -= counts * np.float32(p.frequency_penalty) + np.float32(
            p.presence_penalty
        )
    for token_id, bias in p.logit_bias.items():
        logits[token_id] += np.float32(bias)
    ends = [*p.stop_token_ids] if is_too_short else []
    if is_too_short or (p.ignore_eos and seq.matcher is not None):
        ends += eos_token_ids
    if allowed is None:
        logits[ends] = -np.inf
        return logits
    if ends:
        without_ends = allowed.copy()
        without_ends[ends] = False
        allowed = without_ends if without_ends.any() else allowed
    return np.where(allowed, logits, np.float32(-np.inf))


def candidates(logits: Array, seq: Sequence) -> tuple[npt.NDArray[np.int64], Array]:
    """Token ids that may be drawn and their weights, after temperature, top-k, min-p and top-p."""
    p = seq.params
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best -inf
        weights = np.exp((logits - logits.max()) / np.float32(max(p.temperature, _MIN_TEMPERATURE)))
    token_ids = np.arange(len(weights))
    if 0 < p.top_k < len(weights):
        token_ids = _best(weights, p.top_k)
        weights = weights[token_ids]
    if p.min_p > 0:
        keep = np.flatnonzero(weights >= p.min_p)  # the best weight is 1
        token_ids, weights = token_ids[keep], weights[keep]
    if p.top_p < 1:
        keep = _nucleus(weights, p.top_p)
        token_ids, weights = token_ids[keep], weights[keep]
    return token_ids, weights


def _nucleus(weights: Array, top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest best tokens that together reach ``top_p`` (Holtzman et al., 2019).

    Only tokens above a threshold are sorted; it is lowered until they are enough.
    """
    target = top_p * weights.sum(dtype=np.float64)
    for threshold in _THRESHOLDS:
        indices = np.flatnonzero(weights >= threshold)
        order = indices[np.argsort(-weights[indices], kind="stable")]
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= target:
            break
    return order[: int(np.searchsorted(cumulative, target)) + 1]


def _best(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Indices of the ``count`` largest, best first, equal ones by index."""
    indices = np.arange(len(values))
    if count < len(values):
        threshold = np.partition(values, -count)[-count]
        indices = np.flatnonzero(values >= threshold)
    return indices[np.argsort(-values[indices], kind="stable")][:count]


def logprob(logits: Array, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of ``token_id`` under the model's own logits, before any adjustment."""
    wide = logits.astype(np.float64)
    shift = wide.max()
    logprobs = wide - (shift + np.log(np.exp(wide - shift).sum()))
    top = tuple((int(i), float(logprobs[i])) for i in _best(logprobs, num_top)) if num_top else ()
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
