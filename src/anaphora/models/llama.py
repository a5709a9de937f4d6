"""The Llama architecture: Llama 2 and 3.x, SmolLM2 and others of that shape."""

from __future__ import annotations

import dataclasses

import numpy as np

from anaphora.loaders.checkpoint import Checkpoint
from anaphora.loaders.packed import PackedWeights
from anaphora.models.config import ModelConfig
from anaphora.models.layers import LayerLoader, rope_table
from anaphora.ops.api import Array, Linear, Norm, Ops
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVStore


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
        loader = LayerLoader(config, checkpoint, ops, packed)
        self.embed_tokens, self.lm_head = loader.embedding_and_head()
        self.layers = [self._load_layer(loader, i) for i in range(config.num_hidden_layers)]
        self.norm = loader.norm("model.norm")
        self.adapter_places = loader.adapter_places
        self.sizes = loader.sizes()
        self.set_max_model_len(1)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepares the angles of so many positions; what is left of memory decides how many."""
        self.rope = self.ops.load_rope(*rope_table(self.config, max_model_len))

    def _load_layer(self, loader: LayerLoader, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        return DecoderLayer(
            input_layernorm=loader.norm(f"{prefix}input_layernorm"),
            qkv_proj=loader.qkv_proj(prefix),
            o_proj=loader.o_proj(prefix),
            post_attention_layernorm=loader.norm(f"{prefix}post_attention_layernorm"),
            gate_up_proj=loader.gate_up_proj(prefix),
            down_proj=loader.down_proj(prefix),
        )

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Runs the batch, writes its K/V to ``store``; hidden states [T, hidden]."""
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
        return hidden

    def logits(self, hidden: Array) -> Array:
        """Logits [R, vocab] of so many hidden states."""
        return self.ops.linear(hidden, self.lm_head, norm=self.norm)
