"""The header of a GGUF file: metadata and where each tensor lies.

The ``gguf`` package has a reader, but it trusts the counts in the file (a damaged one makes it run
or allocate without end) and takes two seconds for a vocabulary of 49,152 tokens. This one checks
each count against the file's size first.

    magic "GGUF" | version u32 | num_tensors u64 | num_fields u64
    fields:  key string | type u32 | value
    tensors: name string | num_dims u32 | dims u64... | type u32 | offset u64
    padding to general.alignment, then the tensors' bytes
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from anaphora.errors import CorruptCheckpoint, UnsupportedModel

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    "MXFP4",
)
_VERSIONS = (2, 3)
_MIN_FIELD_BYTES = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**40
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor's place. ``shape`` is in C order, so ``(out, in)`` for a matrix."""

    name: str
    shape: tuple[int, ...]
    kind: str  # one of SUPPORTED_TYPES
    offset: int  # bytes from the file's start
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of quantised blocks, one for each index but the last."""
        return math.prod(self.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata by key, and the tensors by GGUF's names."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(data: mmap.mmap, path: Path) -> Header:
    """Parse and check the header in ``data``, all of the file ``path``.

    Raises ``CorruptCheckpoint`` for damage of any kind and ``UnsupportedModel`` for a version, byte
    order or tensor type that we lack, naming it.
    """
    cursor = _Cursor(data, path)
    if bytes(data[:4]) != b"GGUF":
        raise CorruptCheckpoint(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}")
    cursor.position = 4
    version = cursor.u32()
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian" if swapped in _VERSIONS else f"of version {version}"
        raise UnsupportedModel(f"{path} is a GGUF file {what}; supported is little-endian 2 and 3")
    num_tensors = cursor.count(_MIN_TENSOR_BYTES)
    num_fields = cursor.count(_MIN_FIELD_BYTES)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in fields:
            raise cursor.corrupt(f"the field {key} occurs twice")
        fields[key] = cursor.value(cursor.u32())
    raw = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
        raise cursor.corrupt(f"general.alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in raw:
        if name in tensors:
            raise cursor.corrupt(f"the tensor {name} occurs twice")
        tensors[name] = _place_tensor(cursor, name, shape, type_id, start + offset)
    return Header(fields, tensors)


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.corrupt(f"the tensor {name} has {num_dims} dimensions")
    dims = tuple(cursor.u64() for _ in range(num_dims))
    return name, dims[::-1], cursor.u32(), cursor.u64()


def _place_tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in SUPPORTED_TYPES:
        shown = kind.name if kind is not None else f"number {type_id}"
        raise UnsupportedModel(
            f"{cursor.path}: the tensor {name} has type {shown}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    num_elements = math.prod(shape)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if not 0 < num_elements <= _MAX_ELEMENTS or shape[-1] % block_size:
        raise cursor.corrupt(f"the tensor {name} of type {kind.name} has shape {shape}")
    num_bytes = num_elements // block_size * block_bytes
    if offset + num_bytes > len(cursor.data):
        raise cursor.corrupt(
            f"the tensor {name} ends at byte {offset + num_bytes}, but the file has only "
            f"{len(cursor.data)}; it is truncated"
        )
    return TensorInfo(name, shape, kind.name, offset, num_bytes)


class _Cursor:
    """A position in the file. Each read is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path} is damaged: {reason}; fetch the file again")

    def advance(self, num_bytes: int) -> int:
        """The position before, after stepping over ``num_bytes`` that exist."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise self.corrupt(f"the header ends early, at byte {start}")
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.advance(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.advance(8))[0]
        return value

    def count(self, min_item_bytes: int) -> int:
        """A number of items, each of which takes at least ``min_item_bytes`` of what follows."""
        number = self.u64()
        if number * min_item_bytes > len(self.data) - self.position:
            raise self.corrupt(f"it announces {number} items, more than fit into it")
        return number

    def string(self) -> str:
        length = self.count(1)
        start = self.advance(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(self.count(8))]
        if kind == GGUFValueType.ARRAY:
            raise UnsupportedModel(f"{self.path}: arrays of arrays in GGUF are not supported")
        return self._scalars(kind, self.count(1))

    def _scalars(self, kind: int, count: int) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.corrupt(f"a field has the unknown type {kind}")
        size = struct.calcsize("<" + code)
        start = self.advance(count * size)
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))
