"""``config.json``, one architecture after the other. What we do not honour is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptCheckpoint
from anaphora.loaders.fields import Fields, check_config, head_dim
from anaphora.models.config import LayerType, ModelConfig, RopeScaling
from anaphora.text.tokenizer import read_json
from anaphora.text.vocabulary import turn_ends


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one ``architectures`` entry is read."""

    model_type: str  # as our models are called
    read: Callable[[Fields], ModelConfig]
    text_config: bool = False  # the text model is one of several, described in this field


def read_config(path: Path, tokenizer_config: dict[str, Any]) -> ModelConfig:
    """The configuration in the directory ``path``.

    Raises ``CorruptCheckpoint`` or ``UnsupportedModel`` naming the field.
    """
    file = path / "config.json"
    fields = Fields(read_json(file), file)
    architecture = _architecture(fields)
    generation_file = path / "generation_config.json"
    generation = Fields(read_json(generation_file, missing_ok=True), generation_file)
    eos = [*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id")]
    bos = fields.token_id("bos_token_id")
    if architecture.text_config:
        fields = fields.inner("text_config")
        eos += fields.token_ids("eos_token_id")
    config = architecture.read(fields)
    eos += _tokenizer_eos(tokenizer_config)
    config = dataclasses.replace(
        config,
        bos_token_id=fields.token_id("bos_token_id") if bos is None else bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
    return check_config(config, file)


def _architecture(fields: Fields) -> Architecture:
    """By ``architectures``, or by ``model_type`` where that field is missing."""
    names = fields.strings("architectures")
    for name in names:
        if name not in _ARCHITECTURES:
            hint = f"; supported are {', '.join(_ARCHITECTURES)}"
            raise fields.unsupported("architectures", name, hint)
    model_type = fields.get("model_type")
    if model_type is None and not names:
        raise CorruptCheckpoint(f"{fields.path}: required field model_type is missing")
    if model_type is not None and str(model_type) not in _MODEL_TYPES:
        hint = f"; supported are {', '.join(_MODEL_TYPES)}"
        raise fields.unsupported("model_type", model_type, hint)
    expected = _MODEL_TYPES.get(str(model_type))
    if expected is not None and names and names[0] != expected:
        raise CorruptCheckpoint(
            f"{fields.path}: architectures is {names[0]!r}, but model_type is {model_type!r}"
        )
    return _ARCHITECTURES[names[0] if names else str(expected)]


def _llama(fields: Fields) -> ModelConfig:
    _refuse_common(fields)
    fields.refuse("hidden_act", "silu")
    if fields.get("use_sliding_window") is not False:
        fields.refuse("sliding_window")
    for key in ("quantization_config", "num_local_experts", "attn_logit_softcapping"):
        fields.refuse(key)
    for kind in fields.strings("layer_types"):
        if kind != "full_attention":
            raise fields.unsupported("layer_types", kind, "; supported is 'full_attention'")
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    rope_theta, rope_scaling = _rope(fields)
    return ModelConfig(
        model_type="llama",
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.layers("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim(fields, "head_dim", hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=rope_theta,
        max_position_embeddings=fields.size("max_position_embeddings"),
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _gemma3(fields: Fields) -> ModelConfig:
    """Defaults are those of transformers' Gemma3TextConfig: published files rely on them."""
    _refuse_common(fields)
    for key in ("hidden_activation", "hidden_act"):
        fields.refuse(key, "gelu_pytorch_tanh")
    fields.refuse("use_bidirectional_attention", False)
    fields.refuse("attention_bias", False)
    fields.refuse("quantization_config")
    num_layers = fields.layers("num_hidden_layers", 26)
    theta, local_theta, scaling = _gemma3_rope(fields)
    head_dim = fields.size("head_dim", 256)
    return ModelConfig(
        model_type="gemma3",
        vocab_size=fields.size("vocab_size", 262208),
        hidden_size=fields.size("hidden_size", 2304),
        intermediate_size=fields.size("intermediate_size", 9216),
        num_hidden_layers=num_layers,
        num_attention_heads=fields.size("num_attention_heads", 8),
        num_key_value_heads=fields.size("num_key_value_heads", 4),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_local_base_freq=local_theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.size("max_position_embeddings", 131072),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        layer_types=_layer_types(fields, num_layers, fields.size("sliding_window_pattern", 6)),
        sliding_window=fields.size("sliding_window", 4096),
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 256),
        final_logit_softcapping=_softcap(fields, "final_logit_softcapping"),
        attn_logit_softcapping=_softcap(fields, "attn_logit_softcapping"),
    )


def _gpt_oss(fields: Fields) -> ModelConfig:
    """Defaults are those of transformers' GptOssConfig."""
    _refuse_common(fields)
    fields.refuse("hidden_act", "silu")
    fields.refuse("attention_bias", True)
    fields.refuse("tie_word_embeddings", False)
    fields.inner("quantization_config").refuse("quant_method", "mxfp4")
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_layers = fields.layers("num_hidden_layers")
    rope_theta, rope_scaling = _rope(fields, default_theta=150000.0)
    num_experts = fields.size("num_local_experts", fields.size("num_experts", 128))
    return ModelConfig(
        model_type="gpt_oss",
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim(fields, "head_dim", hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.size("max_position_embeddings", 131072),
        attention_bias=True,
        layer_types=_layer_types(fields, num_layers, 2),
        sliding_window=fields.size("sliding_window", 128),
        num_local_experts=num_experts,
        num_experts_per_tok=fields.size("num_experts_per_tok", 4),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )


_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _llama),
    "Gemma3ForCausalLM": Architecture("gemma3", _gemma3),
    "Gemma3ForConditionalGeneration": Architecture("gemma3", _gemma3, text_config=True),
    "GptOssForCausalLM": Architecture("gpt_oss", _gpt_oss),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
}


_LAYER_TYPES: dict[str, LayerType] = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
}


def _refuse_common(fields: Fields) -> None:
    fields.refuse("partial_rotary_factor", 1, 1.0)
    fields.refuse("rope_interleaved", False)


def _layer_types(fields: Fields, num_layers: int, pattern: int) -> tuple[LayerType, ...]:
    """From the list, or every ``pattern``-th layer sees everything."""
    kinds = fields.strings("layer_types")
    if not kinds:
        return tuple(
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(num_layers)
        )
    types: list[LayerType] = []
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            hint = f"; supported are {', '.join(map(repr, _LAYER_TYPES))}"
            raise fields.unsupported("layer_types", kind, hint)
        types.append(_LAYER_TYPES[kind])
    if len(kinds) != num_layers:
        raise CorruptCheckpoint(
            f"{fields.path}: layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{num_layers}"
        )
    return tuple(types)


def _softcap(fields: Fields, key: str) -> float:
    return 0.0 if fields.get(key) is None else fields.number(key)


def _rope(fields: Fields, default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` or the older two fields."""
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.inner(key)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    return theta, _rope_scaling(rope, fields)


def _gemma3_rope(fields: Fields) -> tuple[float, float, RopeScaling | None]:
    """Bases of full and sliding layers, and the scaling of the full ones."""
    nested = fields.inner("rope_parameters")
    if nested.get("full_attention") is None and nested.get("sliding_attention") is None:
        theta, scaling = _rope(fields, default_theta=1e6)
        return theta, fields.number("rope_local_base_freq", 10000.0), scaling
    full, local = nested.inner("full_attention"), nested.inner("sliding_attention")
    if _rope_scaling(local, fields) is not None:
        raise local.unsupported("rope_type", local.get("rope_type"), "; supported is 'default'")
    return (
        full.number("rope_theta", 1e6),
        local.number("rope_theta", 10000.0),
        _rope_scaling(full, fields),
    )


def _rope_scaling(rope: Fields, fields: Fields) -> RopeScaling | None:
    """What the object ``rope`` of the configuration ``fields`` says."""
    rope.refuse("partial_rotary_factor", 1, 1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            rope_type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.size("original_max_position_embeddings"),
        )
    if kind != "yarn":
        hint = "; supported are 'default', 'linear', 'llama3' and 'yarn'"
        raise rope.unsupported("rope_type", kind, hint)
    for key in ("mscale", "mscale_all_dim"):
        rope.refuse(key)
    factor = rope.number("factor")
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=rope.size(
            "original_max_position_embeddings", fields.size("max_position_embeddings")
        ),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", yarn_attention_factor(factor)),
    )


def yarn_attention_factor(factor: float) -> float:
    """What angles' cosine and sine are multiplied with (Peng et al., 2023, section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _tokenizer_eos(config: dict[str, Any]) -> list[int]:
    """The tokenizer's end token, which chat fine-tunes often change there and nowhere else, and
    the ends of turns that the other files may have forgotten."""
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return []
    ids = {
        entry["content"]: int(token_id)
        for token_id, entry in added.items()
        if isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and token_id.isdecimal()
    }
    return [*([ids[text]] if isinstance(text, str) and text in ids else []), *turn_ends(ids)]
