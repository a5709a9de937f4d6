"""The engine as a process of its own, and the messages that it exchanges with its parent.

The parent binds a socket and starts ``python -m anaphora.engine.process ADDRESS PID`` with its own
process id. It sends the configuration; the child loads the model and answers ``Ready`` or
``Failed``. Then ``EngineRequest`` and ``Abort`` go down, ``StepOutputs`` come up; before the first
request with a constraint a ``TokenTable`` goes down, once. The child ends when told to, or when its
parent is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import msgspec
import zmq

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.errors import AnaphoraError, ModelError, RequestError
from anaphora.logs import configure_logging
from anaphora.types import (
    EngineAnswer,
    EngineCommand,
    EngineRequest,
    EngineStats,
    ModelInfo,
    SequenceOutput,
    TokenTable,
)

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 500  # how often an idle engine looks whether its parent still lives
_ORPHAN_MS = 2000


class Configure(msgspec.Struct, tag=True, frozen=True):
    """First message down."""

    config: EngineConfig
    public_prefixes: list[list[int]]


class Add(msgspec.Struct, tag=True, frozen=True):
    """A new request; it has been checked."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request, or only its choice ``index``."""

    request_id: str
    index: int | None = None


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Ends the process."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    info: ModelInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The model cannot be loaded; ``error`` is the name of a class in ``errors``."""

    error: str
    message: str


class StepOutputs(msgspec.Struct, tag=True, frozen=True):
    """What one step gave, and the counters after it."""

    outputs: list[SequenceOutput]
    stats: EngineStats


class Command(msgspec.Struct, tag=True, frozen=True):
    """Something to do between two steps."""

    command_id: int
    command: EngineCommand


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What a command did, or why it could not; ``error`` is the name of a class in ``errors``."""

    command_id: int
    answer: EngineAnswer
    stats: EngineStats
    error: str | None = None
    message: str = ""


Down = Configure | TokenTable | Add | Abort | Command | Shutdown
Up = Ready | Failed | StepOutputs | Answer

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


class EngineProcess:
    """The child's side of the socket around one ``Engine``."""

    def __init__(self, address: str, parent: int) -> None:
        self._parent = parent
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 200)  # else a message to a dead parent keeps us alive
        self._socket.setsockopt(zmq.SNDTIMEO, _ORPHAN_MS)  # sending blocks only without a peer
        self._socket.connect(address)

    def run(self) -> None:
        """Serves until told to stop or orphaned."""
        while not self._socket.poll(_IDLE_POLL_MS):
            if os.getppid() != self._parent:
                return
        first = decode_down(self._socket.recv())
        assert isinstance(first, Configure)
        try:
            engine = Engine(first.config, first.public_prefixes)
        except AnaphoraError as error:
            self._socket.send(encode(Failed(type(error).__name__, str(error))))
            return
        self._socket.send(encode(Ready(engine.info)))
        try:
            while os.getppid() == self._parent and self._receive(engine):
                outputs = engine.step()
                self._socket.send(encode(StepOutputs(outputs, engine.stats())))
        except zmq.Again:
            pass  # the parent is gone
        finally:
            engine.close()

    def _receive(self, engine: Engine) -> bool:
        """Handles all waiting messages; waits for one if the engine is idle. False: stop."""
        timeout = 0 if engine.has_work or engine.has_spare_work else _IDLE_POLL_MS
        while self._socket.poll(timeout):
            timeout = 0
            message = decode_down(self._socket.recv())
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, Abort):
                engine.abort(message.request_id, message.index)
            elif isinstance(message, Add):
                self._add(engine, message.request)
            elif isinstance(message, TokenTable):
                engine.grammars.table = message
            elif isinstance(message, Command):
                self._obey(engine, message)
        return True

    def _obey(self, engine: Engine, message: Command) -> None:
        answer, error, reason = EngineAnswer(), None, ""
        try:
            answer = engine.command(message.command)
        except (RequestError, ModelError) as refusal:
            error, reason = type(refusal).__name__, str(refusal)
        self._socket.send(encode(Answer(message.command_id, answer, engine.stats(), error, reason)))

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add(request)
        except RequestError as error:  # the parent checks too; this is for its bugs
            output = SequenceOutput(
                request_id=request.request_id,
                index=0,
                num_cached_tokens=0,
                finish_reason="error",
                error=str(error),
            )
            self._socket.send(encode(StepOutputs([output], engine.stats())))


def main() -> None:
    """Entry of the child process."""
    # Ctrl-C and service managers signal the whole group; the parent lets running requests end first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging()
    EngineProcess(sys.argv[1], int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
