"""GGUF files, translated to Hugging Face's names and row order."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from anaphora.errors import CorruptCheckpoint, ModelError, UnsupportedModel
from anaphora.loaders.checkpoint import Checkpoint, Float32Array, check_tensor_names
from anaphora.loaders.fields import Fields
from anaphora.loaders.gguf_config import read_config, translate_names
from anaphora.loaders.gguf_header import TensorInfo, read_header
from anaphora.ops.quant import GROUP, MXFP4
from anaphora.text.chat import TemplateSource
from anaphora.text.tokenizer import Tokenizer
from anaphora.text.vocabulary import TokenType, Vocabulary


class GGUFCheckpoint(Checkpoint):
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._data = _map_file(path)
        try:
            header = read_header(self._data, path)
            config = read_config(header, path)
            self._tensors = translate_names(header, path)
            shapes = _expert_shapes(self._tensors, path)
            check_tensor_names(path, shapes, config)
        except BaseException:
            self._data.close()
            raise
        self._fields = header.fields
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
        if name.endswith("gate_up_proj_bias"):
            return np.concatenate([self._floats(part) for part in _gate_and_up(name)], axis=1)
        array = self._floats(name)
        if self.config.model_type != "llama":
            return array
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            return _restore_rows(array, self.config.num_attention_heads)
        if name.endswith(("k_proj.weight", "k_proj.bias")):
            return _restore_rows(array, self.config.num_key_value_heads)
        return array

    def _read_expert(self, name: str, index: int) -> Float32Array | MXFP4:
        if not name.endswith("gate_up_proj"):
            return self._expert_part(name, index)
        gate, up = (self._expert_part(part, index) for part in _gate_and_up(name))
        if isinstance(gate, MXFP4) and isinstance(up, MXFP4):
            blocks = np.concatenate([gate.blocks, up.blocks])
            return MXFP4(blocks, np.concatenate([gate.exponents, up.exponents]))
        if isinstance(gate, MXFP4) or isinstance(up, MXFP4):
            raise UnsupportedModel(f"{self.path}: gate and up of {name} are of different types")
        return np.concatenate([gate, up])

    def _expert_part(self, name: str, index: int) -> Float32Array | MXFP4:
        info = self._tensors[name]
        if info.kind != "MXFP4":
            return self._floats(name, index)
        raw = self._raw(info, index).reshape(info.shape[1], -1, 1 + GROUP // 2)
        # Elements i and i + 16 share a byte here, in MXFP4 neighbours do.
        elements = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], axis=-1)
        blocks = elements[..., ::2] | elements[..., 1::2] << 4
        return MXFP4(np.ascontiguousarray(blocks), np.ascontiguousarray(raw[..., 0]))

    def _raw(self, info: TensorInfo, index: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of the tensor, or of entry ``index`` along its first axis."""
        if index is None:
            return np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        size = info.num_bytes // info.shape[0]
        return np.frombuffer(self._data, np.uint8, size, info.offset + index * size)

    def _floats(self, name: str, index: int | None = None) -> Float32Array:
        info = self._tensors[name]
        shape = info.shape if index is None else info.shape[1:]
        kind = GGMLQuantizationType[info.kind]
        raw = self._raw(info, index).reshape(math.prod(shape[:-1]), -1)
        with np.errstate(all="ignore"):  # damaged scales; what comes of them is found in read()
            array = dequantize(raw, kind).reshape(shape)
        # A float32 tensor is a view of the file; others are new already and can be large.
        return np.array(array, np.float32, copy=info.kind == "F32")


def _gate_and_up(name: str) -> tuple[str, str]:
    return name.replace("gate_up", "gate"), name.replace("gate_up", "up")


def _expert_shapes(tensors: dict[str, TensorInfo], path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes with gate and up of a stack of experts as one tensor."""
    shapes = {name: info.shape for name, info in tensors.items()}
    for name in [n for n in shapes if ".experts.gate_proj" in n]:
        up = name.replace("gate_proj", "up_proj")
        if shapes.get(up) != shapes[name]:
            raise CorruptCheckpoint(f"{path}: {name} and {up} must have the same shape")
        count, rows, *rest = shapes.pop(name)
        del shapes[up]
        shapes[name.replace("gate_proj", "gate_up_proj")] = (count, 2 * rows, *rest)
    return shapes


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
