"""The Llama architecture: Llama 2 and 3.x, SmolLM2 and others of that shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from anaphora.loaders.checkpoint import Checkpoint
from anaphora.loaders.packed import PackedWeights
from anaphora.models.config import ModelConfig
from anaphora.models.layers import rope_inverse_frequencies, rope_table
from anaphora.models.lora import AdapterPlace
from anaphora.ops.api import Array, Linear, Norm, Ops
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVStore

PackLinear = Callable[[Array, Array | None], Linear]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One layer's weights; what reads the same input is one matrix."""

    input_layernorm: Norm
    qkv_proj: Linear  # q | k | v rows
    o_proj: Linear
    post_attention_layernorm: Norm
    gate_up_proj: Linear  # gate | up rows
    down_proj: Linear


class Llama:
    """Weights and forward pass. Raises ``CorruptCheckpoint`` that names a bad tensor."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ops: Ops, packed: PackedWeights
    ) -> None:
        self.config = config
        self.ops = ops
        vocab_shape = (config.vocab_size, config.hidden_size)

        def read(name: str) -> Array:
            return checkpoint.read(name, vocab_shape)

        embedding = functools.cache(read)  # the head may be the same matrix
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.embed_tokens = packed.array(
            "embed_tokens", lambda: ops.pack_embedding(embedding("model.embed_tokens.weight"))
        )
        self.lm_head = packed.linear(
            "lm_head", lambda: ops.pack_linear(embedding(f"{head}.weight"))
        )
        embedding.cache_clear()  # the largest tensors: free them before the layers come
        self.adapter_places: list[AdapterPlace] = []
        self.layers = [
            self._load_layer(checkpoint, packed, i) for i in range(config.num_hidden_layers)
        ]
        self.norm = self._load_norm(checkpoint, packed, "model.norm")
        self.set_max_model_len(1)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepares the angles of so many positions; what is left of memory decides how many."""
        table = rope_table(rope_inverse_frequencies(self.config), max_model_len)
        self.rope = self.ops.load_rope(*table)

    def _load_norm(self, checkpoint: Checkpoint, packed: PackedWeights, name: str) -> Norm:
        shape = (self.config.hidden_size,)
        weight = packed.array(name, lambda: checkpoint.read(f"{name}.weight", shape))
        return self.ops.load_norm(weight, self.config.rms_norm_eps)

    def _add_place(
        self, in_features: int, parts: list[tuple[str, int]], *, is_gate_up: bool
    ) -> int:
        place = AdapterPlace(in_features, tuple(parts), is_gate_up)
        self.adapter_places.append(place)
        return len(self.adapter_places) - 1

    def _load_layer(
        self, checkpoint: Checkpoint, packed: PackedWeights, index: int
    ) -> DecoderLayer:
        c, ops = self.config, self.ops
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def linear(
            module: str, in_size: int, *parts: tuple[str, int], pack: PackLinear = ops.pack_linear
        ) -> Linear:
            names = [(f"{prefix}{module}.{name}", size) for name, size in parts]

            def make() -> Linear:
                weights = [checkpoint.read(f"{n}.weight", (size, in_size)) for n, size in names]
                has_bias = checkpoint.has(f"{names[0][0]}.bias")
                biases = [checkpoint.read(f"{n}.bias", (size,)) for n, size in names if has_bias]
                return pack(np.concatenate(weights), np.concatenate(biases) if biases else None)

            place = self._add_place(in_size, names, is_gate_up=pack == ops.pack_gate_up)
            return dataclasses.replace(packed.linear(names[0][0], make), place=place)

        def norm(name: str) -> Norm:
            return self._load_norm(checkpoint, packed, prefix + name)

        return DecoderLayer(
            input_layernorm=norm("input_layernorm"),
            qkv_proj=linear(
                "self_attn",
                c.hidden_size,
                ("q_proj", q_size),
                ("k_proj", kv_size),
                ("v_proj", kv_size),
            ),
            o_proj=linear("self_attn", q_size, ("o_proj", c.hidden_size)),
            post_attention_layernorm=norm("post_attention_layernorm"),
            gate_up_proj=linear(
                "mlp",
                c.hidden_size,
                ("gate_proj", c.intermediate_size),
                ("up_proj", c.intermediate_size),
                pack=ops.pack_gate_up,
            ),
            down_proj=linear("mlp", c.intermediate_size, ("down_proj", c.hidden_size)),
        )

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Runs the batch, writes its K/V to ``store``; logits [R, vocab] of its logit rows."""
        c, ops = self.config, self.ops
        num_tokens = len(batch)
        num_heads = c.num_attention_heads + 2 * c.num_key_value_heads
        scale = c.head_dim**-0.5
        hidden = ops.embed(self.embed_tokens, batch.token_ids)  # [T, hidden]
        # Every layer writes to the same memory.
        qkv = np.empty((num_tokens, num_heads, c.head_dim), np.float32)
        flat_qkv = qkv.reshape(num_tokens, -1)
        attended = np.empty((num_tokens, c.num_attention_heads * c.head_dim), np.float32)
        for index, layer in enumerate(self.layers):
            ops.linear(
                hidden,
                layer.qkv_proj,
                norm=layer.input_layernorm,
                out=flat_qkv,
                adapters=batch.adapters,
            )
            ops.rope_and_store(qkv, self.rope, store, index, batch)
            ops.attention(qkv, store, index, batch, scale=scale, out=attended)
            ops.linear(attended, layer.o_proj, add_to=hidden, adapters=batch.adapters)
            ops.gated_mlp(
                hidden,
                layer.gate_up_proj,
                layer.down_proj,
                norm=layer.post_attention_layernorm,
                add_to=hidden,
                adapters=batch.adapters,
            )
        return ops.linear(hidden[batch.logit_rows], self.lm_head, norm=self.norm)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return self.embed_tokens.nbytes + self.step_weight_bytes

    @property
    def num_multiplied_weights(self) -> int:
        """Weights that every token is multiplied with, without the head."""
        return sum(w.in_features * w.out_features for w in self._layer_linears())

    @property
    def num_head_weights(self) -> int:
        """Weights that a token is multiplied with when its logits are wanted."""
        return self.lm_head.in_features * self.lm_head.out_features

    @property
    def step_weight_bytes(self) -> int:
        """Memory of the weights that a step over one token reads: all but the embedding."""
        norms = [self.norm]
        for layer in self.layers:
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        linears = [self.lm_head, *self._layer_linears()]
        return sum(w.num_bytes for w in linears) + sum(norm.weight.nbytes for norm in norms)

    def _layer_linears(self) -> list[Linear]:
        return [
            linear
            for layer in self.layers
            for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        ]
