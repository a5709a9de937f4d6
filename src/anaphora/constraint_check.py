"""Whether a constraint can be followed, found out where it can do no harm.

llguidance counts most of what a grammar costs, but not all: a chain of 20,000 references overflows
the stack, ``multipleOf`` takes any time and memory. So a child process compiles each constraint
first and computes its first mask, within limits of memory and time. If it dies of one, another one
is started for the next constraint, and the request is refused.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import os
import resource
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent import futures
from typing import IO

import msgspec

from anaphora.constraints import LIMITS, Constraint, shorten
from anaphora.errors import InvalidRequest

CHECK_SECONDS = 2.0
_START_SECONDS = 20.0  # of a fresh child on a busy machine
_MEMORY_BYTES = 128 * 2**20  # beyond what the child has when it starts
_STACK_BYTES = 4 * 2**20  # half of what the engine's threads have
_MAX_VERDICTS = 1024
_VOCAB_SIZE = 2**18  # control tokens in frames are below this


class _Child:
    """The process, and its pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "anaphora.constraint_check"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it dies of may quote what it was given
        )
        self.is_fresh = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.receive(_START_SECONDS)

    def ask(self, constraint: Constraint) -> str | None:
        """What is wrong with ``constraint``. Raises ``OSError`` if the child dies of it."""
        self.is_fresh = False
        _send(self._stdin, msgspec.msgpack.encode(constraint))
        return self.receive(CHECK_SECONDS).decode() or None

    def receive(self, seconds: float) -> bytes:
        """Its next message. Raises ``OSError`` if it does not come."""
        if not select.select([self._stdout], [], [], seconds)[0]:
            raise TimeoutError
        return _receive(self._stdout)

    def end(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was never read
                pipe.close()


class _Checker:
    """One child at a time, for all of this process. Remembers what it said."""

    def __init__(self) -> None:
        self.executor = futures.ThreadPoolExecutor(1, "constraints")
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def known(self, constraint: Constraint) -> tuple[bool, str | None]:
        """Whether it has been checked, and what was wrong with it."""
        key = _digest(constraint)
        return key in self._verdicts, self._verdicts.get(key)

    def check(self, constraint: Constraint) -> str | None:
        """What is wrong with ``constraint``, None if nothing is."""
        with self._lock:
            is_known, verdict = self.known(constraint)
            if is_known:
                return verdict
            verdict = self._ask(constraint)
            self._verdicts[_digest(constraint)] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict

    def _ask(self, constraint: Constraint) -> str | None:
        is_again = False
        while True:
            try:
                self._child = self._child or _Child()
                is_again = self._child.is_fresh
                return self._child.ask(constraint)
            except OSError as error:
                self.end()
                if is_again or isinstance(error, TimeoutError):
                    return "is too complex: compiling it takes too much time or memory"
                # Else earlier ones may have left it too little memory: once more in a fresh one.

    def end(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.end()


_checker = _Checker()
atexit.register(_checker.end)


async def check(constraint: Constraint) -> None:
    """Raise ``InvalidRequest`` if ``constraint`` cannot be followed."""
    is_known, verdict = _checker.known(constraint)
    if not is_known:
        loop = asyncio.get_running_loop()
        verdict = await loop.run_in_executor(_checker.executor, _checker.check, constraint)
    if verdict is not None:
        raise constraint.error(verdict)


def check_now(constraint: Constraint) -> None:
    """As ``check``; waits."""
    if (verdict := _checker.check(constraint)) is not None:
        raise constraint.error(verdict)


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    size = pipe.read(4)
    if len(size) < 4:
        raise ConnectionError("the other side has ended")
    return pipe.read(int.from_bytes(size, "little"))


def _serve() -> None:
    """The child's loop: constraints in, complaints out, empty for none."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    class Bytes:
        """A vocabulary of single bytes, with places for the control tokens of any model."""

        eos_token_id, bos_token_id = 256, None
        special_token_ids = (256,)
        tokens = [*(bytes([i]) for i in range(256)), b"<|end|>", *[b""] * (_VOCAB_SIZE - 257)]  # noqa: RUF012

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=_VOCAB_SIZE, eos_token=[256])
    limits = LLParserLimits(**LIMITS)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    _send(stdout, b"")
    while True:
        constraint = msgspec.msgpack.decode(_receive(stdin), type=Constraint)
        try:
            matcher = LLMatcher(tokenizer, constraint.grammar(), log_level=0, limits=limits)
        except InvalidRequest as error:
            _send(stdout, str(error).removeprefix(f"{constraint.param} ").encode())
            continue
        if not matcher.is_error():
            matcher.compute_bitmask()
        complaint = ""
        if matcher.is_error():
            message = matcher.get_error()
            complaint = f"cannot be followed: {shorten(message)}"
            if message.startswith("NoExtension"):
                complaint = "matches no text at all"
        del matcher
        _send(stdout, complaint.encode())


def main() -> None:
    """Entry of the child."""
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
