"""What this process may use, under cgroups of both versions."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

from anaphora.machine import map_memory, usable_cores, usable_memory

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


def test_locked_memory_is_locked_and_stays_out_of_core_dumps():
    def locked_kib():
        [line] = [li for li in Path("/proc/self/status").read_text().splitlines() if "VmLck" in li]
        return int(line.split()[1])

    before = locked_kib()
    size = 4 * 2**20
    memory = map_memory(size, option="--kv-cache-memory", lock=True)
    assert locked_kib() - before == size // 1024
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert "dd" in flags_of(address)  # don't dump


def flags_of(address):
    """The kernel's flags of the memory area that holds ``address``."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif holds and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")
