"""Storages on disk, and blocks to put there: what the tests of the disk tier share."""

from __future__ import annotations

import contextlib
import os
import random

from anaphora.cache.disk import DiskStorage
from anaphora.cache.disk_file import Layout
from anaphora.cache.hashing import BlockHash, BlockKey, encode_tokens
from anaphora.cache.pool import BlockRecord
from anaphora.cache.shares import Owner
from anaphora.errors import DamagedBlock

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


def flip(path, position, bit=0):
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte[0] ^ 1 << bit]), position)
    os.close(fd)


def at(seconds, ttl=100):
    return {"ttl_seconds": ttl, "wall_clock": lambda: seconds}
