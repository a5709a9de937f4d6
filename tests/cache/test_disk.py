"""Blocks on disk: what is read is exactly what was written, or nothing, whatever happened."""

from __future__ import annotations

import contextlib
import errno
import os
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

from anaphora.cache.disk_file import ENTRY_BYTES, FILE_NAME, Layout
from anaphora.cache.hashing import BlockKey, encode_tokens
from anaphora.errors import DamagedBlock
from tests.cache.disks import (
    BLOCK,
    KEY,
    NOTHING,
    SLOTS,
    at,
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


def test_blocks_expire(tmp_path):
    with persistent(tmp_path, ttl_seconds=0.2) as storage:
        write(storage, 0, 1)
        assert read(storage, 0, 1) == content(1)
        time.sleep(0.25)
        assert is_nothing(storage, 0, 1)
        write(storage, 1, 2)
        assert list(storage.entries()) == [(1, record(2))]


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
from tests.cache.disks import persistent, write
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
