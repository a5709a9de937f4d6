"""The Gemma 3 architecture, text part: norms before and after, local layers with a window."""

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

    window: int  # tokens that it sees; 0 for all
    input_layernorm: Norm
    qkv_proj: Linear  # q | k | v rows
    q_norm: Norm  # of each head
    k_norm: Norm
    o_proj: Linear
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    gate_up_proj: Linear  # gate | up rows
    down_proj: Linear
    post_feedforward_layernorm: Norm


class Gemma3:
    """Weights and forward pass. Raises ``CorruptCheckpoint`` that names a bad tensor."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, ops: Ops, packed: PackedWeights
    ) -> None:
        self.config = config
        self.ops = ops
        loader = LayerLoader(config, checkpoint, ops, packed)
        self.embed_tokens, self.lm_head = loader.embedding_and_head()
        self.layers = [
            self._load_layer(loader, index, window)
            for index, window in enumerate(config.layer_windows)
        ]
        self.norm = loader.norm("model.norm")
        self.sizes = loader.sizes()
        self.set_max_model_len(1)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepares the angles of so many positions; what is left of memory decides how many."""
        c = self.config
        local = dataclasses.replace(c, rope_theta=c.rope_local_base_freq, rope_scaling=None)
        self.rope, self.local_rope = (
            self.ops.load_rope(*rope_table(config, max_model_len)) for config in (c, local)
        )

    def _load_layer(self, loader: LayerLoader, index: int, window: int) -> DecoderLayer:
        c = self.config
        prefix = f"model.layers.{index}."
        return DecoderLayer(
            window=window,
            input_layernorm=loader.norm(f"{prefix}input_layernorm"),
            qkv_proj=loader.qkv_proj(prefix),
            q_norm=loader.norm(f"{prefix}self_attn.q_norm", c.head_dim),
            k_norm=loader.norm(f"{prefix}self_attn.k_norm", c.head_dim),
            o_proj=loader.o_proj(prefix),
            post_attention_layernorm=loader.norm(f"{prefix}post_attention_layernorm"),
            pre_feedforward_layernorm=loader.norm(f"{prefix}pre_feedforward_layernorm"),
            gate_up_proj=loader.gate_up_proj(prefix),
            down_proj=loader.down_proj(prefix),
            post_feedforward_layernorm=loader.norm(f"{prefix}post_feedforward_layernorm"),
        )

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Runs the batch, writes its K/V to ``store``; hidden states [T, hidden]."""
        c, ops = self.config, self.ops
        num_tokens = len(batch)
        num_heads = c.num_attention_heads + 2 * c.num_key_value_heads
        scale = c.query_pre_attn_scalar**-0.5
        hidden = ops.embed(self.embed_tokens, batch.token_ids)  # [T, hidden]
        hidden *= np.float32(c.hidden_size**0.5)
        # Every layer writes to the same memory.
        qkv = np.empty((num_tokens, num_heads, c.head_dim), np.float32)
        flat_qkv = qkv.reshape(num_tokens, -1)
        attended = np.empty((num_tokens, c.num_attention_heads * c.head_dim), np.float32)
        for index, layer in enumerate(self.layers):
            ops.linear(hidden, layer.qkv_proj, norm=layer.input_layernorm, out=flat_qkv)
            ops.rope_and_store(
                qkv,
                self.local_rope if layer.window else self.rope,
                store,
                index,
                batch,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
            )
            ops.attention(
                qkv,
                store,
                index,
                batch,
                scale=scale,
                window=layer.window,
                softcap=c.attn_logit_softcapping,
                out=attended,
            )
            projected = ops.linear(attended, layer.o_proj)
            hidden += ops.rms_norm(projected, layer.post_attention_layernorm)
            projected = ops.gated_mlp(
                hidden,
                layer.gate_up_proj,
                layer.down_proj,
                norm=layer.pre_feedforward_layernorm,
                gate="gelu_tanh",
            )
            hidden += ops.rms_norm(projected, layer.post_feedforward_layernorm)
        return hidden

    def logits(self, hidden: Array) -> Array:
        """Logits [R, vocab] of so many hidden states."""
        logits = self.ops.linear(hidden, self.lm_head, norm=self.norm)
        if cap := np.float32(self.config.final_logit_softcapping):
            logits = cap * np.tanh(logits / cap)
        return logits
