"""Gemma 3 and GPT-OSS: both formats of a model are one model; what we lack is refused."""

from __future__ import annotations

import json
import logging
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.models.registry import load_model
from anaphora.ops.native import NativeOps
from anaphora.ops.quant import MXFP4
from tests.models.families import (
    GEMMA3,
    GEMMA3_VARIANTS,
    GPT_OSS,
    GPT_OSS_VARIANTS,
    gemma3_tensors,
    gpt_oss_tensors,
    write_family,
)

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(path, config):
    """As llama.cpp's converter writes these two architectures."""
    is_gemma = config["model_type"] == "gemma3_text"
    arch = "gemma3" if is_gemma else "gpt-oss"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling")
    if scaling:
        writer.add_string(f"{arch}.rope.scaling.type", scaling["rope_type"])
        writer.add_float32(f"{arch}.rope.scaling.factor", scaling["factor"])
    if is_gemma:
        pattern = config["sliding_window_pattern"]
        writer.add_uint32(f"{arch}.attention.sliding_window_pattern", pattern)
        if cap := config.get("final_logit_softcapping"):
            writer.add_float32(f"{arch}.final_logit_softcapping", cap)
        tensors = gemma_tensors(config)
    else:
        length = scaling["original_max_position_embeddings"]
        writer.add_uint32(f"{arch}.rope.scaling.original_context_length", length)
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        tensors = oss_tensors(config)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType.MXFP4 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name):
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    stem, ending = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{ending}"


def gemma_tensors(config):
    return {
        gguf_name(name): array + np.float32(1) if name.endswith("norm.weight") else array
        for name, array in gemma3_tensors(config).items()
    }


def oss_tensors(config):
    result = {}
    tensors = gpt_oss_tensors(config)
    for name, array in tensors.items():
        if ".experts." not in name:
            result[gguf_name(name)] = array
            continue
        layer = name.split(".")[2]
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        if "down_proj" in name:
            parts = {"down": slice(None)}
        for part, rows in parts.items():
            target = f"blk.{layer}.ffn_{part}_exps."
            if name.endswith("_bias"):
                result[target + "bias"] = np.ascontiguousarray(array[:, rows])
            elif name.endswith("_blocks"):
                scales = tensors[name.replace("_blocks", "_scales")]
                result[target + "weight"] = ggml_mxfp4(array[:, rows], scales[:, rows])
            elif not name.endswith("_scales"):  # [experts, in, out]
                stack = array.swapaxes(1, 2)[:, rows]
                result[target + "weight"] = np.ascontiguousarray(stack)
    return result


def ggml_mxfp4(blocks, scales):
    """Bytes as ggml has them: the exponent, then element i beside element i + 16."""
    elements = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = elements[..., :16] | elements[..., 16:] << 4
    both = np.concatenate([scales[..., None], packed], axis=-1)
    return np.ascontiguousarray(both.reshape(*scales.shape[:2], -1))


@pytest.mark.parametrize(
    "config",
    [
        *(GEMMA3, GEMMA3_VARIANTS["scaled-capped"]),
        *(GPT_OSS_VARIANTS["mxfp4"], GPT_OSS_VARIANTS["bfloat16-experts"]),
    ],
    ids=["gemma3", "gemma3-capped", "mxfp4", "bfloat16-experts"],
)
def test_both_formats_of_one_model_are_one_model(tmp_path, config):
    # What GGUF has no fields for is as in the published models.
    if config["model_type"] == "gpt_oss":
        config = config | {"swiglu_limit": 7.0}
    else:
        config = config | {"query_pre_attn_scalar": config["head_dim"]}
    with (
        open_checkpoint(write_family(tmp_path / "hf", config)) as one,
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config)) as other,
    ):
        assert one.config == other.config
        assert set(one.tensor_names) == set(other.tensor_names)
        assert one.num_parameters == other.num_parameters
        for name in one.tensor_names:
            shape = one.shape(name)
            assert other.shape(name) == shape
            if len(shape) < 3:
                np.testing.assert_array_equal(one.read(name), other.read(name), err_msg=name)
                continue
            for index in range(shape[0]):
                a, b = (c.read_expert(name, index, shape) for c in (one, other))
                assert type(a) is type(b)
                if isinstance(a, MXFP4):
                    np.testing.assert_array_equal(a.blocks, b.blocks)
                    np.testing.assert_array_equal(a.exponents, b.exponents)
                else:
                    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_checkpoint_with_images(tmp_path, caplog, prefix):
    """What is skipped is named; the text model is the same as alone."""
    tensors = {name.replace("model.", prefix, 1): array for name, array in gemma3_tensors().items()}
    tensors["model.vision_tower.embeddings.weight"] = np.ones((2, 2), np.float32)
    tensors["model.multi_modal_projector.weight"] = np.ones((2, 2), np.float32)
    (tmp_path / "both").mkdir()
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    text = {k: v for k, v in GEMMA3.items() if k not in ("architectures", "eos_token_id")}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "both" / "config.json").write_text(json.dumps(config))
    with (
        caplog.at_level(logging.INFO, "anaphora"),
        open_checkpoint(tmp_path / "both") as both,
        open_checkpoint(write_family(tmp_path / "text", GEMMA3)) as alone,
    ):
        assert both.config.eos_token_ids == (1, 106)
        assert both.config.hidden_size == alone.config.hidden_size
        assert both.tensor_names == alone.tensor_names
        name = "model.layers.3.self_attn.q_norm.weight"
        np.testing.assert_array_equal(both.read(name), alone.read(name))
    assert "multi_modal_projector (1 tensors), vision_tower (1 tensors)" in caplog.text


