"""The file under the disk cache: opened safely, all its space taken, read and written whole.

    superblock | an entry for each slot | the blocks, one in each slot at a multiple of 4096 bytes

The superblock says whose file it is, sealed with a key of its own from the operator's key and the
file's random salt. A file that cannot serve is emptied and gets a new salt, so that no key of its
former life is used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import logging
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from anaphora.cache.disk_key import derive
from anaphora.config import format_size
from anaphora.errors import ConfigError, DamagedBlock

logger = logging.getLogger(__name__)

FILE_NAME = "blocks.anaphora"
ENTRY_BYTES = 2048  # of them 1024 for the tokens of the largest block

_VERSION = 1  # of the file's format
_PAGE = 4096
_SALT_BYTES = 32
_SEALED_IDENTITY_BYTES = 32 + 16  # SHA-256, tag
_NONCE = bytes(12)  # a salt's key seals one superblock
_SUPERBLOCK = struct.Struct("<16sIQQ32s")  # magic, version, block_bytes, num_slots, salt
_MAGIC = b"anaphora blocks\n"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where in the file everything lies; offsets and sizes in bytes."""

    block_bytes: int
    num_slots: int

    @classmethod
    def fit(cls, capacity_bytes: int, block_bytes: int) -> Layout:
        """As many slots as fit, all else included. Raises ``ConfigError`` if not even one does."""
        smallest = cls(block_bytes, 1)
        if capacity_bytes < smallest.size:
            raise ConfigError(
                f"--disk-cache-size is {format_size(capacity_bytes)}, but one block of this model "
                f"needs a file of {smallest.size} bytes; give at least {smallest.size}B"
            )
        num_slots = (capacity_bytes - _PAGE) // (smallest.slot_bytes + ENTRY_BYTES)
        if cls(block_bytes, num_slots).size > capacity_bytes:
            num_slots -= 1  # entries are padded to a page, which is no more than a slot
        return cls(block_bytes, num_slots)

    @property
    def slot_bytes(self) -> int:
        """Of one slot's block with its padding."""
        return _round_up(self.block_bytes)

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.block_offset(self.num_slots)

    def entry_offset(self, slot: int) -> int:
        """Of what is known about a slot's block."""
        return _PAGE + slot * ENTRY_BYTES

    def block_offset(self, slot: int) -> int:
        """Of a slot's block."""
        return _round_up(self.entry_offset(self.num_slots)) + slot * self.slot_bytes


