"""Blocks on disk: a fixed number of slots, encrypted, that never give a wrong block.

An entry says what its slot's block is, sealed with AES-256-GCM together with the tag of the block's
own ciphertext. So a flipped bit, half a write, an entry beside another write's block, or either of
them in another slot fails authentication: that is a ``DamagedBlock``, which the cache takes as a
miss.

Each write draws 256 random bits, its salt, and derives two keys from them that seal its entry and
its block and nothing else, ever. GCM's one unforgivable mistake, two messages under one key and
nonce, then needs the same salt twice; no counter has to survive a crash, a restored backup, a
cloned machine or a fork. The salt stands in the entry alone: once ``erase`` has overwritten that,
not even the owner of the file's key can read the block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from anaphora.cache.disk_file import ENTRY_BYTES, BlockFile, Layout
from anaphora.cache.disk_key import KEY_BYTES, derive
from anaphora.cache.pool import BlockRecord
from anaphora.errors import DamagedBlock

logger = logging.getLogger(__name__)

_EMPTY = bytes(ENTRY_BYTES)
_SALT_BYTES = 32
_TAG_BYTES = 16
_NONCE = bytes(12)  # the same always: no key seals a second message
_ENTRIES_AT_ONCE = 512  # a MiB, when a restart looks for them


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    record: BlockRecord
    tag: bytes  # of the block's ciphertext
    written_at: int  # ns since the epoch


_decode_entry = msgspec.msgpack.Decoder(_Entry).decode


class DiskStorage:
    """A fixed number of slots in one file, each holding one encrypted block or nothing.

    Whatever goes wrong in ``write``, ``read`` and ``erase`` is an OSError or ``DamagedBlock``.
    ``write`` and ``erase`` want one thread at a time; ``read`` can run beside them in any. Which
    block lies in which slot is the caller's to know, and so is when a slot is free.

    Nothing here waits for the disk (fsync) but ``sync``: after a power cut any of the latest writes
    may be missing or in pieces, and pieces fail authentication. A cache may lose blocks. A killed
    process loses none that were written.
    """

    is_memory = False

    def __init__(self, file: BlockFile, file_key: bytes, clock: _Clock) -> None:
        """Use ``volatile`` or ``persistent``."""
        self.num_slots = file.layout.num_slots
        self._file = file
        self._layout = file.layout
        self._file_key = file_key
        self._clock = clock

    @classmethod
    def volatile(cls, directory: Path, capacity_bytes: int, block_bytes: int) -> DiskStorage:
        """Slots in a file without a name in ``directory``, under a key that only this object has.

        The operating system frees the file when the process ends, however it ends, and without the
        key what may remain on the disk is noise. Raises ``ConfigError``.
        """
        file = BlockFile.unnamed(directory, Layout.fit(capacity_bytes, block_bytes))
        return cls(file, os.urandom(KEY_BYTES), _Clock(None, time.time))

    @classmethod
    def persistent(
        cls,
        directory: Path,
        capacity_bytes: int,
        block_bytes: int,
        *,
        key: bytes,
        identity: bytes,
        ttl_seconds: float | None,
        wall_clock: Callable[[], float] = time.time,
    ) -> DiskStorage:
        """Slots in the file ``blocks.anaphora`` in ``directory``, which the next start finds again.

        ``key``: the operator's secret of 32 bytes. ``identity``: what the blocks' bytes depend on
        besides their names: weights, precision, layout, tokens per block. A file of another key,
        identity, size or format is emptied, with a warning. ``wall_clock`` gives seconds since the
        epoch. Raises ``ConfigError``, also if another process uses the file.
        """
        layout = Layout.fit(capacity_bytes, block_bytes)
        file, file_key = BlockFile.named(directory, layout, key, identity)
        return cls(file, file_key, _Clock(ttl_seconds, wall_clock))

    def write(self, slot: int, record: BlockRecord, data: memoryview) -> None:
        """Replaces what ``slot`` holds by ``data``, block_bytes long.

        Raises OSError; then the slot holds nothing, or still what it held.
        """
        num_bytes = self._layout.block_bytes
        assert 0 <= slot < self.num_slots
        assert data.nbytes == num_bytes
        salt = os.urandom(_SALT_BYTES)
        entry_cipher, block_cipher = self._ciphers(salt)
        sealed = memoryview(bytearray(num_bytes + _TAG_BYTES))  # the one copy
        block_cipher.encrypt_into(_NONCE, data, msgspec.msgpack.encode(record), sealed)
        entry = _Entry(record, bytes(sealed[num_bytes:]), self._clock.now())
        padded = _pad(msgspec.msgpack.encode(entry))
        sealed_entry = salt + entry_cipher.encrypt(_NONCE, padded, _slot_bytes(slot))
        self.erase(slot)  # first, so that a write cut short leaves an empty slot
        self._file.write(sealed[:num_bytes], self._layout.block_offset(slot))
        self._file.write(sealed_entry, self._layout.entry_offset(slot))

    def read(self, slot: int, record: BlockRecord, into: memoryview) -> None:
        """Fills ``into``, block_bytes long, with the block that was written as ``record``.

        Raises ``DamagedBlock`` or OSError; ``into`` then holds anything.
        """
        num_bytes = self._layout.block_bytes
        assert 0 <= slot < self.num_slots
        assert into.nbytes == num_bytes
        sealed_entry = bytearray(ENTRY_BYTES)
        self._file.read(memoryview(sealed_entry), self._layout.entry_offset(slot))
        entry, block_cipher = self._open_entry(slot, bytes(sealed_entry))
        if entry.record != record:
            raise DamagedBlock(f"slot {slot} holds another block")
        if self._clock.is_expired(entry.written_at):
            raise DamagedBlock(f"the block in slot {slot} has expired")
        sealed = memoryview(bytearray(num_bytes + _TAG_BYTES))  # the one copy
        self._file.read(sealed[:num_bytes], self._layout.block_offset(slot))
        sealed[num_bytes:] = entry.tag
        try:
            block_cipher.decrypt_into(_NONCE, sealed, msgspec.msgpack.encode(record), into)
        except InvalidTag:
            raise DamagedBlock(f"the block in slot {slot} is damaged") from None

    def erase(self, slot: int) -> None:
        """Makes what ``slot`` holds unreadable, by overwriting the salt that its keys come from.

        ``sync`` makes that outlast a power cut. What a snapshot or a worn flash cell keeps of the
        old bytes is still sealed under the file's key. Raises OSError.
        """
        assert 0 <= slot < self.num_slots
        self._file.write(_EMPTY, self._layout.entry_offset(slot))

    def sync(self) -> None:
        """Waits until the disk has what was written and erased: a purge ends with it.

        Raises OSError.
        """
        self._file.sync()

    def entries(self) -> Iterator[tuple[int, BlockRecord]]:
        """Which slot holds what, the oldest first: what a restart finds.

        Only authentic entries that have not expired. Those that have are erased, lest a clock that
        is set back bring them back; if it already was, nobody knows how old they are, and all are
        erased. A block can still turn out damaged when it is read. Not beside ``write``.
        """
        found: list[tuple[int, int, BlockRecord]] = []
        for slot, sealed_entry in self._sealed_entries():
            with contextlib.suppress(DamagedBlock):
                entry, _ = self._open_entry(slot, sealed_entry)
                found.append((entry.written_at, slot, entry.record))
        found.sort(key=lambda entry: entry[0])
        is_set_back = bool(found) and self._clock.is_set_back_before(found[-1][0])
        fresh = []
        for written_at, slot, record in found:
            if is_set_back or self._clock.is_expired(written_at):
                with contextlib.suppress(OSError):  # it is not listed all the same
                    self.erase(slot)
            else:
                fresh.append((slot, record))
        return iter(fresh)

    def close(self) -> None:
        """Ends all access; no other call may be running. Volatile blocks are gone with it."""
        self._file.close()
        self._file_key = b""

    def _ciphers(self, salt: bytes) -> tuple[AESGCM, AESGCM]:
        """For the entry and for the block of the write that drew ``salt``."""
        keys = derive(self._file_key, salt, b"slot", 2 * KEY_BYTES)
        return AESGCM(keys[:KEY_BYTES]), AESGCM(keys[KEY_BYTES:])

    def _open_entry(self, slot: int, sealed_entry: bytes) -> tuple[_Entry, AESGCM]:
        """The entry and its block's cipher. Raises ``DamagedBlock``, also for an empty slot."""
        entry_cipher, block_cipher = self._ciphers(sealed_entry[:_SALT_BYTES])
        try:
            padded = entry_cipher.decrypt(_NONCE, sealed_entry[_SALT_BYTES:], _slot_bytes(slot))
            return _decode_entry(_unpad(padded)), block_cipher
        except (InvalidTag, msgspec.MsgspecError):
            raise DamagedBlock(f"the entry of slot {slot} is empty or damaged") from None

    def _sealed_entries(self) -> Iterator[tuple[int, bytes]]:
        """All entries that are not empty, read in large pieces; what cannot be read is left out."""
        for first in range(0, self.num_slots, _ENTRIES_AT_ONCE):
            piece = bytearray(min(_ENTRIES_AT_ONCE, self.num_slots - first) * ENTRY_BYTES)
            try:
                self._file.read(memoryview(piece), self._layout.entry_offset(first))
            except (DamagedBlock, OSError) as error:
                logger.warning("slots of the disk cache from %d on are lost: %s", first, error)
                continue
            for start in range(0, len(piece), ENTRY_BYTES):
                sealed_entry = bytes(piece[start : start + ENTRY_BYTES])
                if sealed_entry != _EMPTY:
                    yield first + start // ENTRY_BYTES, sealed_entry