@pytest.mark.parametrize(
    ("base", "field", "value", "message"),
    [
        (GEMMA3, "use_bidirectional_attention", True, "use_bidirectional_attention is True"),
        (GEMMA3, "hidden_activation", "relu", "hidden_activation is 'relu'"),
        (GEMMA3, "attention_bias", True, "attention_bias is True"),
        (GEMMA3, "quantization_config", {"bits": 4}, "quantization_config is"),
        (GEMMA3, "rope_scaling", {"rope_type": "dynamic"}, "rope_scaling.rope_type is 'dynamic'"),
        (GEMMA3, "layer_types", ["linear_attention"] * 5, "layer_types is 'linear_attention'"),
        (GPT_OSS, "tie_word_embeddings", True, "tie_word_embeddings is True"),
        (GPT_OSS, "attention_bias", False, "attention_bias is False"),
        (GPT_OSS, "quantization_config", {"quant_method": "awq"}, "quant_method is 'awq'"),
        (GPT_OSS, "hidden_act", "gelu", "hidden_act is 'gelu'"),
        (GPT_OSS, "model_type", "gpt_oss_2", "model_type is 'gpt_oss_2'; supported are"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path, base, field, value, message):
    path = write_family(tmp_path, base)
    (path / "config.json").write_text(json.dumps(base | {field: value}))
    with pytest.raises(UnsupportedModel, match=message.replace(".", r"\.")):
        open_checkpoint(path)


def test_contradictions_are_named(tmp_path):
    path = write_family(tmp_path, GEMMA3)
    wrong = GEMMA3 | {"layer_types": ["full_attention"]}
    (path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(CorruptCheckpoint, match="layer_types names 1 layers"):
        open_checkpoint(path)
    (path / "config.json").write_text(json.dumps(GEMMA3 | {"model_type": "llama"}))
    with pytest.raises(CorruptCheckpoint, match="model_type is 'llama'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("base", "field", "value", "message"),
    [
        (GPT_OSS, "num_experts_per_tok", 8, "8 experts for each token of 7"),
        (GPT_OSS, "num_hidden_layers", 2**31 - 1, "num_hidden_layers is 2147483647"),
        (GEMMA3, "layer_types", 5, "layer_types is 5; it must be a list of strings"),
        (GEMMA3, "layer_types", [["x"]], "it must be a list of strings"),
        (GEMMA3, "architectures", -1, "architectures is -1"),
        (GEMMA3, "rope_theta", 10**400, "it must be between"),
        (GEMMA3, "query_pre_attn_scalar", 1e-310, "it must be between"),
        (GEMMA3, "sliding_window", 0, "sliding_window is 0"),
        (GPT_OSS, "rope_theta", 1, "yarn with rope_theta 1"),
        (
            GPT_OSS,
            "rope_scaling",
            GPT_OSS["rope_scaling"] | {"beta_fast": 1e14},
            "yarn with rope_theta",
        ),
    ],
)
def test_values_without_meaning_are_named(tmp_path, base, field, value, message):
    path = write_family(tmp_path, base)
    (path / "config.json").write_text(json.dumps(base | {field: value}))
    with pytest.raises(CorruptCheckpoint, match=re.escape(message)):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias"]
)
def test_a_missing_bias_is_named(tmp_path, name):
    tensors = gpt_oss_tensors()
    path = write_family(tmp_path, GPT_OSS)
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, path / "model.safetensors")
    with open_checkpoint(path) as checkpoint, pytest.raises(CorruptCheckpoint, match=name):
        load_model(checkpoint, NativeOps("int8", 1))


def test_stacks_of_different_types_are_named(tmp_path):
    tensors = gpt_oss_tensors()
    name = "model.layers.0.mlp.experts.down_proj"
    path = write_family(tmp_path, GPT_OSS)
    floats = {name: np.zeros((7, 96, 64), np.float32)}
    save_file(tensors | floats, path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match="is there twice"):
        open_checkpoint(path)
    for part in ("blocks", "scales"):
        del tensors[f"{name}_{part}"]
    save_file(tensors | floats, path / "model.safetensors")
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedModel, match="different"):
        load_model(checkpoint, NativeOps("int8", 1))


def test_damaged_experts_are_named(tmp_path):
    tensors = gpt_oss_tensors()
    path = write_family(tmp_path, GPT_OSS)
    name = "model.layers.1.mlp.experts.down_proj"
    shape = (7, 64, 96)
    damaged = tensors | {f"{name}_scales": np.full((7, 64, 3), 255, np.uint8)}
    save_file(damaged, path / "model.safetensors")
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(CorruptCheckpoint, match=r"1\.mlp\.experts\.down_proj.*not finite"):
            checkpoint.read_expert(name, 3, shape)
        with pytest.raises(CorruptCheckpoint, match="has shape"):
            checkpoint.read_expert(name, 3, (7, 64, 64))
    save_file(
        tensors | {f"{name}_scales": np.zeros((7, 64, 2), np.uint8)}, path / "model.safetensors"
    )
    with pytest.raises(CorruptCheckpoint, match="do not fit together"):
        open_checkpoint(path)
    save_file(
        {k: v for k, v in tensors.items() if not k.endswith("_scales")}, path / "model.safetensors"
    )
    with pytest.raises(CorruptCheckpoint, match="do not fit together"):
        open_checkpoint(path)
    whole = tensors | {"model.norm.weight": np.zeros(64, np.uint8)}
    save_file(whole, path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has type U8"):
        open_checkpoint(path)
