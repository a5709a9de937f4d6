"""A tiny random Llama with everything unusual switched on: biases, groups of three, odd sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}

TINY_VARIANTS = {
    "llama3-rope": TINY_CONFIG,
    "linear-rope": TINY_CONFIG
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": False},
    "tied": TINY_CONFIG | {"rope_scaling": None, "tie_word_embeddings": True, "mlp_bias": False},
    "wide-heads": TINY_CONFIG | {"head_dim": 40, "num_attention_heads": 4},
}


def tiny_tensors(config=TINY_CONFIG, seed=0):
    """Random weights, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    c = config
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    q, kv = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
    tensors = {}

    def normal(name, *shape):
        scale = 1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        tensors[name] = (rng.standard_normal(shape) * scale).astype(np.float32)

    normal("model.embed_tokens.weight", c["vocab_size"], hidden)
    if not c["tie_word_embeddings"]:
        normal("lm_head.weight", c["vocab_size"], hidden)
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            normal(f"{prefix}{name}.weight", *shape)
            has_bias = c["attention_bias"] if name.startswith("self") else c["mlp_bias"]
            if has_bias:
                normal(f"{prefix}{name}.bias", shape[0])
    return tensors


def write_tiny_llama(path: Path, config=TINY_CONFIG, seed=0) -> Path:
    """A Hugging Face directory (without a tokenizer: the engine needs none)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(config, seed), path / "model.safetensors")
    return path
