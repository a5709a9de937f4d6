"""Tiny checkpoints: the same random weights written as GGUF and as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.text.tiny import GOLDEN, tiny_vocabulary

Float32Array = npt.NDArray[np.float32]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 800,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 256,
    "bos_token_id": 756,
    "eos_token_id": 757,
    "tie_word_embeddings": False,
}

_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors of ``config``."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or width // config["num_attention_heads"]
    q_size = config["num_attention_heads"] * dim
    kv_size = config["num_key_value_heads"] * dim
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], width)
    matrices = {"self_attn.q_proj": (q_size, width), "self_attn.k_proj": (kv_size, width)}
    matrices |= {"self_attn.v_proj": (kv_size, width), "self_attn.o_proj": (width, q_size)}
    matrices |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    matrices |= {"mlp.down_proj": (width, inner)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        result[prefix + "input_layernorm.weight"] = (width,)
        result[prefix + "post_attention_layernorm.weight"] = (width,)
        for name, shape in matrices.items():
            result[f"{prefix}{name}.weight"] = shape
            field = "attention_bias" if name.startswith("self_attn") else "mlp_bias"
            if config.get(field):
                result[f"{prefix}{name}.bias"] = shape[:1]
    return result


def random_weights(config: Mapping[str, Any]) -> dict[str, Float32Array]:
    """One array for each of ``shapes``."""
    generator = np.random.default_rng(7)
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(config).items()
    }


def write_directory(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, npt.NDArray[Any]],
    *,
    num_shards: int = 1,
) -> Path:
    """A Hugging Face directory with the tokenizer of tests/golden."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = {**GOLDEN["llama-bpe"]["tokenizer"]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": "hi {{ eos_token }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(options))
    names = sorted(weights)
    if num_shards == 1:
        save_file(dict(weights), path / "model.safetensors")
        return path
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def permute(array: Float32Array, num_heads: int) -> Float32Array:
    """What converters to GGUF do to the rows of q and k, written as they write it."""
    rows = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Float32Array],
    *,
    kind: str = "F32",
    extra: Mapping[str, Any] | None = None,
    rope_freqs: Float32Array | None = None,
    raw: Mapping[str, tuple[npt.NDArray[np.uint8], str]] | None = None,
) -> Path:
    """The same model as GGUF, its matrices of type ``kind``, with ``extra`` metadata.

    ``raw`` gives the bytes of tensors, by their Hugging Face names, and their type.
    """
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, config)
    for key, value in (extra or {}).items():
        _add_field(writer, key, value)
    for name, array in weights.items():
        target = gguf_name(name)
        if raw is not None and name in raw:
            writer.add_tensor(
                target, raw[name][0], raw_dtype=gguf.GGMLQuantizationType[raw[name][1]]
            )
            continue
        if "q_proj" in name:
            array = permute(array, config["num_attention_heads"])
        elif "k_proj" in name:
            array = permute(array, config["num_key_value_heads"])
        used = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(array), used)
        writer.add_tensor(target, data, raw_dtype=used)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    vocabulary = tiny_vocabulary("llama-bpe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([int(t) for t in vocabulary.types])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template("hi {{ eos_token }}")


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, ending = name.rsplit(".", 1)
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if stem in _TO_GGUF:
        return f"{_TO_GGUF[stem]}.{ending}"
    return f"blk.{layer}.{_TO_GGUF[part]}.{ending}"


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
