"""The file under the blocks: private, bounded, whose it is, and when it starts afresh."""

from __future__ import annotations

import contextlib
import errno
import gc
import os

import pytest

from anaphora.cache.disk import DiskStorage
from anaphora.cache.disk_file import FILE_NAME
from anaphora.errors import ConfigError
from tests.cache.disks import (
    BLOCK,
    SLOTS,
    capacity,
    content,
    flip,
    is_nothing,
    persistent,
    read,
    record,
    volatile,
    write,
)


def test_a_volatile_file_has_no_name_and_is_private(tmp_path):
    with volatile(tmp_path) as storage:
        write(storage, 0, 1)
        assert not list(tmp_path.iterdir())
        info = os.fstat(storage._file._fd)
        assert (info.st_mode & 0o777, info.st_nlink) == (0o600, 0)
    with pytest.raises(OSError, match="descriptor"):
        read(storage, 0, 1)
    with pytest.raises(OSError, match="descriptor"):
        write(storage, 0, 1)


def test_a_file_system_without_unnamed_files(tmp_path, monkeypatch):
    real_open = os.open

    def without(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", without)
    with volatile(tmp_path) as storage:
        assert not list(tmp_path.iterdir())
        assert os.fstat(storage._file._fd).st_mode & 0o777 == 0o600
        write(storage, 0, 1)
        assert read(storage, 0, 1) == content(1)


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 368_640])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2047, 2048])
def test_the_capacity_is_a_bound_and_is_used(tmp_path, block_bytes, num_slots, extra):
    size = max(capacity(block_bytes, num_slots) + extra, capacity(block_bytes, 1))
    with contextlib.closing(DiskStorage.volatile(tmp_path, size, block_bytes)) as storage:
        info = os.fstat(storage._file._fd)
        assert info.st_size <= size
        assert info.st_blocks * 512 >= info.st_size  # its space is taken
        assert capacity(block_bytes, storage.num_slots + 1) > size


def test_less_than_one_block_is_refused(tmp_path):
    size = capacity(BLOCK, 1)
    with pytest.raises(ConfigError, match=rf"--disk-cache-size.* give at least {size}B"):
        DiskStorage.volatile(tmp_path, size - 1, BLOCK)


@pytest.mark.parametrize("opened", [volatile, persistent])
def test_a_disk_too_small_is_told_at_once(tmp_path, opened):
    with pytest.raises(ConfigError, match=r"--disk-cache-size: .* no room for \d+"):
        opened(tmp_path, 2**40, 2**20)
    assert sum(p.stat().st_blocks for p in tmp_path.iterdir()) == 0


@pytest.mark.parametrize("opened", [volatile, persistent])
def test_a_disk_that_fills_up_meanwhile_is_given_back(tmp_path, opened, monkeypatch):
    def failing(fd, offset, size):
        os.pwrite(fd, bytes(size // 2), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", failing)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"--disk-cache-size: .* no room for \d+"):
        opened(tmp_path)
    assert sum(p.stat().st_blocks for p in tmp_path.iterdir()) == 0
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("opened", [volatile, persistent])
def test_a_directory_that_cannot_be_used_is_named(tmp_path, opened):
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(ConfigError, match=rf"--disk-cache: .*{name} cannot be used \("):
            opened(tmp_path / name)


def test_the_named_file_is_private_and_locked(tmp_path):
    (tmp_path / FILE_NAME).touch(0o644)
    with persistent(tmp_path):
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="in use by another process"):
            persistent(tmp_path)
    persistent(tmp_path).thing.close()


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe", "foreign"])
def test_what_is_not_our_file_is_left_alone(tmp_path, kind, monkeypatch):
    path, target = tmp_path / FILE_NAME, tmp_path / "target"
    if kind == "link":
        target.write_text("precious")
    if "link" in kind:
        path.symlink_to(target)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("precious")
        owner = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: owner)
    gc.collect()  # else what other tests left behind may be closed in between
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=f"{FILE_NAME} is a link, no regular file, or another"):
        persistent(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    if kind == "dangling link":
        assert not target.exists()
    elif kind in ("link", "foreign"):
        assert path.read_text() == "precious"


def stale(change, reason):
    return pytest.param(change, reason, id=reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        stale({"key": bytes(32)}, "another key"),
        stale({"identity": b"other"}, "other weights"),
        stale({"block_bytes": BLOCK + 1}, "another size"),
        stale({"num_slots": SLOTS - 1}, "another number"),
        stale(lambda path: flip(path, 16), "version 0"),
        stale(lambda path: flip(path, 0), "damaged"),
        stale(lambda path: os.truncate(path, 9000), "cut off"),
        stale(lambda path: os.truncate(path, 50), "cut off"),
        stale(lambda path: path.write_bytes(bytes(100_000)), "damaged"),
    ],
)
def test_a_file_that_cannot_serve_starts_afresh(tmp_path, change, reason, caplog):
    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
    assert not caplog.records
    if callable(change):
        change(tmp_path / FILE_NAME)
        change = {}
    with persistent(tmp_path, **change) as storage:
        (message,) = caplog.messages
        assert "starts empty" in message
        assert reason in message
        assert not list(storage.entries())
        number = 2
        data = content(number, change.get("block_bytes", BLOCK))
        storage.write(0, record(number), memoryview(data))
    with persistent(tmp_path, **change) as storage:
        assert list(storage.entries()) == [(0, record(2))]
    assert len(caplog.records) == 1


def test_any_flipped_bit_of_the_superblock_starts_afresh(tmp_path):
    path = tmp_path / FILE_NAME
    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
    whole = path.read_bytes()
    num_bytes = len(whole[:4096].rstrip(b"\0"))
    assert num_bytes > 100
    for position in range(num_bytes):
        path.write_bytes(whole)
        flip(path, position, position % 8)
        with persistent(tmp_path) as storage:
            assert not list(storage.entries())
            assert is_nothing(storage, 0, 1)


def test_a_disk_that_cannot_be_written_at_the_start(tmp_path, monkeypatch):
    def failing(fd, data, offset):
        raise OSError(errno.EROFS, "read only")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(ConfigError, match=r"--disk-cache: .*\(read only\)"):
        persistent(tmp_path)
