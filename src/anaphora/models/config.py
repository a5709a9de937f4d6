"""What a checkpoint says about its model. Fields are named as in Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 8192  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3 only, as the next
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn only, as the next three
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One architecture's sizes and constants."""

    model_type: str  # also the name of the file in models/ that implements it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    # Layers that see only the last `sliding_window` tokens; () if all see everything.
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int = 0
    # Gemma 3
    rope_local_base_freq: float = 10000.0  # of the sliding layers, which are not stretched
    query_pre_attn_scalar: float = 0.0
    final_logit_softcapping: float = 0.0  # 0: none
    attn_logit_softcapping: float = 0.0
    # GPT-OSS
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Tokens that each layer sees, its own included; 0 for all."""
        if not self.layer_types:
            return (0,) * self.num_hidden_layers
        return tuple(
            self.sliding_window if kind == "sliding_attention" else 0 for kind in self.layer_types
        )