class _Clock:
    """How old blocks are: by the wall clock from one start to the next, else by one nobody sets."""

    def __init__(self, ttl_seconds: float | None, wall_clock: Callable[[], float]) -> None:
        self._ttl = None if ttl_seconds is None else round(ttl_seconds * 1e9)
        self._boot_time = round(wall_clock() * 1e9) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def now(self) -> int:
        """In ns since the epoch."""
        return self._boot_time + time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def is_expired(self, written_at: int) -> bool:
        """What seems to come from the future has expired too: its age is unknown."""
        return self._ttl is not None and not 0 <= self.now() - written_at < self._ttl

    def is_set_back_before(self, written_at: int) -> bool:
        """Whether there is a time to live, and ages cannot be told."""
        return self._ttl is not None and self.now() < written_at


def _pad(encoded: bytes) -> bytes:
    """Its length in front and zeros behind, so that an entry's size tells nothing."""
    padded = len(encoded).to_bytes(2, "little") + encoded
    size = ENTRY_BYTES - _SALT_BYTES - _TAG_BYTES
    assert len(padded) <= size, "a record with a name too long for an entry"
    return padded.ljust(size, b"\0")


def _unpad(padded: bytes) -> bytes:
    return padded[2 : 2 + int.from_bytes(padded[:2], "little")]


def _slot_bytes(slot: int) -> bytes:
    return slot.to_bytes(8, "little")
