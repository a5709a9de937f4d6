"""Blocks on disk: what is read is exactly what was written, or nothing, whatever happened."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.disk import DiskStorage
from anaphora.cache.disk_file import ENTRY_BYTES, FILE_NAME, Layout
from anaphora.cache.disk_key import hash_secret, read_key_file
from anaphora.cache.hashing import BlockHash, BlockKey, encode_tokens
from anaphora.cache.pool import BlockRecord
from anaphora.cache.shares import Owner
from anaphora.errors import ConfigError, DamagedBlock

KEY = bytes(range(32))
BLOCK = 5000  # no multiple of a page
SLOTS = 5
NOTHING = (DamagedBlock, OSError)


def capacity(block_bytes=BLOCK, num_slots=SLOTS):
    return Layout(block_bytes, num_slots).size


def volatile(directory, block_bytes=BLOCK, num_slots=SLOTS):
    size = capacity(block_bytes, num_slots)
    return contextlib.closing(DiskStorage.volatile(directory, size, block_bytes))


def persistent(directory, block_bytes=BLOCK, num_slots=SLOTS, **changed):
    options = {"key": KEY, "identity": b"model", "ttl_seconds": None} | changed
    size = capacity(block_bytes, num_slots)
    return contextlib.closing(DiskStorage.persistent(directory, size, block_bytes, **options))


def record(number, num_tokens=16, tenant="tenant-a"):
    rng = random.Random(number)
    key = BlockKey(
        BlockHash(rng.randbytes(32)),
        BlockHash(rng.randbytes(32)),
        encode_tokens([rng.randrange(2**32) for _ in range(num_tokens)]),
    )
    return BlockRecord(key, number, Owner(tenant, "interactive"))


def content(number, block_bytes=BLOCK):
    return random.Random(number).randbytes(block_bytes)


def write(storage, slot, number, block_bytes=BLOCK):
    storage.write(slot, record(number), memoryview(content(number, block_bytes)))


def read(storage, slot, number, block_bytes=BLOCK):
    into = bytearray(block_bytes)
    storage.read(slot, record(number), memoryview(into))
    return bytes(into)


def is_nothing(storage, slot, number):
    try:
        read(storage, slot, number)
    except DamagedBlock:
        return True
    return False


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("num_tokens", [16, 64, 256])
@pytest.mark.parametrize("block_bytes", [4096, 5000, 368_640])
def test_a_block_comes_back_as_it_was(tmp_path, block_bytes, num_tokens, is_persistent):
    opened = persistent if is_persistent else volatile
    with opened(tmp_path, block_bytes) as storage:
        assert storage.num_slots == SLOTS
        records = [record(i, num_tokens, "t" * 64) for i in range(SLOTS)]
        for slot in range(SLOTS):
            storage.write(slot, records[slot], memoryview(content(slot, block_bytes)))
        for slot in range(SLOTS):
            into = bytearray(block_bytes)
            storage.read(slot, records[slot], memoryview(into))
            assert into == content(slot, block_bytes)
        assert list(storage.entries()) == list(enumerate(records))


def test_only_its_exact_record_opens_a_block(tmp_path):
    with volatile(tmp_path) as storage:
        write(storage, 0, 1)
        right = record(1)
        other = record(2)
        for wrong in (
            right._replace(owner=right.owner._replace(tenant="tenant-b")),
            right._replace(depth=9),
            right._replace(owner=right.owner._replace(workload="batch")),
            *(right._replace(key=right.key._replace(**{f: getattr(other.key, f)}))
              for f in BlockKey._fields),
        ):  # fmt: skip
            with pytest.raises(DamagedBlock):
                storage.read(0, wrong, memoryview(bytearray(BLOCK)))
        assert read(storage, 0, 1) == content(1)


def test_overwritten_and_erased_blocks_are_gone(tmp_path):
    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
        write(storage, 0, 2)
        assert is_nothing(storage, 0, 1)
        assert read(storage, 0, 2) == content(2)
        storage.erase(0)
        storage.sync()
        assert is_nothing(storage, 0, 2)
        assert is_nothing(storage, 1, 2)  # never written
        assert not list(storage.entries())
    offset = Layout(BLOCK, SLOTS).entry_offset(0)
    raw = (tmp_path / FILE_NAME).read_bytes()
    assert raw[offset : offset + ENTRY_BYTES] == bytes(ENTRY_BYTES)


def test_a_restart_finds_the_blocks_oldest_first(tmp_path):
    with persistent(tmp_path) as storage:
        for number, slot in enumerate([3, 0, 4, 3]):
            write(storage, slot, number)
        storage.write(1, record(9, tenant="ä" * 64), memoryview(content(9)))
    with persistent(tmp_path) as storage:
        assert [slot for slot, _ in storage.entries()] == [0, 4, 3, 1]
        assert read(storage, 3, 3) == content(3)
        write(storage, 0, 7)
    with persistent(tmp_path) as storage:
        assert [(slot, r.depth) for slot, r in storage.entries()] == [
            (4, 2),
            (3, 3),
            (1, 9),
            (0, 7),
        ]


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


@pytest.mark.parametrize("opened", [volatile, persistent])
def test_the_raw_file_shows_nothing(tmp_path, opened):
    canary = b"CANARY-0123456789abcdef"
    tokens = encode_tokens([1_234_567] * 16)
    named = record(1, tenant="the-tenants-name")
    owner = named.owner._replace(workload="the-workloads-name")
    named = named._replace(key=named.key._replace(tokens=tokens), owner=owner)
    with opened(tmp_path) as storage:
        data = (canary * BLOCK)[:BLOCK]
        for slot in (0, 1):
            storage.write(slot, named, memoryview(data))
        raw = Path(f"/proc/self/fd/{storage._file._fd}").read_bytes()
    secrets = [canary, tokens[:8], *named.key[:2], *map(str.encode, named.owner[:2])]
    for secret in [*secrets, KEY, b"model"]:
        assert secret not in raw
    layout = Layout(BLOCK, SLOTS)
    for offset in (layout.entry_offset, layout.block_offset):  # the same twice looks different
        assert raw[offset(0) : offset(0) + 64] != raw[offset(1) : offset(1) + 64]


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


def flip(path, position, bit=0):
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte[0] ^ 1 << bit]), position)
    os.close(fd)


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


def test_any_flipped_bit_of_an_entry_or_block_is_a_miss(tmp_path):
    path, layout = tmp_path / FILE_NAME, Layout(BLOCK, SLOTS)
    with persistent(tmp_path) as storage:
        write(storage, 2, 1)
        entry, block = layout.entry_offset(2), layout.block_offset(2)
        positions = [*range(entry, entry + ENTRY_BYTES, 3), *range(block, block + BLOCK, 7)]
        for position in [*positions, entry + ENTRY_BYTES - 1, block + BLOCK - 1]:
            flip(path, position, position % 8)
            assert is_nothing(storage, 2, 1)
            assert position >= block or not list(storage.entries())
            flip(path, position, position % 8)
        assert read(storage, 2, 1) == content(1)


def test_pieces_of_different_writes_do_not_fit_together(tmp_path):
    path, layout = tmp_path / FILE_NAME, Layout(BLOCK, SLOTS)

    def piece(raw, offset, num_bytes):
        return raw[offset : offset + num_bytes]

    def put(data, offset):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
        old = path.read_bytes()
        old_entry = piece(old, layout.entry_offset(0), ENTRY_BYTES)
        old_block = piece(old, layout.block_offset(0), BLOCK)
        write(storage, 0, 1)  # the very same again
        put(old_entry, layout.entry_offset(0))
        assert is_nothing(storage, 0, 1)
        write(storage, 0, 1)
        put(old_block, layout.block_offset(0))
        assert is_nothing(storage, 0, 1)
        put(old_entry, layout.entry_offset(1))  # a whole write, in another slot
        put(old_block, layout.block_offset(1))
        assert is_nothing(storage, 1, 1)
        assert [slot for slot, _ in storage.entries()] == [0]
        put(old_entry, layout.entry_offset(0))  # both of one write: this is that block
        assert read(storage, 0, 1) == content(1)


def test_a_file_cut_off_while_it_is_open(tmp_path, caplog):
    with persistent(tmp_path) as storage:
        for slot in range(SLOTS):
            write(storage, slot, slot)
        os.truncate(tmp_path / FILE_NAME, Layout(BLOCK, SLOTS).block_offset(2))
        assert [is_nothing(storage, i, i) for i in range(SLOTS)] == [False, False, True, True, True]
        os.truncate(tmp_path / FILE_NAME, 100)
        assert not list(storage.entries())
        assert "are lost" in caplog.text
        assert all(is_nothing(storage, i, i) for i in range(SLOTS))
        write(storage, 1, 7)
        assert read(storage, 1, 7) == content(7)


def test_short_writes_and_reads_go_on(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:999], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:99]], offset))
    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
        assert read(storage, 0, 1) == content(1)
        assert list(storage.entries()) == [(0, record(1))]


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, 0])
def test_a_write_that_fails_leaves_no_wrong_block(tmp_path, monkeypatch, code, num_before):
    pwrite, num_left = os.pwrite, num_before

    def failing(fd, data, offset):  # an erased entry, the block in two pieces, an entry
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            if code:
                raise OSError(code, os.strerror(code))
            return 0
        return pwrite(fd, data[:3000], offset)

    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing)
            if num_before < 4:
                with pytest.raises(OSError, match=os.strerror(code) if code else "written"):
                    write(storage, 0, 2)
            else:
                write(storage, 0, 2)
        kept = 1 if num_before == 0 else 2 if num_before == 4 else None
        for number in (1, 2):
            assert is_nothing(storage, 0, number) == (number != kept)
        if kept:
            assert read(storage, 0, kept) == content(kept)
    with persistent(tmp_path) as storage:
        assert list(storage.entries()) == ([(0, record(kept))] if kept else [])
        write(storage, 0, 3)
        assert read(storage, 0, 3) == content(3)


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path, monkeypatch, caplog):
    def failing(fd, into, offset):
        raise OSError(errno.EIO, "broken")

    with persistent(tmp_path) as storage:
        write(storage, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(OSError, match="broken"):
                read(storage, 0, 1)
            assert not list(storage.entries())
            assert "broken" in caplog.text
        assert read(storage, 0, 1) == content(1)
    monkeypatch.setattr(os, "preadv", failing)
    with persistent(tmp_path):
        assert "starts empty: [Errno 5] broken" in caplog.text


def test_a_disk_that_cannot_be_written_at_the_start(tmp_path, monkeypatch):
    def failing(fd, data, offset):
        raise OSError(errno.EROFS, "read only")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(ConfigError, match=r"--disk-cache: .*\(read only\)"):
        persistent(tmp_path)


def test_blocks_expire(tmp_path):
    with persistent(tmp_path, ttl_seconds=0.2) as storage:
        write(storage, 0, 1)
        assert read(storage, 0, 1) == content(1)
        time.sleep(0.25)
        assert is_nothing(storage, 0, 1)
        write(storage, 1, 2)
        assert list(storage.entries()) == [(1, record(2))]


def at(seconds, ttl=100):
    return {"ttl_seconds": ttl, "wall_clock": lambda: seconds}


def test_blocks_expire_over_restarts_and_do_not_come_back(tmp_path):
    with persistent(tmp_path, **at(1000)) as storage:
        write(storage, 0, 1)
    with persistent(tmp_path, **at(1090)) as storage:
        write(storage, 1, 2)
        assert [slot for slot, _ in storage.entries()] == [0, 1]
    with persistent(tmp_path, **at(1101)) as storage:
        assert is_nothing(storage, 0, 1)
        assert [slot for slot, _ in storage.entries()] == [1]
    with persistent(tmp_path, **at(1095)) as storage:  # set back: what was seen expired stays so
        assert [slot for slot, _ in storage.entries()] == [1]
        assert is_nothing(storage, 0, 1)


def test_a_clock_set_back_makes_ages_unknown(tmp_path):
    with persistent(tmp_path, **at(1000)) as storage:
        write(storage, 0, 1)
    with persistent(tmp_path, **at(5000)) as storage:
        write(storage, 1, 2)
    with persistent(tmp_path, **at(1001)) as storage:
        assert is_nothing(storage, 1, 2)
        assert not list(storage.entries())
        write(storage, 2, 3)
        assert [slot for slot, _ in storage.entries()] == [2]
    with persistent(tmp_path, **at(-1.0, ttl=None)) as storage:  # without a time to live: no matter
        assert [slot for slot, _ in storage.entries()] == [2]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, SLOTS - 1), st.integers(0, 9)),
        st.tuples(st.just("read"), st.integers(0, SLOTS - 1), st.integers(0, 9)),
        st.tuples(st.just("erase"), st.integers(0, SLOTS - 1), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
        st.tuples(st.just("flip"), st.integers(0, capacity() - 1), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(0, capacity() - 1), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_a_read_gives_what_was_last_written_or_nothing(operations):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        storage = persistent(directory).thing
        written: dict[int, int] = {}
        is_damaged = False
        for kind, where, number in [*operations, ("reopen", 0, 0)]:
            if kind == "write":
                write(storage, where, number)
                written[where] = number
            elif kind == "read":
                try:
                    assert read(storage, where, number) == content(number)
                    assert written.get(where) == number
                except NOTHING:
                    assert is_damaged or written.get(where) != number
            elif kind == "erase":
                storage.erase(where)
                written.pop(where, None)
            elif kind == "flip":
                is_damaged = True
                with contextlib.suppress(IndexError):  # it was cut off before that
                    flip(directory / FILE_NAME, where, number)
            elif kind == "cut":
                is_damaged = True
                os.truncate(directory / FILE_NAME, where)
            else:
                storage.close()
                storage = persistent(directory).thing
                found = {slot: r.depth for slot, r in storage.entries()}
                assert found.items() <= written.items()
                assert is_damaged or found == written
        for slot, number in written.items():
            with contextlib.suppress(*(NOTHING if is_damaged else ())):
                assert read(storage, slot, number) == content(number)
        storage.close()


WRITER = """
import sys
from pathlib import Path
from tests.cache.test_disk import persistent, write
storage = persistent(Path(sys.argv[1]), 100_000).thing
for number in range(10**6):
    write(storage, number % 5, number, 100_000)
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_before", [1, 20, 57])
def test_a_killed_process_loses_only_what_it_was_writing(tmp_path, num_before):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(num_before)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    last = int(lines[-1])
    expected = {number % SLOTS: number for number in range(max(0, last - SLOTS + 1), last + 1)}
    with persistent(tmp_path, 100_000) as storage:
        found = {slot: r.depth for slot, r in storage.entries()}
        unsure = (last + 1) % SLOTS  # this one was being overwritten, or was already
        assert found.get(unsure) in (None, expected.pop(unsure, None), last + 1)
        assert found.items() >= expected.items()
        for slot, number in found.items():
            assert read(storage, slot, number, 100_000) == content(number, 100_000)


