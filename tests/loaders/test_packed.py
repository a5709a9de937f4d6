"""Weights that are packed once, and what may happen to the file that keeps them."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
import pytest

from anaphora.loaders.packed import PackedWeights
from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps

RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((40, 70)).astype(np.float32)
BIAS = RNG.standard_normal(40).astype(np.float32)
X = RNG.standard_normal((3, 70)).astype(np.float32)


class Loader:
    """Loads one matrix and one vector as a model does; ``num_packed`` tells how often it had to."""

    def __init__(self, directory, dtype="int8", digest=b"model"):
        self.directory, self.digest = directory, digest
        self.ops = NativeOps(dtype, 1)
        self.num_packed = 0

    def load(self):
        with PackedWeights(self.directory, self.digest, self.ops) as packed:
            linear = packed.linear("proj", self._pack)
            norm = packed.array("norm", lambda: X[0])
        return np.concatenate([self.ops.linear(X, linear).ravel(), norm])

    def _pack(self):
        self.num_packed += 1
        return self.ops.pack_linear(WEIGHT, BIAS)


def only_file(directory):
    (path,) = directory.glob("*")
    return path


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_second_start_packs_nothing_and_computes_the_same_bits(tmp_path, dtype):
    loader = Loader(tmp_path / "packed", dtype)
    first, second = loader.load(), loader.load()
    assert loader.num_packed == 1
    np.testing.assert_array_equal(first, second)
    assert not only_file(loader.directory).stat().st_mode & 0o077


def test_another_model_or_precision_packs_for_itself(tmp_path):
    Loader(tmp_path).load()
    for other in (Loader(tmp_path, digest=b"other"), Loader(tmp_path, "float32")):
        other.load()
        assert other.num_packed == 1
    assert len(list(tmp_path.glob("*.weights"))) == 3


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    path.write_bytes(b"")


def claim_a_long_index(path):
    path.write_bytes(path.read_bytes()[:-8] + (2**60).to_bytes(8, "little"))


def move_an_array(path):
    """The index stays readable, and names other bytes of the file."""
    path.write_bytes(path.read_bytes().replace(b'"offset":0,', b'"offset":8,'))


def leave_eight_bytes(path):
    path.write_bytes(path.read_bytes()[-8:])


@pytest.mark.parametrize(
    "harm", [flip_a_bit, cut, empty, leave_eight_bytes, claim_a_long_index, move_an_array]
)
def test_a_damaged_file_is_packed_anew(tmp_path, harm, caplog):
    loader = Loader(tmp_path)
    expected = loader.load()
    harm(only_file(tmp_path))
    np.testing.assert_array_equal(loader.load(), expected)
    assert loader.num_packed == 2
    assert "packed weights" in caplog.text
    np.testing.assert_array_equal(loader.load(), expected)
    assert loader.num_packed == 2


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    loader = Loader(blocked / "packed")
    np.testing.assert_array_equal(loader.load(), Loader(None).load())
    assert "not kept" in caplog.text


def test_a_full_disk_costs_only_time(tmp_path, caplog, monkeypatch):
    loader = Loader(tmp_path)
    # large writes reach a full device at once
    monkeypatch.setattr(
        "anaphora.loaders.packed.tempfile.NamedTemporaryFile",
        lambda **_: open("/dev/full", "wb", buffering=0),  # noqa: SIM115
    )
    removed = []
    monkeypatch.setattr("anaphora.loaders.packed.os.unlink", removed.append)
    np.testing.assert_array_equal(loader.load(), Loader(None).load())
    assert "No space left" in caplog.text
    assert removed == ["/dev/full"]
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_touched_is_used_all_the_same(tmp_path, monkeypatch, caplog):
    loader = Loader(tmp_path)
    expected = loader.load()

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("anaphora.loaders.packed.os.utime", refuse)
    np.testing.assert_array_equal(loader.load(), expected)
    assert loader.num_packed == 1
    assert not caplog.text


def test_a_pipe_in_place_of_the_file_does_not_hang_the_start(tmp_path):
    loader = Loader(tmp_path)
    expected = loader.load()
    path = only_file(tmp_path)
    path.unlink()
    os.mkfifo(path)
    np.testing.assert_array_equal(loader.load(), expected)


def test_a_load_that_fails_leaves_nothing(tmp_path):
    with (
        contextlib.suppress(ZeroDivisionError),
        PackedWeights(tmp_path, b"m", NativeOps("int8")) as packed,
    ):
        packed.array("norm", lambda: X[0])
        packed.array("bias", lambda: 1 / 0)
    assert not list(tmp_path.iterdir())


def test_old_files_and_abandoned_ones_are_removed(tmp_path):
    month = time.time() - 40 * 24 * 3600
    for name in ("a.weights", ".packing-x", "notes.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (month, month))
    Loader(tmp_path).load()
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".txt", ".weights"]
    assert not (tmp_path / "a.weights").exists()


def test_the_reference_keeps_nothing(tmp_path):
    with PackedWeights(tmp_path, b"m", ReferenceOps("int8")) as packed:
        packed.array("norm", lambda: X[0])
    assert not list(tmp_path.iterdir())
