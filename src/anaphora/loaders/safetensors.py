"""Hugging Face directories: config.json beside safetensors files."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.loaders.checkpoint import Checkpoint, Float32Array, Shape, check_tensor_names
from anaphora.loaders.fields import Fields, check_config, head_dim
from anaphora.models.config import ModelConfig, RopeScaling
from anaphora.text.chat import TemplateSource, read_template
from anaphora.text.tokenizer import Tokenizer, read_json
from anaphora.text.vocabulary import turn_ends

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: Shape
    offset: int  # bytes from the file's start


class SafetensorsCheckpoint(Checkpoint):
    """A directory as ``save_pretrained`` writes it."""

    def __init__(self, path: Path) -> None:
        _find_weights(path)
        self._tokenizer_config = read_json(path / "tokenizer_config.json", missing_ok=True)
        config = _read_config(path, self._tokenizer_config)
        shards = _shard_files(path)
        self._tensors = _read_shards(path, shards)
        if config.tie_word_embeddings:
            self._tensors.pop(_HEAD, None)  # some files hold a copy, which is not used
        check_tensor_names(path, list(self._tensors), config.num_hidden_layers)
        super().__init__(
            path,
            path.resolve().name,
            config=config,
            shapes={name: info.shape for name, info in self._tensors.items()},
            files=[path / "config.json", *sorted(shards)],
        )

    def close(self) -> None:
        """Nothing to release: files are open only while a tensor is read."""

    def _build_tokenizer(self) -> Tokenizer:
        num_rows = self.shape("model.embed_tokens.weight")[0]
        if num_rows != self.config.vocab_size:  # before tables of that size are made
            raise CorruptCheckpoint(
                f"{self.path / 'config.json'}: vocab_size is {self.config.vocab_size}, but the "
                f"embedding has {num_rows} rows"
            )
        return Tokenizer.from_file(
            self.path / "tokenizer.json",
            config=self._tokenizer_config,
            vocab_size=self.config.vocab_size,
        )

    def _read_chat_template(self) -> TemplateSource | None:
        return read_template(self.path, self._tokenizer_config)

    def _read(self, name: str) -> Float32Array:
        info = self._tensors[name]
        dtype, count = _DTYPES[info.dtype], math.prod(info.shape)
        try:
            raw = np.fromfile(info.file, dtype, count, offset=info.offset)
        except OSError as error:
            raise CorruptCheckpoint(f"{info.file} cannot be read: {error}") from error
        if raw.size != count:
            raise CorruptCheckpoint(f"{info.file} is truncated in tensor {name}; fetch it again")
        if info.dtype == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(raw.reshape(info.shape), np.float32)


def _find_weights(path: Path) -> None:
    if (path / _SINGLE_FILE).is_file() or (path / _INDEX_FILE).is_file():
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise UnsupportedModel(
            f"{path} has weights in PyTorch's pickle format only, which can run code; convert them "
            "with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    if gguf := sorted(path.glob("*.gguf")):
        raise UnsupportedModel(f"{path} holds GGUF files; give the path of one, as {gguf[0]}")
    raise CorruptCheckpoint(f"{path} has no {_SINGLE_FILE} and no {_INDEX_FILE}")


def _shard_files(path: Path) -> dict[Path, set[str] | None]:
    """Each file with the tensors that the index expects in it, None for all."""
    index = path / _INDEX_FILE
    if (path / _SINGLE_FILE).is_file() and not index.is_file():
        return {path / _SINGLE_FILE: None}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpoint(f"{index} has no weight_map")
    shards: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        # Links are fine, the hub's cache is made of them; a path in the index is not.
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise CorruptCheckpoint(
                f"{index} names the file {name!r}; only plain names in .safetensors are valid"
            )
        expected = shards.setdefault(path / name, set())
        assert expected is not None
        expected.add(tensor)
    return shards


def _read_shards(path: Path, shards: dict[Path, set[str] | None]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for shard, expected in sorted(shards.items()):
        found = _read_shard(shard)
        missing = (expected or set()) - set(found)
        if missing:
            raise CorruptCheckpoint(
                f"{shard} lacks the tensor {min(missing)}, which {path / _INDEX_FILE} announces"
            )
        wanted = found if expected is None else {name: found[name] for name in expected}
        tensors |= {
            name: info for name, info in wanted.items() if "rotary_emb.inv_freq" not in name
        }
    return dict(sorted(tensors.items()))


def _read_shard(shard: Path) -> dict[str, _Tensor]:
    """Places of a file's tensors; the library checks the header against the file's size."""
    if shard.exists() and not shard.is_file():
        raise CorruptCheckpoint(f"{shard} is no regular file; fetch the model again")
    try:
        with safetensors.safe_open(shard, framework="np"):
            pass
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{shard} is missing; fetch the model again") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CorruptCheckpoint(
            f"{shard} is damaged or truncated ({error}); fetch it again"
        ) from error
    tensors: dict[str, _Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UnsupportedModel(
                f"{shard}: the tensor {name} has type {entry['dtype']}; supported are "
                f"{', '.join(_DTYPES)}"
            )
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = _Tensor(shard, entry["dtype"], tuple(entry["shape"]), offset)
    return tensors


def _read_config(path: Path, tokenizer_config: dict[str, Any]) -> ModelConfig:
    file = path / "config.json"
    fields = Fields(read_json(file), file)
    _refuse_variants(fields)
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    rope_theta, rope_scaling = _rope(fields)
    generation_file = path / "generation_config.json"
    generation = Fields(read_json(generation_file, missing_ok=True), generation_file)
    eos = [*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id")]
    eos += _tokenizer_eos(tokenizer_config)
    config = ModelConfig(
        model_type="llama",
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
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
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
    return check_config(config, file)


def _refuse_variants(fields: Fields) -> None:
    """Fields that change the result in a way that we do not implement."""
    fields.refuse("model_type", "llama")
    for name in fields.get("architectures") or ():
        if name != "LlamaForCausalLM":
            hint = "; supported is 'LlamaForCausalLM'"
            raise fields.unsupported("architectures", name, hint)
    if fields.get("model_type") is None and not fields.get("architectures"):
        raise CorruptCheckpoint(f"{fields.path}: required field model_type is missing")
    fields.refuse("hidden_act", "silu")
    if fields.get("use_sliding_window") is not False:
        fields.refuse("sliding_window")
    fields.refuse("partial_rotary_factor", 1, 1.0)
    fields.refuse("rope_interleaved", False)
    for key in ("quantization_config", "num_local_experts", "attn_logit_softcapping"):
        fields.refuse(key)
    for kind in fields.get("layer_types") or ():
        if kind != "full_attention":
            raise fields.unsupported("layer_types", kind, "; supported is 'full_attention'")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` or the older two fields."""
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    value = fields.get(key)
    if value is not None and not isinstance(value, dict):
        raise CorruptCheckpoint(f"{fields.path}: {key} is {value!r}; it must be an object")
    rope = Fields({f"{key}.{name}": item for name, item in (value or {}).items()}, fields.path)
    rope_theta = rope.number(f"{key}.rope_theta", fields.number("rope_theta", 10000.0))
    rope.refuse(f"{key}.partial_rotary_factor", 1, 1.0)
    kind = rope.get(f"{key}.rope_type") or rope.get(f"{key}.type") or "default"
    if kind == "default":
        return rope_theta, None
    if kind == "linear":
        factor = rope.number(f"{key}.factor")
        return rope_theta, RopeScaling(rope_type="linear", factor=factor)
    if kind != "llama3":
        hint = "; supported are 'default', 'linear' and 'llama3'"
        raise fields.unsupported(f"{key}.rope_type", kind, hint)
    return rope_theta, RopeScaling(
        rope_type="llama3",
        factor=rope.number(f"{key}.factor"),
        low_freq_factor=rope.number(f"{key}.low_freq_factor"),
        high_freq_factor=rope.number(f"{key}.high_freq_factor"),
        original_max_position_embeddings=rope.size(f"{key}.original_max_position_embeddings"),
    )


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