def test_reads_beside_writes_are_right_or_nothing(tmp_path):
    with volatile(tmp_path, num_slots=2) as storage:
        write(storage, 1, 0)
        is_over = threading.Event()
        wrong = []

        def keep_reading():
            while not is_over.is_set():
                if read(storage, 1, 0) != content(0):
                    wrong.append("another slot's write was seen")
                for number in range(3):
                    with contextlib.suppress(DamagedBlock):
                        if read(storage, 0, number) != content(number):
                            wrong.append(number)

        reader = threading.Thread(target=keep_reading)
        reader.start()
        for i in range(500):
            write(storage, 0, i % 3)
        is_over.set()
        reader.join()
        assert not wrong


def test_a_key_file_holds_bytes_or_hex_digits(tmp_path):
    path = tmp_path / "key"
    for text in (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"):
        path.write_bytes(text)
        path.chmod(0o600)
        assert read_key_file(path) == KEY
    path.chmod(0o400)
    assert read_key_file(path) == KEY


@pytest.mark.parametrize(
    "text", [b"", KEY[:-1], KEY + b"\n", KEY.hex().encode()[:-1], b"g" * 64, KEY.hex().encode() * 2]
)
def test_other_key_files_are_refused_without_being_shown(tmp_path, text):
    path = tmp_path / "key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"must hold 32 bytes or 64 hex digits.*openssl") as info:
        read_key_file(path)
    assert KEY.hex()[:8] not in str(info.value)


def test_a_key_file_that_others_may_use_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod 600"):
            read_key_file(path)


def test_a_key_file_that_is_none(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="must hold"):
        read_key_file(tmp_path / "pipe")
    for name in ("missing", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_key_file(tmp_path / name)


def test_the_hash_secret_follows_from_the_key_alone():
    assert hash_secret(KEY) == hash_secret(KEY)
    assert len({KEY, hash_secret(KEY), hash_secret(bytes(32))}) == 3
    assert len(hash_secret(KEY)) == 32
