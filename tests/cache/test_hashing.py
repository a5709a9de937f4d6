"""Keys: two different sets of inputs never share one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache.hashing import BlockHasher, encode_tokens

SECRET = bytes(range(32))
MODEL = {"weights": b"w", "kv_dtype": b"float16"}


def test_every_field_of_the_root_matters():
    hasher = BlockHasher(SECRET, MODEL)
    roots = [
        hasher.root({"tenant": b"a", "cache_salt": b""}),
        hasher.root({"tenant": b"", "cache_salt": b"a"}),
        hasher.root({"tenant": b"ab", "cache_salt": b"c"}),
        hasher.root({"tenant": b"a", "cache_salt": b"bc"}),
        hasher.root({"tenant": b"a", "adapter": b""}),
        hasher.root({"tenant": b"a", "prompt_cache_key": b"bc"}),
        BlockHasher(SECRET, MODEL | {"weights": b"x"}).root({"tenant": b"a", "cache_salt": b""}),
        BlockHasher(SECRET, MODEL | {"kv_dtype": b"f"}).root({"tenant": b"a", "cache_salt": b""}),
        BlockHasher(bytes(32), MODEL).root({"tenant": b"a", "cache_salt": b""}),
    ]
    assert len(set(roots)) == len(roots)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=3),
        min_size=2,
        max_size=6,
    )
)
def test_different_fields_give_different_roots(scopes):
    hasher = BlockHasher(SECRET, MODEL)
    for a, b in itertools.combinations(scopes, 2):
        assert (hasher.root(a) == hasher.root(b)) == (a == b)


def test_a_child_depends_on_its_parent_and_on_each_token():
    hasher = BlockHasher(SECRET, MODEL)
    root = hasher.root({})
    tokens = encode_tokens(range(16))
    children = {hasher.child(root, tokens), hasher.child(hasher.root({"tenant": b"t"}), tokens)}
    for i in range(16):
        changed = list(range(16))
        changed[i] = 99
        children.add(hasher.child(root, encode_tokens(changed)))
    children.add(hasher.child(hasher.child(root, tokens), tokens))
    assert len(children) == 19


def test_a_root_is_never_a_child():
    hasher = BlockHasher(SECRET, {})
    parent = hasher.root({})
    assert hasher.child(parent, b"") != parent


def test_tokens_are_encoded_unambiguously():
    assert encode_tokens([1, 2]) == b"\x01\0\0\0\x02\0\0\0"
    assert encode_tokens([2**31]) == b"\0\0\0\x80"
    with pytest.raises(OverflowError):
        encode_tokens([-1])


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="32"):
        BlockHasher(b"short", {})
