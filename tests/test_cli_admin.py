"""``anaphora tenants``, ``keys``, ``limits`` and ``usage``, as an operator types them."""

from __future__ import annotations

import csv
import io
import re

import pyarrow.parquet
import pytest

from anaphora.server.store import Store
from anaphora.server.usage import UsageLog
from tests.server.test_usage import row


@pytest.fixture(autouse=True)
def _own_database(monkeypatch, tmp_path):
    monkeypatch.setenv("ANAPHORA_DATABASE", str(tmp_path / "a.db"))


def test_a_tenant_from_its_first_key_to_its_end(run):
    status, secret, _ = run("tenants", "add", "alice")
    assert status == 0
    assert re.fullmatch(r"sk-anaphora-\S{43}\n", secret)  # nothing else, so that it can be piped
    assert "alice" in run("tenants", "list")[1]
    listed = run("keys", "list")[1]
    assert secret.strip() not in listed
    key_id = re.search(r"key_\w+", listed)[0]
    assert run("keys", "create", "alice", "--days", "30")[0] == 0
    assert run("keys", "create", "--admin")[0] == 0
    assert key_id in run("keys", "revoke", key_id)[1]
    listed = run("keys", "list", "alice")[1]
    assert "revoked" in listed
    assert "works" in listed
    assert "key-admin" not in listed
    assert "60" in run("limits", "set", "alice", "chat", "--requests", "60")[1]
    assert "chat" in run("limits", "list")[1]
    assert run("tenants", "remove", "alice")[0] == 0
    assert "chat" not in run("limits", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tenants", "add", "a b"], "letters, digits"),
        (["tenants", "remove", "bob"], "no tenant 'bob'"),
        (["keys", "create", "bob"], "anaphora tenants add bob"),
        (["keys", "create"], "give a TENANT, or --admin"),
        (["keys", "revoke", "key_x"], "no key 'key_x'"),
        (["limits", "set", "bob", "--requests", "-1"], "requests_per_minute is -1"),
        (["usage", "--by", "colour"], "by is 'colour'"),
        (["usage", "--since", "soon"], "--since is no time"),
        (["usage", "--config", "/nowhere.yaml"], "cannot be read"),
        (["usage", "--database", "memory"], "ends with this command"),
        (["tenants", "list", "--database", ""], "is empty"),
        (["tenants", "list", "--database", "/proc/x/a.db"], "cannot be opened"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, arguments, words):
    status, _, errors = run(*arguments)
    assert status == 2
    assert words in errors
    assert errors.count("\n") == 1


def test_usage_with_money_and_exports(run, tmp_path):
    store = Store(str(tmp_path / "a.db"))
    log = UsageLog(store)
    log.add(row())
    log.add(row(tenant="ben", endpoint="free"))
    log.close()
    store.close()
    config = tmp_path / "anaphora.yaml"
    config.write_text(
        "endpoints:\n  - {name: chat, price: {input: 2, cached_input: 0.5, output: 10}}\n"
    )
    shown = run("usage", "--config", str(config))[1]
    numbers = r"1 │ +1,000,000 │ +400,000 │ +40.0% │ +100,000 │ +2.4 │ +0.6"
    assert re.search(rf"ann +│ chat +│ +{numbers}", shown)
    assert re.search(r"all +│ +│ +2 │ +2,000,000", shown)
    assert "saved" not in run("usage")[1]
    lines = list(csv.DictReader(io.StringIO(run("usage", "--csv", "-", "--tenant", "ben")[1])))
    assert [line["endpoint"] for line in lines] == ["free"]
    path = tmp_path / "usage.parquet"
    assert run("usage", "--parquet", str(path))[0] == 0
    assert pyarrow.parquet.read_table(path).num_rows == 2


def test_a_place_that_cannot_be_written_is_named(run, tmp_path):
    status, _, errors = run("usage", "--csv", str(tmp_path / "no" / "a.csv"))
    assert status == 1
    assert "a.csv" in errors
