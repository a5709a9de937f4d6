"""Our own server as a process of its own, as an operator would start it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence

from anaphora.errors import MeasurementError

_URL = re.compile(rb"(http://127\.0\.0\.1:\d+)/v1\b")
_END_SECONDS = 15.0


@contextlib.asynccontextmanager
async def own_server(arguments: Sequence[str]) -> AsyncIterator[str]:
    """The base URL of ``anaphora serve`` with ``arguments``; it ends with the block.

    Raises ``MeasurementError`` with its output if it does not start.
    """
    # no keys, and no database with any: it listens for us alone; wide, so that no line is folded
    keys = ("ANAPHORA_API_KEY", "ANAPHORA_ADMIN_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "anaphora", "serve", *arguments, "--port", "0"),
            env=environment | {"COLUMNS": "250", "ANAPHORA_DATABASE": "memory"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
        )

        def output() -> bytes:
            return os.pread(log.fileno(), 2**20, 0)  # leaves the child's position alone

        try:
            while not (found := _URL.search(output())):
                if process.returncode is not None:
                    text = output().decode(errors="replace").strip()
                    raise MeasurementError(f"anaphora serve {' '.join(arguments)}: {text}")
                await asyncio.sleep(0.05)
            yield f"{found[1].decode()}/v1"
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
