"""What this process may use, under cgroups of both versions."""

from __future__ import annotations

import os

import pytest

from anaphora.machine import usable_cores, usable_memory

GIB = 2**30


def test_a_cgroup_limits_what_we_may_use(tmp_path):
    root, mine = tmp_path / "cgroup", tmp_path / "self"
    (root / "a" / "b").mkdir(parents=True)
    mine.write_text("0::/a/b\n")
    machine = usable_memory(root, mine)
    (root / "a" / "b" / "memory.max").write_text("max\n")
    assert usable_memory(root, mine) == machine
    (root / "a" / "memory.max").write_text("123456789\n")  # a limit above us binds us too
    assert usable_memory(root, mine) == 123456789
    (root / "a" / "b" / "memory.max").write_text("1000000\n")
    assert usable_memory(root, mine) == 1000000


def test_a_version_1_cgroup_limits_too(tmp_path):
    root, mine = tmp_path / "cgroup", tmp_path / "self"
    (root / "memory" / "box").mkdir(parents=True)
    mine.write_text("5:cpu:/box\n4:memory:/box\n")
    (root / "memory" / "box" / "memory.limit_in_bytes").write_text("5000\n")
    assert usable_memory(root, mine) == 5000


def test_without_cgroups_it_is_the_machine(tmp_path):
    assert usable_memory(tmp_path / "none", tmp_path / "none") > GIB / 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2)],
)
def test_a_cgroup_limits_the_cores(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    root, mine = tmp_path / "cgroup", tmp_path / "self"
    (root / "box").mkdir(parents=True)
    mine.write_text("0::/box\n")
    (root / "box" / "cpu.max").write_text(quota)
    assert usable_cores(root, mine) == expected
