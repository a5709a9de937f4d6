"""Who is asking: API keys and the tenants they stand for.

A tenant is the unit of isolation of the prefix cache. It follows from the key alone. The admin key
is one more key, with a tenant of its own: it sees no other tenant's blocks, but may purge them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping

from anaphora.errors import ConfigError, Unauthorized
from anaphora.types import DEFAULT_TENANT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DERIVED_PREFIX = "key-"  # no name given to a key begins with it
ADMIN_TENANT = _DERIVED_PREFIX + "admin"


class Tenants:
    """The keys that open the server. Only their SHA-256 digests are kept."""

    def __init__(self, tenant_of_digest: Mapping[bytes, str]) -> None:
        self._tenant_of_digest = dict(tenant_of_digest)

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
            digest = _digest(key)
            if digest in tenant_of_digest:
                raise ConfigError(f"--api-key number {position} repeats a key; give each key once")
            tenant_of_digest[digest] = name or _DERIVED_PREFIX + digest.hex()[:12]
        if admin_key is not None:
            _check_key(admin_key, "--admin-key")
            if tenant_of_digest.setdefault(_digest(admin_key), ADMIN_TENANT) != ADMIN_TENANT:
                raise ConfigError("--admin-key is also an --api-key; choose another admin key")
        return cls(tenant_of_digest)

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._tenant_of_digest

    @property
    def num_tenants(self) -> int:
        """How many tenants have keys, the admin not counted."""
        return len({*self._tenant_of_digest.values()} - {ADMIN_TENANT})

    @property
    def has_admin_key(self) -> bool:
        """Whether there is an admin key."""
        return ADMIN_TENANT in self._tenant_of_digest.values()

    def is_admin(self, tenant: str) -> bool:
        """Whether ``tenant`` may do what concerns others: who has the admin key, or all if no key.

        With keys but without an admin key nobody may.
        """
        return self.is_open or tenant == ADMIN_TENANT

    def authenticate(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises ``Unauthorized``.

        Compares with every key whatever it finds, so that time tells nothing about the keys.
        """
        if self.is_open:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip(" \t"))
        found = ""
        for known, tenant in self._tenant_of_digest.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found or scheme.lower() != "bearer":
            state = "wrong" if authorization else "missing"
            raise Unauthorized(
                f"the API key is {state}; send it as the header 'Authorization: Bearer <key>'"
            )
        return found


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


def _digest(key: str) -> bytes:
    # latin-1, as header bytes were decoded; keys themselves are ASCII
    return hashlib.sha256(key.encode("latin-1", errors="replace")).digest()
