"""Pieces that several architectures share."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora.loaders.checkpoint import Checkpoint
from anaphora.loaders.packed import PackedWeights
from anaphora.models.config import ModelConfig, RopeScaling
from anaphora.models.lora import AdapterPlace
from anaphora.ops.api import Array, Linear, Norm, Ops

PackLinear = Callable[[Array, Array | None], Linear]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What the engine and its measurements need to know of a model's weights."""

    weight_bytes: int  # memory of all weights
    step_weight_bytes: int  # of them, what a step over one token reads: not the embedding
    num_multiplied_weights: int  # that every token is multiplied with, without the head
    num_head_weights: int  # that a token is multiplied with when its logits are wanted


class LayerLoader:
    """Reads and packs weights by their names, and keeps count of them."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ops: Ops, packed: PackedWeights
    ) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self._ops = ops
        self._packed = packed
        self.adapter_places: list[AdapterPlace] = []  # of the linears, in their order
        self._linears: list[Linear] = []
        self._embedding_bytes = 0
        self._norm_bytes = 0  # and of other vectors
        self._head: Linear | None = None

    def embedding_and_head(self) -> tuple[npt.NDArray[Any], Linear]:
        """The table [vocab, hidden] and the matrix that gives logits."""
        c, ops = self.config, self._ops

        @functools.cache  # the head may be the same matrix
        def read(name: str) -> Array:
            return self._checkpoint.read(name, (c.vocab_size, c.hidden_size))

        head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
        table = self._packed.array(
            "embed_tokens", lambda: ops.pack_embedding(read("model.embed_tokens.weight"))
        )
        if not c.tie_word_embeddings:
            read.cache_clear()  # the largest tensors: not two in memory at once
        self._head = self._packed.linear("lm_head", lambda: ops.pack_linear(read(f"{head}.weight")))
        read.cache_clear()
        self._embedding_bytes += table.nbytes
        return table, self._head

    def norm(self, name: str, size: int | None = None) -> Norm:
        """The norm of ``size`` numbers, those of a hidden state if it is None."""
        shape = (size or self.config.hidden_size,)
        weight = self._packed.array(name, lambda: self._checkpoint.read(f"{name}.weight", shape))
        self._norm_bytes += weight.nbytes
        return self._ops.load_norm(weight, self.config.rms_norm_eps)

    def vector(self, name: str, size: int) -> Array:
        """A plain vector."""
        vector: Array = self._packed.array(name, lambda: self._checkpoint.read(name, (size,)))
        self._norm_bytes += vector.nbytes
        return vector

    def linear(
        self,
        module: str,
        in_size: int,
        *parts: tuple[str, int],
        pack: PackLinear | None = None,
        has_bias: bool = False,
    ) -> Linear:
        """The matrices ``parts`` of ``module``, by name and rows, as one with their biases.

        All of them have one, or none; ``has_bias``: they must.
        """
        names = [(f"{module}.{name}", size) for name, size in parts]
        read, has = self._checkpoint.read, self._checkpoint.has

        def make() -> Linear:
            weights = [read(f"{n}.weight", (size, in_size)) for n, size in names]
            are_there = has_bias or any(has(f"{n}.bias") for n, _ in names)
            biases = [read(f"{n}.bias", (size,)) for n, size in names if are_there]
            return (pack or self._ops.pack_linear)(
                np.concatenate(weights), np.concatenate(biases) if biases else None
            )

        place = AdapterPlace(in_size, tuple(names), pack == self._ops.pack_gate_up)
        self.adapter_places.append(place)
        linear = dataclasses.replace(
            self._packed.linear(names[0][0], make), place=len(self.adapter_places) - 1
        )
        self._linears.append(linear)
        return linear

    def qkv_proj(self, prefix: str) -> Linear:
        """q | k | v rows of the layer whose names begin with ``prefix``."""
        c = self.config
        kv_size = c.num_key_value_heads * c.head_dim
        parts = ("q_proj", c.num_attention_heads * c.head_dim), ("k_proj", kv_size)
        return self.linear(
            f"{prefix}self_attn",
            c.hidden_size,
            *parts,
            ("v_proj", kv_size),
            has_bias=c.attention_bias,
        )

    def o_proj(self, prefix: str, *, has_bias: bool = False) -> Linear:
        """From the heads back to the hidden state."""
        c = self.config
        size = c.num_attention_heads * c.head_dim
        part = ("o_proj", c.hidden_size)
        return self.linear(f"{prefix}self_attn", size, part, has_bias=has_bias)

    def gate_up_proj(self, prefix: str) -> Linear:
        """gate | up rows of the gated MLP."""
        c = self.config
        parts = ("gate_proj", c.intermediate_size), ("up_proj", c.intermediate_size)
        return self.linear(f"{prefix}mlp", c.hidden_size, *parts, pack=self._ops.pack_gate_up)

    def down_proj(self, prefix: str) -> Linear:
        """From the MLP back to the hidden state."""
        c = self.config
        return self.linear(f"{prefix}mlp", c.intermediate_size, ("down_proj", c.hidden_size))

    def experts(self, name: str, in_size: int, out_size: int, *, is_gated: bool = False) -> Linear:
        """The stack of experts' matrices ``name``, each [out, in], with their biases."""
        count = self.config.num_local_experts
        shape = (count, out_size, in_size)

        def make() -> Linear:
            return self._ops.pack_experts(
                count,
                lambda index: self._checkpoint.read_expert(name, index, shape),
                self._checkpoint.read(f"{name}_bias", (count, out_size)),
                is_gated=is_gated,
            )

        linear = self._packed.linear(name, make)
        self._linears.append(linear)
        return linear

    def sizes(self) -> ModelSizes:
        """Of all that was loaded."""
        assert self._head is not None
        # A token is multiplied with some of the experts only.
        active = self.config.num_experts_per_tok
        linears = [(w, active if w.count > 1 else 1) for w in self._linears]
        num_bytes = sum(w.num_bytes for w in self._linears) + self._head.num_bytes
        step_bytes = sum(w.num_bytes * used // w.count for w, used in linears)
        return ModelSizes(
            weight_bytes=num_bytes + self._norm_bytes + self._embedding_bytes,
            step_weight_bytes=step_bytes + self._head.num_bytes + self._norm_bytes,
            num_multiplied_weights=sum(w.in_features * w.out_features * n for w, n in linears),
            num_head_weights=self._head.in_features * self._head.out_features,
        )


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
    if scaling.rope_type == "yarn":
        return _yarn_frequencies(frequencies, scaling, config)
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


def _yarn_frequencies(frequencies: Array, scaling: RopeScaling, config: ModelConfig) -> Array:
    """YaRN (Peng et al., 2023): what turns often within the trained context stays as it is."""

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the trained context, as a fraction."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    span = high - low if high != low else 0.001
    pairs = np.arange(config.head_dim // 2, dtype=np.float32)
    kept = 1 - np.clip((pairs - np.float32(low)) / np.float32(span), 0, 1)
    stretched = frequencies / np.float32(scaling.factor)
    result: Array = stretched * (1 - kept) + frequencies * kept
    return result.astype(np.float32)


def rope_table(config: ModelConfig, num_positions: int) -> tuple[Array, Array]:
    """cos and sin of every position's angles, each [num_positions, head_dim / 2].

    Times the attention factor of YaRN, which makes queries and keys longer.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, rope_inverse_frequencies(config))
    factor = np.float32(config.rope_scaling.attention_factor if config.rope_scaling else 1)
    return np.cos(angles) * factor, np.sin(angles) * factor
