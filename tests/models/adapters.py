"""Random PEFT LoRA directories, as save_pretrained writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)


def lora_config(targets=ALL, rank=8, **fields):
    """What LoraConfig.save_pretrained writes, of the fields that decide something."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.05,
        "init_lora_weights": True,
    } | fields


def module_shapes(config):
    """Module → (out, in) of a model's config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = heads * config["head_dim"], kv_heads * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{i}.{name}": shape for i in layers for name, shape in shapes.items()}


# What the goldens were made with: the arguments of write_adapter for the tiny model.
CASES = {
    "attention": {"targets": ATTENTION, "rank": 8, "seed": 1},
    "mlp": {"targets": MLP, "rank": 5, "seed": 2},
    "all": {"rank": 16, "seed": 3},
    "queries": {"targets": ("q_proj",), "rank": 1, "seed": 4},
    "stabilised": {"rank": 20, "seed": 5, "use_rslora": True, "lora_alpha": 8},
    "patterns": {
        "rank": 4,
        "seed": 6,
        "ranks": {".1.self_attn.k_proj": 17, "down_proj": 33, "0.mlp.up_proj": 9},
        "rank_pattern": {"1.self_attn.k_proj": 17, "down_proj": 33, "^model.*0.mlp.up_proj": 9},
        "alpha_pattern": {r".*\.self_attn\.(q|v)_proj": 3, "gate_proj": 40.0},
    },
    "some layers": {
        "targets": ("v_proj", "gate_proj"),
        "layers": (0, 2),
        "rank": 3,
        "seed": 7,
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "regex": {
        "targets": ("o_proj", "up_proj"),
        "layers": (1,),
        "rank": 6,
        "seed": 8,
        "target_modules": r".*layers\.1\..*(o_proj|up_proj)",
    },
    "excluded": {
        "targets": ("q_proj", "v_proj"),
        "layers": (1, 2),
        "rank": 2,
        "seed": 9,
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r"model\.layers\.0\..*",
    },
    "all-linear": {"rank": 7, "seed": 10, "target_modules": "all-linear"},
}


def lora_tensors(config, targets=ALL, rank=8, seed=0, size=1.0, layers=None, ranks=None):
    """Random matrices; ``size`` is about how much of the base's output they add before scaling.

    ``ranks``: end of a module's name → its rank.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (num_out, num_in) in module_shapes(config).items():
        if name.rpartition(".")[2] not in targets:
            continue
        if layers is not None and int(name.split(".")[2]) not in layers:
            continue
        own = [r for end, r in (ranks or {}).items() if name.endswith(end)]
        tensors |= _pair(rng, name, num_out, num_in, own[0] if own else rank, size)
    return tensors


def _pair(rng, name, num_out, num_in, rank, size):
    prefix = f"base_model.model.{name}"
    a = rng.standard_normal((rank, num_in)) / np.sqrt(num_in)
    b = size * rng.standard_normal((num_out, rank)) / np.sqrt(rank) / 2
    return {
        f"{prefix}.lora_A.weight": a.astype(np.float32),
        f"{prefix}.lora_B.weight": b.astype(np.float32),
    }


def write_adapter(
    path: Path,
    model_config,
    *,
    targets=ALL,
    rank=8,
    seed=0,
    size=1.0,
    layers=None,
    ranks=None,
    **fields,
):
    """An adapter's directory for the model with this config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = lora_config(targets, rank, **fields)
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = lora_tensors(model_config, targets, rank, seed, size, layers, ranks)
    save_file(tensors, path / "adapter_model.safetensors")
    return path