class BlockFile:
    """An open file of one layout. Has no position: any threads may read and write it at once."""

    def __init__(self, fd: int, layout: Layout) -> None:
        """Use ``unnamed`` or ``named``."""
        self.layout = layout
        self._fd = fd

    @classmethod
    def unnamed(cls, directory: Path, layout: Layout) -> BlockFile:
        """A new file without a name, gone with the process. Raises ``ConfigError``."""
        with _config_errors(directory, layout):
            fd = _open_unnamed(directory)
            with _closed_on_error(fd):
                _allocate(fd, layout)
        return cls(fd, layout)

    @classmethod
    def named(
        cls, directory: Path, layout: Layout, key: bytes, identity: bytes
    ) -> tuple[BlockFile, bytes]:
        """``blocks.anaphora`` in ``directory``, locked, and the key of its blocks.

        A file of another key, identity, layout or version is emptied, with a warning. Raises
        ``ConfigError``.
        """
        path = directory / FILE_NAME
        with _config_errors(directory, layout):
            fd = _open_named(path)
            with _closed_on_error(fd):
                try:
                    salt = _read_superblock(fd, layout, key, identity)
                except (DamagedBlock, OSError) as error:
                    if os.fstat(fd).st_size:  # it was there before
                        logger.warning("the disk cache in %s starts empty: %s", path, error)
                    salt = _start_afresh(fd, layout, key, identity)
        return cls(fd, layout), derive(key, salt, b"blocks")

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """All of ``data``. Raises OSError; then any part of it may have been written."""
        _write_all(self._fd, data, offset)

    def read(self, into: memoryview, offset: int) -> None:
        """Fills ``into``. Raises ``DamagedBlock`` where the file ends, OSError."""
        _read_all(self._fd, into, offset)

    def sync(self) -> None:
        """Waits until the disk has all that was written. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Gives up the lock too. Everything later raises OSError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_unnamed(directory: Path) -> int:
    try:  # O_EXCL: nor can anyone give it a name later
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # the file system has no unnamed files: one that loses its name at once
    path = directory / f".anaphora-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with _closed_on_error(fd):
        path.unlink()
    return fd


def _open_named(path: Path) -> int:
    """Locked, regular, of this user and for nobody else. Raises OSError, ``ConfigError``."""
    try:
        # not blocking: whatever else lies there must not hold up the start
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _not_ours(path) from None
    with _closed_on_error(fd):
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise _not_ours(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process
        except BlockingIOError:
            raise ConfigError(
                f"--disk-cache: {path} is in use by another process; end that one, or give each a "
                "directory of its own"
            ) from None
        os.fchmod(fd, 0o600)
    return fd


def _not_ours(path: Path) -> ConfigError:
    return ConfigError(
        f"--disk-cache: {path} is a link, no regular file, or another user's; remove it or choose "
        "another directory"
    )


def _read_superblock(fd: int, layout: Layout, key: bytes, identity: bytes) -> bytes:
    """The file's salt. Raises ``DamagedBlock`` that says why the file cannot serve, or OSError."""
    superblock = bytearray(_SUPERBLOCK.size + _SEALED_IDENTITY_BYTES)
    _read_all(fd, memoryview(superblock), 0)
    fields, sealed = bytes(superblock[: _SUPERBLOCK.size]), bytes(superblock[_SUPERBLOCK.size :])
    magic, version, block_bytes, num_slots, salt = _SUPERBLOCK.unpack(fields)
    if magic != _MAGIC:
        raise DamagedBlock("it is damaged")
    if version != _VERSION:
        raise DamagedBlock(f"its format is version {version}, and this program's is {_VERSION}")
    if (block_bytes, num_slots) != (layout.block_bytes, layout.num_slots):
        raise DamagedBlock("it is for blocks of another size, or for another number of them")
    if os.fstat(fd).st_size != layout.size:
        raise DamagedBlock("it is cut off")
    try:
        digest = AESGCM(derive(key, salt, b"superblock")).decrypt(_NONCE, sealed, fields)
    except InvalidTag:
        raise DamagedBlock("it has another key, or is damaged") from None
    if digest != hashlib.sha256(identity).digest():
        raise DamagedBlock("it is for other weights, or another precision or layout")
    return bytes(salt)


def _start_afresh(fd: int, layout: Layout, key: bytes, identity: bytes) -> bytes:
    """Empties the file; its new salt. Raises OSError."""
    os.ftruncate(fd, 0)
    _allocate(fd, layout)
    salt = os.urandom(_SALT_BYTES)
    fields = _SUPERBLOCK.pack(_MAGIC, _VERSION, layout.block_bytes, layout.num_slots, salt)
    digest = hashlib.sha256(identity).digest()
    sealed = AESGCM(derive(key, salt, b"superblock")).encrypt(_NONCE, digest, fields)
    _write_all(fd, fields + sealed, 0)
    return salt


def _allocate(fd: int, layout: Layout) -> None:
    """Takes all the space now: the operator hears at the start, not days later, if it is not there.

    Looks first, since to fill the disk and then fail would harm others. Most file systems take
    space without writing to it; where one cannot, the C library writes a byte to each page. Raises
    OSError.
    """
    system = os.fstatvfs(fd)
    try:
        if system.f_bavail * system.f_frsize < layout.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, layout.size)
    except OSError:
        os.ftruncate(fd, 0)
        raise


@contextlib.contextmanager
def _config_errors(directory: Path, layout: Layout) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"--disk-cache-size: {directory} has no room for {format_size(layout.size)} "
                f"({error.strerror}); free some space there or give a smaller size"
            ) from None
        raise ConfigError(
            f"--disk-cache: {directory} cannot be used ({error.strerror}); give an existing "
            "directory that this user may write to"
        ) from None


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:  # a signal or a full disk can cut a write short
        num_written = os.pwrite(fd, rest, offset)
        if num_written == 0:
            raise OSError(errno.EIO, "nothing could be written")
        rest, offset = rest[num_written:], offset + num_written


def _read_all(fd: int, into: memoryview, offset: int) -> None:
    while into:
        num_read = os.preadv(fd, [into], offset)
        if num_read == 0:
            raise DamagedBlock("it is cut off")
        into, offset = into[num_read:], offset + num_read


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
