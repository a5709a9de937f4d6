"""The GPT-OSS architecture: a mixture of experts, attention sinks, every other layer windowed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from anaphora.errors import UnsupportedModel
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
    sinks: Array  # [heads]
    o_proj: Linear
    post_attention_layernorm: Norm
    router: Linear
    gate_up_proj: Linear  # stacks of experts; gate | up rows
    down_proj: Linear


class GptOss:
    """Weights and forward pass. Raises a ``ModelError`` that names a bad tensor.

    Experts stay in the four bits of their checkpoint beside int8; the router, which decides, is
    float32 always.
    """

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
        self.rope = self.ops.load_rope(*rope_table(self.config, max_model_len))

    def _load_layer(self, loader: LayerLoader, index: int, window: int) -> DecoderLayer:
        c = self.config
        prefix = f"model.layers.{index}."
        experts = f"{prefix}mlp.experts."
        gate_up = loader.experts(
            f"{experts}gate_up_proj", c.hidden_size, 2 * c.intermediate_size, is_gated=True
        )
        down = loader.experts(f"{experts}down_proj", c.intermediate_size, c.hidden_size)
        if gate_up.data.dtype != down.data.dtype:
            raise UnsupportedModel(
                f"{experts}gate_up_proj and down_proj are of different types; both must be MXFP4, "
                "or neither"
            )
        return DecoderLayer(
            window=window,
            input_layernorm=loader.norm(f"{prefix}input_layernorm"),
            qkv_proj=loader.qkv_proj(prefix),
            sinks=loader.vector(f"{prefix}self_attn.sinks", c.num_attention_heads),
            o_proj=loader.o_proj(prefix, has_bias=True),
            post_attention_layernorm=loader.norm(f"{prefix}post_attention_layernorm"),
            router=loader.linear(
                f"{prefix}mlp",
                c.hidden_size,
                ("router", c.num_local_experts),
                pack=functools.partial(self.ops.pack_linear, dtype="float32"),
                has_bias=True,
            ),
            gate_up_proj=gate_up,
            down_proj=down,
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
            ops.linear(hidden, layer.qkv_proj, norm=layer.input_layernorm, out=flat_qkv)
            ops.rope_and_store(qkv, self.rope, store, index, batch)
            ops.attention(
                qkv,
                store,
                index,
                batch,
                scale=scale,
                window=layer.window,
                sinks=layer.sinks,
                out=attended,
            )
            ops.linear(attended, layer.o_proj, add_to=hidden)
            normed = ops.rms_norm(hidden, layer.post_attention_layernorm)
            ops.experts(
                normed,
                ops.linear(normed, layer.router),
                layer.gate_up_proj,
                layer.down_proj,
                top_k=c.num_experts_per_tok,
                alpha=c.swiglu_alpha,
                limit=c.swiglu_limit,
                add_to=hidden,
            )
        return hidden

    def logits(self, hidden: Array) -> Array:
        """Logits [R, vocab] of so many hidden states."""
        return self.ops.linear(hidden, self.lm_head, norm=self.norm)
