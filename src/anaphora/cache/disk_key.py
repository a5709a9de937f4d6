"""The operator's key of the disk cache, and the secrets that follow from it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from anaphora.errors import ConfigError

KEY_BYTES = 32

_MAX_FILE_BYTES = 4096


def read_key_file(path: Path) -> bytes:
    """The operator's key: 32 bytes, or 64 hex digits in a line.

    Raises ``ConfigError`` for anything else, and for a file that others may use.
    """
    fix = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    try:
        # not blocking: a named pipe must not hold up the start
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES) if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror}); {fix}") from None
    if info.st_mode & 0o077:
        raise ConfigError(
            f"the key file {path} has the mode {stat.S_IMODE(info.st_mode):o}, so that others may "
            f"use it; change that with: chmod 600 {path}"
        )
    if len(content) == KEY_BYTES:
        return content
    if re.fullmatch(rb"[0-9A-Fa-f]{64}\s*", content):
        return bytes.fromhex(content.decode())
    raise ConfigError(
        f"the key file {path} must hold {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits and "
        f"nothing else; {fix}"
    )


def hash_secret(key: bytes) -> bytes:
    """The secret for ``BlockHasher``: with it, only whoever has ``key`` can name a kept block."""
    return derive(key, b"", b"block hashes")


def derive(secret: bytes, salt: bytes, label: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256; another salt or label gives an unrelated key."""
    return HKDF(SHA256(), num_bytes, salt, b"anaphora disk cache: " + label).derive(secret)
