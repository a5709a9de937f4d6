"""Hugging Face directories: config.json beside safetensors files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.loaders.checkpoint import Checkpoint, Float32Array, Shape, check_tensor_names
from anaphora.loaders.hf_config import read_config
from anaphora.ops.quant import GROUP, MXFP4
from anaphora.text.chat import TemplateSource, read_template
from anaphora.text.tokenizer import Tokenizer, read_json

logger = logging.getLogger(__name__)

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),  # blocks and scales of four-bit floats, nothing else
}
_HEAD = "lm_head.weight"
# Gemma 3 with image input: the text model's names begin with one of these, by version of the file.
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model."}
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


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
        config = read_config(path, self._tokenizer_config)
        shards = _shard_files(path)
        self._tensors = _text_part(_read_shards(path, shards), path)
        if config.tie_word_embeddings:
            self._tensors.pop(_HEAD, None)  # some files hold a copy, which is not used
        shapes = _expert_stacks(self._tensors, path)
        check_tensor_names(path, shapes, config)
        for name, info in self._tensors.items():
            if info.dtype == "U8" and not name.endswith(("_blocks", "_scales")):
                raise _wrong_dtype(name, info)
        super().__init__(
            path,
            path.resolve().name,
            config=config,
            shapes=shapes,
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
        array = self._floats(name)
        if self.config.model_type == "gemma3" and name.endswith("norm.weight"):
            array += 1  # files hold the difference to one
        if name.endswith("gate_up_proj_bias"):
            return _halves(array, axis=1)
        return array

    def _read_expert(self, name: str, index: int) -> Float32Array | MXFP4:
        is_gated = name.endswith("gate_up_proj")
        if name in self._tensors:  # [experts, in, out]
            matrix = np.ascontiguousarray(self._floats(name, index).T)
            return _halves(matrix, axis=0) if is_gated else matrix
        blocks, scales = (self._raw(f"{name}_{part}", index) for part in ("blocks", "scales"))
        if is_gated:
            blocks, scales = _halves(blocks, axis=0), _halves(scales, axis=0)
        return MXFP4(blocks, scales)

    def _floats(self, name: str, index: int | None = None) -> Float32Array:
        raw = self._raw(name, index)
        if raw.dtype == np.uint16:  # bfloat16: the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(raw, np.float32)

    def _raw(self, name: str, index: int | None = None) -> npt.NDArray[Any]:
        """The tensor as it is stored, or only its entry ``index`` along the first axis."""
        info = self._tensors[name]
        shape = info.shape if index is None else info.shape[1:]
        dtype, count = _DTYPES[info.dtype], math.prod(shape)
        offset = info.offset + (index or 0) * count * dtype.itemsize
        try:
            raw = np.fromfile(info.file, dtype, count, offset=offset)
        except OSError as error:
            raise CorruptCheckpoint(f"{info.file} cannot be read: {error}") from error
        if raw.size != count:
            raise CorruptCheckpoint(f"{info.file} is truncated in tensor {name}; fetch it again")
        return raw.reshape(shape)


def _halves(array: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Gate | up where the file has them in turn."""
    index = np.arange(array.shape[axis]).reshape(-1, 2).T.reshape(-1)
    return np.ascontiguousarray(array.take(index, axis=axis))


def _text_part(tensors: dict[str, _Tensor], path: Path) -> dict[str, _Tensor]:
    """What the text model needs of a checkpoint that also takes images, by its usual names."""
    kept: dict[str, _Tensor] = {}
    skipped: dict[str, int] = {}
    for name, info in tensors.items():
        if match := _OTHER_PARTS.match(name):
            skipped[match[2]] = skipped.get(match[2], 0) + 1
            continue
        for prefix, replacement in _TEXT_PREFIXES.items():
            name = replacement + name.removeprefix(prefix) if name.startswith(prefix) else name
        kept[name.removeprefix("language_model.")] = info
    if skipped:
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in skipped.items())
        logger.info("%s: text only; skipped: %s", path, parts)
    return kept


def _expert_stacks(tensors: dict[str, _Tensor], path: Path) -> dict[str, Shape]:
    """Shapes with each stack of experts as one tensor [experts, out, in]."""
    result: dict[str, Shape] = {}
    for name, info in tensors.items():
        shape, stack = info.shape, name.rpartition("_")[0]
        if name.endswith("_blocks") and len(shape) == 4:
            scales = tensors.get(f"{stack}_scales")
            is_whole = scales is not None and scales.shape == shape[:3] and shape[3] == GROUP // 2
            if not is_whole or scales is None or {info.dtype, scales.dtype} != {"U8"}:
                raise CorruptCheckpoint(
                    f"{path}: {name} and {stack}_scales do not fit together; fetch the model again"
                )
            if stack in tensors:
                raise CorruptCheckpoint(f"{path}: {stack} is there twice, in two forms")
            result[stack] = (*shape[:2], shape[2] * GROUP)
        elif name.endswith("_scales") and f"{stack}_blocks" in tensors:
            continue
        elif len(shape) == 3:
            result[name] = (shape[0], shape[2], shape[1])
        else:
            result[name] = shape
    return result


def _wrong_dtype(name: str, info: _Tensor) -> UnsupportedModel:
    known = ", ".join(kind for kind in _DTYPES if kind != "U8")
    return UnsupportedModel(
        f"{info.file}: the tensor {name} has type {info.dtype}; supported are {known}"
    )


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
            raise _wrong_dtype(name, _Tensor(shard, entry["dtype"], (), 0))
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = _Tensor(shard, entry["dtype"], tuple(entry["shape"]), offset)
    return tensors
