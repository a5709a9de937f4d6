"""The operator's key file, and what is derived from it."""

from __future__ import annotations

import os

import pytest

from anaphora.cache.disk_key import hash_secret, read_key_file
from anaphora.errors import ConfigError
from tests.cache.disks import KEY


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
