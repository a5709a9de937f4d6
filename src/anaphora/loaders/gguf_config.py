"""GGUF's metadata and tensor names, one architecture after the other, in Hugging Face's terms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.loaders.fields import Fields, check_config, head_dim
from anaphora.loaders.gguf_header import Header, TensorInfo
from anaphora.loaders.hf_config import yarn_attention_factor
from anaphora.loaders.rope_factors import recover_llama3
from anaphora.models.config import LayerType, ModelConfig, RopeScaling
from anaphora.text.vocabulary import turn_ends

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROPE_FREQS = "rope_freqs.weight"
_GEMMA3_27B_LAYERS = 62


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How the files of one ``general.architecture`` are read."""

    model_type: str
    layer_names: Mapping[str, str]
    read: Callable[[Header, Fields], ModelConfig]


def read_config(header: Header, path: Path) -> ModelConfig:
    """The configuration. Raises ``CorruptCheckpoint`` or ``UnsupportedModel`` naming the field."""
    name = header.fields.get("general.architecture")
    architecture = _ARCHITECTURES.get(str(name))
    if architecture is None:
        raise UnsupportedModel(
            f"{path}: general.architecture is {name!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    fields = Fields(header.fields, path, f"{name}.")
    _refuse_common(fields)
    config = dataclasses.replace(
        architecture.read(header, fields),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=Fields(header.fields, path).token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(Fields(header.fields, path)),
    )
    return check_config(config, path)


def translate_names(header: Header, path: Path) -> dict[str, TensorInfo]:
    """Tensors by their Hugging Face names; those unknown to us keep GGUF's and are refused."""
    layer_names = _ARCHITECTURES[str(header.fields.get("general.architecture"))].layer_names
    translated: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        if name == _ROPE_FREQS:
            continue
        match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
        if match and match[2] in layer_names:
            target = f"model.layers.{int(match[1])}.{layer_names[match[2]]}"
            if match[2].endswith("_exps"):
                target += "_bias" if match[3] == "bias" else ""
            elif match[2] != "attn_sinks":
                target += f".{match[3]}"
        else:
            target = _TOP_NAMES.get(name, name)
        if target in translated:
            raise CorruptCheckpoint(f"{path} is damaged: the tensor {target} occurs twice")
        translated[target] = info
    return translated


def _llama(header: Header, fields: Fields) -> ModelConfig:
    for key in ("expert_count", "attention.sliding_window"):
        fields.refuse(key, 0)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(key, 0.0)
    config = _common("llama", header, fields, default_theta=10000.0)
    return dataclasses.replace(
        config,
        rope_scaling=_rope_scaling(header, fields, config.head_dim, config.rope_theta),
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
    )


def _gemma3(header: Header, fields: Fields) -> ModelConfig:
    fields.refuse("expert_count", 0)
    config = _common("gemma3", header, fields, default_theta=1e6)
    # Only the largest model scales queries by another number than the size of a head, and files do
    # not say it.
    is_27b = config.num_hidden_layers == _GEMMA3_27B_LAYERS
    per_head = config.hidden_size // config.num_attention_heads
    return dataclasses.replace(
        config,
        rope_scaling=_rope_scaling(header, fields, config.head_dim, config.rope_theta),
        rope_local_base_freq=_as_written(fields.number("rope.freq_base_swa", 10000.0)),
        layer_types=_layer_types(config, fields, 6),
        sliding_window=fields.size("attention.sliding_window"),
        query_pre_attn_scalar=float(per_head if is_27b else config.head_dim),
        final_logit_softcapping=_softcap(fields, "final_logit_softcapping"),
        attn_logit_softcapping=_softcap(fields, "attn_logit_softcapping"),
    )


def _gpt_oss(header: Header, fields: Fields) -> ModelConfig:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(key, 0.0)
    config = _common("gpt_oss", header, fields, default_theta=150000.0)
    intermediate_size = fields.get("expert_feed_forward_length")
    return dataclasses.replace(
        config,
        intermediate_size=intermediate_size or config.intermediate_size,
        rope_scaling=_yarn(fields),
        attention_bias=True,
        layer_types=_layer_types(config, fields, 2),
        sliding_window=fields.size("attention.sliding_window"),
        num_local_experts=fields.size("expert_count"),
        num_experts_per_tok=fields.size("expert_used_count"),
    )


_ARCHITECTURES = {
    "llama": Architecture(
        "llama", _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}, _llama
    ),
    "gemma3": Architecture(
        "gemma3",
        _ATTENTION
        | _MLP
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _ATTENTION
        | {
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_proj",
            "ffn_up_exps": "mlp.experts.up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
        _gpt_oss,
    ),
}


def _common(model_type: str, header: Header, fields: Fields, default_theta: float) -> ModelConfig:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptCheckpoint(f"{fields.path}: the matrix token_embd.weight is missing")
    hidden_size = fields.size("embedding_length")
    num_heads = fields.size("attention.head_count")
    dim = head_dim(fields, "attention.key_length", hidden_size, num_heads)
    fields.refuse("attention.value_length", dim)
    fields.refuse("rope.dimension_count", dim)
    return ModelConfig(
        model_type=model_type,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.size("feed_forward_length"),
        num_hidden_layers=fields.layers("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=dim,
        rms_norm_eps=_as_written(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=_as_written(fields.number("rope.freq_base", default_theta)),
        max_position_embeddings=fields.size("context_length"),
    )


def _refuse_common(fields: Fields) -> None:
    """Fields that change the result in a way that we do not implement."""
    fields.refuse("attention.clamp_kqv", 0)
    fields.refuse("attention.scale", 0.0)
    for key in ("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"):
        fields.refuse(key, 0.0, 1.0)
    fields.refuse("attention.causal", True)
    Fields(fields.values, fields.path).refuse("split.count", 0, 1)


def _softcap(fields: Fields, key: str) -> float:
    value = fields.get(key)
    return 0.0 if not value else _as_written(fields.number(key))


def _layer_types(config: ModelConfig, fields: Fields, pattern: int) -> tuple[LayerType, ...]:
    """Every ``pattern``-th layer sees everything; newer files list which layers do not."""
    listed = fields.get("attention.sliding_window_pattern")
    if isinstance(listed, list):
        if len(listed) != config.num_hidden_layers:
            raise fields.unsupported("attention.sliding_window_pattern", listed)
        is_sliding = [bool(item) for item in listed]
    else:
        pattern = fields.size("attention.sliding_window_pattern", pattern)
        is_sliding = [bool((i + 1) % pattern) for i in range(config.num_hidden_layers)]
    return tuple("sliding_attention" if kind else "full_attention" for kind in is_sliding)


def _yarn(fields: Fields) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind != "yarn":
        raise fields.unsupported("rope.scaling.type", kind, "; supported are 'yarn' and 'none'")
    factor = _as_written(fields.number("rope.scaling.factor"))
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=fields.size("rope.scaling.original_context_length"),
        beta_fast=_as_written(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_as_written(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        truncate=False,  # as in GPT-OSS's config.json; GGUF has no field for it
        attention_factor=yarn_attention_factor(factor),
    )


def _rope_scaling(
    header: Header, fields: Fields, dim: int, rope_theta: float
) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type")
    info = header.tensors.get(_ROPE_FREQS)
    if kind not in (None, "none", "linear"):
        raise fields.unsupported("rope.scaling.type", kind, "; supported are 'linear' and 'none'")
    if kind == "linear" and info is not None:
        raise fields.unsupported("rope.scaling.type", kind, f" beside the tensor {_ROPE_FREQS}")
    if kind == "linear":
        return RopeScaling(
            rope_type="linear", factor=_as_written(fields.number("rope.scaling.factor"))
        )
    if info is None:
        return None
    if info.kind != "F32" or info.shape != (dim // 2,):
        raise CorruptCheckpoint(
            f"{fields.path}: {_ROPE_FREQS} is {info.kind} of shape {info.shape}; it must be F32 of "
            f"shape {(dim // 2,)}"
        )
    with fields.path.open("rb") as file:
        file.seek(info.offset)
        factors = np.frombuffer(file.read(info.num_bytes), np.float32)
    return recover_llama3(factors, rope_theta, fields.path)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    found = [i for key in keys for i in fields.token_ids(f"tokenizer.ggml.{key}")]
    tokens = fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        found += turn_ends({text: i for i, text in enumerate(tokens) if isinstance(text, str)})
    return tuple(dict.fromkeys(found))


def _as_written(value: float) -> float:
    """The shortest decimal that rounds to this float32, as 1e-05 for 9.99999975e-06."""
    return float(str(np.float32(value)))
