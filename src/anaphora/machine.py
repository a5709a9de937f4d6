"""What this process may use of the machine: cores and memory, a cgroup's limits included."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from anaphora.config import format_size
from anaphora.errors import ConfigError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_FILE = Path("/proc/self/cgroup")


def usable_memory(root: Path = _CGROUP_ROOT, cgroup_file: Path = _CGROUP_FILE) -> int:
    """Bytes of RAM this process may use."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("memory.max", "memory.limit_in_bytes")
    for text in _read_limits(root, cgroup_file, "memory", *names):
        if text.isdigit():  # "max" means no limit
            limit = min(limit, int(text))
    return limit


def usable_cores(root: Path = _CGROUP_ROOT, cgroup_file: Path = _CGROUP_FILE) -> int:
    """Cores this process may use, at least 1: more threads would only be held back."""
    cores = len(os.sched_getaffinity(0))
    for text in _read_limits(root, cgroup_file, "cpu", "cpu.max"):  # microseconds: quota, period
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def _read_limits(root: Path, cgroup_file: Path, controller: str, *names: str) -> Iterator[str]:
    """Contents of the limit files of our cgroup and those above it, version 2 (the first of
    ``names``) and version 1 (the second)."""
    bases = [(root, names[0]), *((root / controller, name) for name in names[1:])]
    groups = [("", "/"), *_our_groups(cgroup_file)]
    for base, name in bases:
        for controllers, path in groups:
            if controllers != "" and controller not in controllers.split(","):
                continue
            group = base / path.lstrip("/")
            for folder in (group, *(p for p in group.parents if p.is_relative_to(base))):
                try:
                    yield (folder / name).read_text().strip()
                except OSError:
                    continue


def _our_groups(cgroup_file: Path) -> list[tuple[str, str]]:
    """Pairs of controllers ("" in version 2) and path."""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return []
    return [(controllers, path) for _, controllers, path in (li.split(":", 2) for li in lines)]


def map_memory(num_bytes: int, *, option: str, lock: bool = False) -> mmap.mmap:
    """Zeroed memory of this process only, which stays out of core dumps.

    Pages are committed when they are first written, or at once if ``lock``: then they are never
    swapped out. Raises ``ConfigError`` that names ``option``, the one to lower.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{format_size(num_bytes)} for the K/V cache cannot be had ({error}); "
            f"lower {option} (a bare number means GiB)"
        ) from None
    for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel may be built without it
                memory.madvise(getattr(mmap, advice))
    if lock:
        _lock(memory, option)
    return memory


def _lock(memory: mmap.mmap, option: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(memory))) != 0:
        raise ConfigError(
            f"--lock-memory: {format_size(len(memory))} cannot be locked "
            f"({os.strerror(ctypes.get_errno())}); raise the limit (ulimit -l, in systemd "
            f"LimitMEMLOCK=infinity) or lower {option}"
        )
