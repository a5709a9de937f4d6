"""GGUF files of the Llama architecture, translated to Hugging Face's names and row order."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from anaphora.errors import CorruptCheckpoint, ModelError, UnsupportedModel
from anaphora.loaders.checkpoint import Checkpoint, Float32Array, check_tensor_names
from anaphora.loaders.fields import Fields, check_config, head_dim
from anaphora.loaders.gguf_header import Header, TensorInfo, read_header
from anaphora.loaders.rope_factors import recover_llama3
from anaphora.models.config import ModelConfig, RopeScaling
from anaphora.text.chat import TemplateSource
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType, Vocabulary, turn_ends

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._data = _map_file(path)
        try:
            header = read_header(self._data, path)
            config = _read_config(header, path)
            self._tensors = _translate_names(header, path)
            check_tensor_names(path, list(self._tensors), config.num_hidden_layers)
        except BaseException:
            self._data.close()
            raise
        self._fields = header.fields
        shapes = {name: info.shape for name, info in self._tensors.items()}
        super().__init__(path, path.stem, config=config, shapes=shapes, files=[path])

    def close(self) -> None:
        """Release the memory map; tensors cannot be read after it."""
        # An error's traceback can hold an array over the map, which then goes with the traceback.
        with contextlib.suppress(BufferError):
            self._data.close()

    def _build_tokenizer(self) -> Tokenizer:
        vocabulary = read_vocabulary(self._fields, self.path)
        try:
            return Tokenizer.from_vocabulary(vocabulary.padded(self.config.vocab_size))
        except ModelError as error:
            raise type(error)(f"{self.path}: {error}") from error

    def _read_chat_template(self) -> TemplateSource | None:
        prefix = "tokenizer.chat_template"
        named = {
            "default" if key == prefix else key[len(prefix) + 1 :]: value
            for key, value in self._fields.items()
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
        }
        return (named["default"] if set(named) == {"default"} else named) or None

    def _read(self, name: str) -> Float32Array:
        info = self._tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        kind = GGMLQuantizationType[info.kind]
        with np.errstate(all="ignore"):  # damaged scales; what comes of them is found in read()
            array = dequantize(raw.reshape(info.num_rows, -1), kind).reshape(info.shape)
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            return _restore_rows(array, self.config.num_attention_heads)
        if name.endswith(("k_proj.weight", "k_proj.bias")):
            return _restore_rows(array, self.config.num_key_value_heads)
        # A float32 tensor is a view of the file; others are new already and can be large.
        return np.array(array, np.float32, copy=info.kind == "F32")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CorruptCheckpoint(f"{path} is empty; fetch the file again") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error


def _restore_rows(array: Float32Array, num_heads: int) -> Float32Array:
    """Hugging Face's order of a head's rows: GGUF interleaves the two halves that rotate together.

    GGUF: 0 h/2 1 h/2+1 ...   Hugging Face: 0 1 ... h/2 h/2+1 ...
    """
    if array.shape[0] % (2 * num_heads):
        raise CorruptCheckpoint(f"{array.shape[0]} rows cannot be shared by {num_heads} heads")
    rows = array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2)
    return np.array(rows.reshape(array.shape), np.float32, order="C")


def _translate_names(header: Header, path: Path) -> dict[str, TensorInfo]:
    """Tensors by their Hugging Face names; those unknown to us keep GGUF's and are refused."""
    translated: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        if name == _ROPE_FREQS:
            continue
        match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
        if match and match[2] in _LAYER_NAMES:
            target = f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        else:
            target = _TOP_NAMES.get(name, name)
        if target in translated:
            raise CorruptCheckpoint(f"{path} is damaged: the tensor {target} occurs twice")
        translated[target] = info
    return translated


