"""Tiny random models of Gemma 3 and GPT-OSS, everything unusual of them switched on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 30,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA3_VARIANTS = {
    "plain": GEMMA3,
    "scaled-capped": GEMMA3
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 3.0,
    },
    "own-head": GEMMA3
    | {
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 4,
    },
}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "sliding_window": 9,
    "swiglu_limit": 1.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_VARIANTS = {
    "mxfp4": GPT_OSS,
    "truncated-rope": GPT_OSS
    | {"rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": True}, "num_experts_per_tok": 4},
    "bfloat16-experts": {k: v for k, v in GPT_OSS.items() if k != "quantization_config"},
}


class Random:
    """Draws tensors, scaled so that activations stay near 1."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, np.ndarray] = {}

    def matrix(self, name, *shape, scale=None):
        scale = scale or 1 / np.sqrt(shape[-1])
        self.tensors[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(self, name, size, around=1.0):
        values = self.rng.uniform(around - 0.5, around + 0.5, size)
        self.tensors[name] = values.astype(np.float32)

    def attention(self, prefix, c, bias):
        hidden = c["hidden_size"]
        q, kv = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
        for name, shape in {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }.items():
            self.matrix(f"{prefix}self_attn.{name}.weight", *shape)
            if bias:
                self.matrix(f"{prefix}self_attn.{name}.bias", shape[0], scale=0.1)


def gemma3_tensors(config=GEMMA3, seed=0):
    c, draw = config, Random(seed)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    # embeddings are multiplied by the root of their size
    draw.matrix("model.embed_tokens.weight", c["vocab_size"], hidden, scale=1 / np.sqrt(hidden))
    if c.get("tie_word_embeddings") is False:
        draw.matrix("lm_head.weight", c["vocab_size"], hidden)
    draw.norm("model.norm.weight", hidden, around=0)
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for kind in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            draw.norm(f"{prefix}{kind}_layernorm.weight", hidden, around=0)
        for kind in ("q", "k"):
            draw.norm(f"{prefix}self_attn.{kind}_norm.weight", c["head_dim"], around=0)
        draw.attention(prefix, c, bias=False)
        draw.matrix(f"{prefix}mlp.gate_proj.weight", inner, hidden)
        draw.matrix(f"{prefix}mlp.up_proj.weight", inner, hidden)
        draw.matrix(f"{prefix}mlp.down_proj.weight", hidden, inner)
    return draw.tensors


def gpt_oss_tensors(config=GPT_OSS, seed=0):
    """Blocks and scales of four-bit floats where the configuration says so, else floats."""
    c, draw = config, Random(seed)
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    draw.matrix("model.embed_tokens.weight", c["vocab_size"], hidden, scale=1.0)
    draw.matrix("lm_head.weight", c["vocab_size"], hidden)
    draw.norm("model.norm.weight", hidden)
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for kind in ("input", "post_attention"):
            draw.norm(f"{prefix}{kind}_layernorm.weight", hidden)
        draw.attention(prefix, c, bias=True)
        draw.matrix(f"{prefix}self_attn.sinks", c["num_attention_heads"], scale=1.0)
        draw.matrix(f"{prefix}mlp.router.weight", count, hidden)
        draw.matrix(f"{prefix}mlp.router.bias", count, scale=0.1)
        for name, rows, columns in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            stack = f"{prefix}mlp.experts.{name}"
            draw.matrix(f"{stack}_bias", count, rows, scale=0.1)
            if "quantization_config" not in c:
                draw.matrix(stack, count, columns, rows)
                continue
            shape = (count, rows, columns // 32, 16)
            draw.tensors[f"{stack}_blocks"] = draw.rng.integers(0, 256, shape, np.uint8)
            # a tenth, more or less: elements are 2.5 on average
            exponents = draw.rng.integers(121, 125, shape[:3], np.uint8)
            draw.tensors[f"{stack}_scales"] = exponents
    return draw.tensors


TENSORS = {"gemma3_text": gemma3_tensors, "gpt_oss": gpt_oss_tensors}


def write_family(path: Path, config, seed=0) -> Path:
    """A Hugging Face directory of either family (without a tokenizer: the engine needs none)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(TENSORS[config["model_type"]](config, seed), path / "model.safetensors")
    return path
