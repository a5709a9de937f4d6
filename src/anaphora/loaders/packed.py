"""Packed weights kept in the user's cache directory, so that only the first start packs them.

One file for each model and kernel layout, memory-mapped::

    arrays, each at a multiple of 64 bytes | index (JSON) | SHA-256 of both | index length, 8 bytes

The file's name binds the digest of the checkpoint and the layout. A file that cannot be read or is
damaged is packed anew; one that cannot be written costs the next start its speed and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from anaphora.ops.api import Linear, Ops

logger = logging.getLogger(__name__)

_VERSION = 3  # of the file's format and of how weights are rounded
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_UNUSED_SECONDS = 30 * 24 * 3600  # a file not opened for so long is removed
_ABANDONED_SECONDS = 3600  # as is what a killed process was writing

Arrays = dict[str, npt.NDArray[Any]]


class _Array(msgspec.Struct, frozen=True):
    offset: int
    dtype: str
    shape: tuple[int, ...]


class PackedWeights:
    """Gives a model its packed weights: from the file if there is one, else packed and written.

    ``directory`` None, or a backend whose weights are not worth keeping: packs and keeps nothing.
    """

    def __init__(self, directory: Path | None, weights_digest: bytes, ops: Ops) -> None:
        self._ops = ops
        self._path: Path | None = None
        self._found: Arrays | None = None
        self._writer: _Writer | None = None
        if directory is None or ops.layout is None:
            return
        key = hashlib.sha256(f"{_VERSION} {ops.layout} {weights_digest.hex()}".encode())
        self._path = directory / f"{key.hexdigest()}.weights"
        self._found = _open(self._path)
        if self._found is None:
            self._writer = _Writer.create(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.finish(is_complete=kind is None)

    def array(self, name: str, make: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The array ``name``, by ``make`` if it is not in the file."""
        if self._found is not None:
            return self._found[name]
        array = make()
        if self._writer is not None:
            self._writer.add(name, array)
        return array

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        """The matrix ``name``, by ``make`` if it is not in the file."""
        parts = ("data", "scale", "bias")
        if self._found is not None:
            data, scale, bias = (self._found.get(f"{name}.{part}") for part in parts)
            out_features, in_features, count = self._found[f"{name}.shape"].tolist()
            assert data is not None
            return self._ops.load_linear(in_features, out_features, data, scale, bias, count)
        linear = make()
        if self._writer is not None:
            shape = np.array([linear.out_features, linear.in_features, linear.count], np.int64)
            self._writer.add(f"{name}.shape", shape)
            for part in parts:
                if (array := getattr(linear, part)) is not None:
                    self._writer.add(f"{name}.{part}", array)
        return linear


class _Writer:
    """A file that appears under its name whole or not at all; an OSError ends it quietly."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file: IO[bytes] | None = file
        self._hash = hashlib.sha256()
        self._arrays: dict[str, _Array] = {}
        self._size = 0

    @classmethod
    def create(cls, path: Path) -> _Writer | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - it outlives this function
                prefix=".packing-", dir=path.parent, delete=False
            )
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            return None
        return cls(path, file)

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        self._arrays[name] = _Array(self._size, array.dtype.str, array.shape)
        self._write(array.data.cast("B") if array.size else b"")
        self._write(bytes(-self._size % _ALIGNMENT))

    def _write(self, data: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._give_up(error)
        else:
            self._hash.update(data)
            self._size += len(data)

    def finish(self, *, is_complete: bool) -> None:
        if self._file is None:
            return None
        if not is_complete:
            return self._remove()
        index = msgspec.json.encode(self._arrays)
        self._hash.update(index)
        length = len(index).to_bytes(_LENGTH_BYTES, "little")
        try:
            self._file.write(index + self._hash.digest() + length)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._file.name, self._path)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("packed weights are not kept in %s: %s", self._path.parent, error)
        self._remove()

    def _remove(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)
        self._file = None


def _open(path: Path) -> Arrays | None:
    """The arrays of a file, memory-mapped; None if there is none or it is damaged."""
    try:
        # not blocking: whatever else lies there under that name must not hold up the start
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        logger.warning("packed weights in %s cannot be read: %s", path, error)
        return None
    with contextlib.suppress(OSError):  # it may be another user's, or on a read-only disk
        os.utime(path)  # in use: not to be swept
    try:
        return _read(memory)
    except (ValueError, msgspec.MsgspecError, TypeError) as error:
        logger.warning("packed weights in %s are damaged (%s); packing them anew", path, error)
        return None


def _read(memory: mmap.mmap) -> Arrays:
    """Raises ValueError, MsgspecError or TypeError for a file that is not as it was written."""
    end = len(memory) - _LENGTH_BYTES - _DIGEST_BYTES
    start = end - int.from_bytes(memory[-_LENGTH_BYTES:], "little")
    if not 0 < start < end:
        raise ValueError("it is cut off")
    index = msgspec.json.decode(memory[start:end], type=dict[str, _Array])  # before a long hash
    with memoryview(memory) as view:
        digest = hashlib.sha256(view[:end]).digest()
    if digest != memory[end : end + _DIGEST_BYTES]:
        raise ValueError("its SHA-256 is wrong")
    return {
        name: np.frombuffer(
            memory, np.dtype(a.dtype), count=int(np.prod(a.shape, dtype=np.int64)), offset=a.offset
        ).reshape(a.shape)
        for name, a in index.items()
    }


def _sweep(directory: Path) -> None:
    """Removes files that nobody has opened for a month, and what killed processes left."""
    now = time.time()
    for pattern, limit in (("*.weights", _UNUSED_SECONDS), (".packing-*", _ABANDONED_SECONDS)):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > limit:
                    path.unlink()