def _read_config(header: Header, path: Path) -> ModelConfig:
    architecture = header.fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{path}: general.architecture is {architecture!r}; supported is 'llama'"
        )
    fields = Fields(header.fields, path, "llama.")
    _refuse_variants(fields)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptCheckpoint(f"{path}: the matrix token_embd.weight is missing")
    hidden_size = fields.size("embedding_length")
    num_heads = fields.size("attention.head_count")
    dim = head_dim(fields, "attention.key_length", hidden_size, num_heads)
    fields.refuse("attention.value_length", dim)
    fields.refuse("rope.dimension_count", dim)
    rope_theta = _as_written(fields.number("rope.freq_base", 10000.0))
    config = ModelConfig(
        model_type="llama",
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.size("feed_forward_length"),
        num_hidden_layers=fields.size("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=dim,
        rms_norm_eps=_as_written(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=rope_theta,
        max_position_embeddings=fields.size("context_length"),
        rope_scaling=_rope_scaling(header, fields, dim, rope_theta),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        bos_token_id=Fields(header.fields, path).token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(Fields(header.fields, path)),
    )
    return check_config(config, path)


def _refuse_variants(fields: Fields) -> None:
    """Fields that change the result in a way that we do not implement."""
    for key in ("expert_count", "attention.sliding_window", "attention.clamp_kqv"):
        fields.refuse(key, 0)
    for key in ("attention.scale", "attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse(key, 0.0)
    for key in ("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"):
        fields.refuse(key, 0.0, 1.0)
    fields.refuse("attention.causal", True)
    Fields(fields.values, fields.path).refuse("split.count", 0, 1)


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


def read_vocabulary(metadata: dict[str, Any], path: Path) -> Vocabulary:
    """The tokenizer's tables from GGUF metadata.

    Raises ``UnsupportedModel`` for a tokenizer that is no BPE, ``CorruptCheckpoint`` naming a table
    that is missing or has wrong content.
    """
    fields = Fields(metadata, path, "tokenizer.ggml.")
    model = fields.get("model")
    if model not in ("gpt2", "llama"):
        hint = "; supported are 'gpt2', byte-level BPE, and 'llama', SentencePiece's"
        raise fields.unsupported("model", model, hint)
    tokens = _strings(fields, "tokens")
    kinds = fields.get("token_type")
    try:
        types = tuple(map(TokenType, kinds)) if kinds else (TokenType.NORMAL,) * len(tokens)
    except (TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: tokenizer.ggml.token_type: {error}") from error
    return Vocabulary(
        tokens=tuple(tokens),
        types=types,
        **(_joined_by_score(fields) if model == "llama" else _joined_by_merges(fields)),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_id=fields.token_id("eos_token_id"),
        unk_token_id=fields.token_id("unknown_token_id"),
        pad_token_id=fields.token_id("padding_token_id"),
        # Files of Llama 3 from before this field was written rely on it, as those of Llama 2 do.
        add_bos=fields.flag("add_bos_token", model == "llama" or fields.get("pre") == "llama-bpe"),
        add_eos=fields.flag("add_eos_token", False),
        add_space_prefix=fields.flag("add_space_prefix", model == "llama"),
    )


def _joined_by_merges(fields: Fields) -> dict[str, Any]:
    pre = fields.get("pre")
    if not isinstance(pre, str):
        raise UnsupportedModel(
            f"{fields.path}: tokenizer.ggml.pre is missing, so that how to split text is unknown; "
            "convert the model again with a newer converter"
        )
    merges = tuple(_split_merge(text, fields.path) for text in _strings(fields, "merges"))
    return {"pre_tokenizer": pre, "merges": merges}


def _joined_by_score(fields: Fields) -> dict[str, Any]:
    scores = fields.get("scores")
    if not isinstance(scores, list) or not all(isinstance(item, float) for item in scores):
        raise CorruptCheckpoint(f"{fields.path}: tokenizer.ggml.scores must be a list of numbers")
    return {
        "pre_tokenizer": "sentencepiece",
        "spelling": "sentencepiece",
        "merges": (),
        "scores": tuple(scores),
    }


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CorruptCheckpoint(f"{fields.path}: {fields.prefix}{key} must be a list of strings")
    return value


def _split_merge(text: str, path: Path) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise CorruptCheckpoint(f"{path}: the merge {text!r} is not a pair of tokens")
    return left, right
