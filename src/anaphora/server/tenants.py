"""Who is asking: API keys and the tenants they stand for.

A tenant is the unit of isolation of the prefix cache. It follows from the key alone. An admin key
is one more key, with a tenant of its own: it sees no other tenant's blocks, but may purge them.

Keys come from the operator's options, which hold until the server ends, and from the database,
which can be changed while it runs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from anaphora.errors import ConfigError, InvalidRequest, Unauthorized
from anaphora.types import DEFAULT_TENANT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DERIVED_PREFIX = "key-"  # no name given to a key begins with it
ADMIN_TENANT = _DERIVED_PREFIX + "admin"


class Caller(NamedTuple):
    """Who sent a request."""

    tenant: str
    key_id: str = ""  # of a key from the database; else the beginning of its digest


class KnownKey(NamedTuple):
    """A key that opens the server."""

    digest: bytes
    caller: Caller
    expires_at: float | None = None  # seconds since 1970


class Tenants:
    """The keys that open the server. Only their SHA-256 digests are kept."""

    def __init__(
        self, keys: Iterable[KnownKey] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self._given = tuple(keys)
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._is_open = not self._given
        self._keys: dict[bytes, KnownKey] = {}
        self.update(())

    @classmethod
    def from_flags(cls, flags: Iterable[str], admin_key: str | None = None) -> Tenants:
        """From ``key`` or ``name=key`` each; without any key the server is open to everyone.

        Two keys may share a name, so that a tenant can change its key without a pause. A key
        without a name is a tenant of its own, named after its digest. Raises ``ConfigError`` for an
        empty, repeated or unusable key; the message never shows a key.
        """
        tenant_of_digest: dict[bytes, str] = {}
        for position, flag in enumerate(flags, start=1):
            name, key = _split(flag, position)
            digest = digest_of(key)
            if digest in tenant_of_digest:
                raise ConfigError(f"--api-key number {position} repeats a key; give each key once")
            tenant_of_digest[digest] = name or _DERIVED_PREFIX + digest.hex()[:12]
        if admin_key is not None:
            _check_key(admin_key, "--admin-key")
            if tenant_of_digest.setdefault(digest_of(admin_key), ADMIN_TENANT) != ADMIN_TENANT:
                raise ConfigError("--admin-key is also an --api-key; choose another admin key")
        return cls(
            KnownKey(digest, Caller(tenant, digest.hex()[:12]))
            for digest, tenant in tenant_of_digest.items()
        )

    def update(self, stored: Iterable[KnownKey]) -> None:
        """The keys of the database are these from now on. Where they and the operator's meet, the
        operator's holds.

        A server that once needed a key needs one until it ends, also when the last one is revoked.
        """
        # Found by a keyed digest, so that how long it takes says nothing about the keys.
        keys = {self._index(key.digest): key for key in (*stored, *self._given)}
        self._keys = keys
        self._is_open = self._is_open and not keys

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._is_open

    @property
    def num_tenants(self) -> int:
        """How many tenants have keys, the admin not counted."""
        return len(self.names)

    @property
    def names(self) -> frozenset[str]:
        """The tenants that have keys, the admin not among them."""
        return frozenset(key.caller.tenant for key in self._keys.values()) - {ADMIN_TENANT}

    @property
    def has_admin_key(self) -> bool:
        """Whether there is an admin key."""
        return any(key.caller.tenant == ADMIN_TENANT for key in self._keys.values())

    def is_admin(self, tenant: str) -> bool:
        """Whether ``tenant`` may do what concerns others: who has the admin key, or all if no key.

        With keys but without an admin key nobody may.
        """
        return self.is_open or tenant == ADMIN_TENANT

    def authenticate(self, authorization: str | None) -> Caller:
        """Whose ``Authorization`` header it is. Raises ``Unauthorized``."""
        if self.is_open:
            return Caller(DEFAULT_TENANT)
        scheme, _, secret = (authorization or "").partition(" ")
        digest = digest_of(secret.strip(" \t"))
        key = self._keys.get(self._index(digest))
        is_known = hmac.compare_digest(digest, key.digest if key else bytes(32))
        if not is_known or key is None or scheme.lower() != "bearer" or self._has_expired(key):
            state = "wrong" if authorization else "missing"
            raise Unauthorized(
                f"the API key is {state}; send it as the header 'Authorization: Bearer <key>' "
                "or 'x-api-key: <key>'"
            )
        return key.caller

    def _has_expired(self, key: KnownKey) -> bool:
        return key.expires_at is not None and key.expires_at <= self._clock()

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def check_tenant_name(name: str) -> None:
    """Raises ``InvalidRequest`` for a name that no tenant may have."""
    if not _NAME.fullmatch(name) or name.startswith(_DERIVED_PREFIX):
        raise InvalidRequest(
            f"a tenant's name has 1 to 64 letters, digits, '.', '_' and '-', begins with a letter "
            f"or digit, and not with {_DERIVED_PREFIX!r}; choose another",
            param="name",
        )


def digest_of(key: str) -> bytes:
    """What is kept of a key: SHA-256, which suffices because ours have 256 random bits."""
    # latin-1, as header bytes were decoded; keys themselves are ASCII
    return hashlib.sha256(key.encode("latin-1", errors="replace")).digest()


def _split(flag: str, position: int) -> tuple[str, str]:
    where = f"--api-key number {position}"
    name, has_name, key = flag.partition("=")
    if not has_name:
        name, key = "", flag
    if not key.strip("="):  # also what is left of a padded base64 key without a name
        raise ConfigError(
            f"{where} is empty; write KEY or NAME=KEY, and NAME=KEY for a key that ends in '='"
        )
    _check_key(key, where)
    if has_name and (not _NAME.fullmatch(name) or name.startswith(_DERIVED_PREFIX)):
        raise ConfigError(
            f"{where} has an unusable name; use letters, digits, '.', '_' and '-', "
            f"at most 64, not beginning with {_DERIVED_PREFIX!r}"
        )
    return name, key


def _check_key(key: str, where: str) -> None:
    if not key:
        raise ConfigError(f"{where} is empty; give a key, or leave the option out")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} has spaces or characters that are not printable ASCII")
