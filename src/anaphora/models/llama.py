"""The Llama architecture: Llama 2 and 3.x, SmolLM2 and others of that shape."""

from __future__ import annotations

import dataclasses

import numpy as np

from anaphora.loaders.checkpoint import Checkpoint
from anaphora.models.config import ModelConfig
from anaphora.models.layers import rope_inverse_frequencies, rope_table
from anaphora.ops.api import Array, Linear, Ops
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One layer's weights; what reads the same input is one matrix."""

    input_layernorm: Array
    qkv_proj: Linear  # q | k | v rows
    o_proj: Linear
    post_attention_layernorm: Array
    gate_up_proj: Linear  # gate | up rows
    down_proj: Linear


class Llama:
    """Weights and forward pass. Raises ``CorruptCheckpoint`` that names a bad tensor."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> None:
        self.config = config
        self.ops = ops
        vocab_shape = (config.vocab_size, config.hidden_size)
        embedding = checkpoint.read("model.embed_tokens.weight", vocab_shape)
        self.embed_tokens = ops.pack_embedding(embedding)
        head = embedding
        if not config.tie_word_embeddings:
            head = checkpoint.read("lm_head.weight", vocab_shape)
        self.lm_head = ops.pack_linear(head)
        del embedding, head  # the largest tensors: free them before the layers come
        self.layers = [self._load_layer(checkpoint, i) for i in range(config.num_hidden_layers)]
        self.norm = checkpoint.read("model.norm.weight", (config.hidden_size,))
        self.set_max_model_len(1)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepares the angles of so many positions; what is left of memory decides how many."""
        self.cos, self.sin = rope_table(rope_inverse_frequencies(self.config), max_model_len)

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> DecoderLayer:
        c = self.config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def linear(module: str, in_size: int, *parts: tuple[str, int]) -> Linear:
            names = [(f"{prefix}{module}.{name}", size) for name, size in parts]
            weights = [checkpoint.read(f"{name}.weight", (size, in_size)) for name, size in names]
            has_bias = checkpoint.has(f"{names[0][0]}.bias")
            biases = [checkpoint.read(f"{n}.bias", (size,)) for n, size in names if has_bias]
            return self.ops.pack_linear(
                np.concatenate(weights), np.concatenate(biases) if biases else None
            )

        def norm(name: str) -> Array:
            return checkpoint.read(f"{prefix}{name}.weight", (c.hidden_size,))

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
            ),
            down_proj=linear("mlp", c.intermediate_size, ("down_proj", c.hidden_size)),
        )

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Runs the batch, writes its K/V to ``store``; logits [R, vocab] of its logit rows."""
        ops, eps = self.ops, self.config.rms_norm_eps
        hidden = ops.embed(self.embed_tokens, batch.token_ids)  # [T, hidden]
        for index, layer in enumerate(self.layers):
            x = ops.rms_norm(hidden, layer.input_layernorm, eps)
            hidden += self._attention(index, layer, x, batch, store)
            x = ops.rms_norm(hidden, layer.post_attention_layernorm, eps)
            x = ops.silu_and_mul(ops.linear(x, layer.gate_up_proj))
            hidden += ops.linear(x, layer.down_proj)
        hidden = ops.rms_norm(hidden[batch.logit_rows], self.norm, eps)
        return ops.linear(hidden, self.lm_head)

    def _attention(
        self, index: int, layer: DecoderLayer, x: Array, batch: Batch, store: KVStore
    ) -> Array:
        c, ops = self.config, self.ops
        qkv = ops.linear(x, layer.qkv_proj).reshape(len(x), -1, c.head_dim)  # [T, q + k + v, dim]
        num_q, num_kv = c.num_attention_heads, c.num_key_value_heads
        ops.rope(qkv[:, : num_q + num_kv], batch.positions, self.cos, self.sin)
        ops.store_kv(store, index, qkv[:, num_q : num_q + num_kv], qkv[:, num_q + num_kv :], batch)
        out = ops.attention(qkv[:, :num_q], store, index, batch, c.head_dim**-0.5)
        return ops.linear(out, layer.o_proj)

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
        return sum(w.num_bytes for w in linears) + sum(norm.nbytes for norm in norms)

    def _layer_linears(self) -> list[Linear]:
        return [
            linear
            for layer in self.layers
            for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        ]
