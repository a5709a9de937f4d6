"""Names of blocks: a block's key says everything that its K and V depend on.

BlockHash = BLAKE2b-256(key = process secret; parent hash, token ids). The first parent is a root
that binds the model, the precision and the tenant. Each field of the root is written as its name
and its value, both with their lengths in front, so that no two different sets of fields ever give
the same bytes (the collisions of vLLM #44701 came from leaving that out).
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType, cast

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32
TOKEN_BYTES = 4
LAYOUT_VERSION = 2  # of the K/V bytes in a block; part of every key


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Four little-endian bytes per token id: what is hashed, and what a hit is compared with."""
    return array.array("I", token_ids).tobytes()


class BlockKey(NamedTuple):
    """What finds a block: its hash, and its own tokens, which a hit compares as well."""

    block_hash: BlockHash
    parent: BlockHash  # of the block before it, or the root
    tokens: bytes  # encode_tokens of its token ids


class BlockHasher:
    """Computes keys under one process's secret; no other process can name or forge a block."""

    def __init__(self, secret: bytes, model_fields: Mapping[str, bytes]) -> None:
        """``model_fields``: weights digest, K/V dtype and what else all requests share."""
        if len(secret) != HASH_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, expected {HASH_BYTES}")
        self._secret = secret
        self._model_fields = dict(model_fields)
        # Copied for each block: setting the key up anew would take half of the time.
        self._block = hashlib.blake2b(key=secret, digest_size=HASH_BYTES, person=b"block")

    def root(self, scope_fields: Mapping[str, bytes]) -> BlockHash:
        """The parent of a request's first block: its tenant, salts and adapter."""
        fields = {"layout": LAYOUT_VERSION.to_bytes(4, "little")}
        fields |= {f"model.{name}": value for name, value in self._model_fields.items()}
        fields |= {f"scope.{name}": value for name, value in scope_fields.items()}
        digest = hashlib.blake2b(key=self._secret, digest_size=HASH_BYTES, person=b"root")
        for name, value in sorted(fields.items()):
            for part in (name.encode(), value):
                digest.update(len(part).to_bytes(8, "little") + part)
        return BlockHash(digest.digest())

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        """The hash of a full block with ``tokens`` (``encode_tokens``) after ``parent``."""
        digest = self._block.copy()
        digest.update(parent + tokens)
        return cast("BlockHash", digest.digest())

    def branch(self, root: BlockHash, public: BlockHash) -> BlockHash:
        """What a private block hashes as its parent when it follows a block that all share."""
        return BlockHash(
            hashlib.blake2b(
                root + public, key=self._secret, digest_size=HASH_BYTES, person=b"branch"
            ).digest()
        )
