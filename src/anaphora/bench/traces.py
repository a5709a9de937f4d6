"""Request traces: what they have in common, and a reader for each published form."""

from __future__ import annotations

import array
import dataclasses
import fnmatch
import functools
import itertools
import json
import lzma
import random
import tarfile
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError

_TEXT_BLOCK = 256  # characters; counted as 64 tokens where a trace has text and no tokenizer
_CHARACTERS_PER_TOKEN = 4
_SYNTHETIC_BLOCK = 16  # tokens

Encode = Callable[[dict[str, Any]], list[int]]  # the token ids of a request's body


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    blocks: array.array[int]  # numbers of its blocks in the trace, in order
    num_tokens: int  # of the prompt; the last block may have fewer than the others
    seconds: float | None = None  # since the trace began


class Trace:
    """Requests in the order in which they came, and the tree that their blocks form.

    A block has a number from 0 on, the same wherever its tokens and its whole prefix are the same.
    """

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.block_size = block_size  # tokens
        self.requests: list[Request] = []
        self.parents: list[int] = []  # by block; -1 for the first of a prompt
        self._numbers: dict[tuple[int, Hashable], int] = {}

    @property
    def num_unique(self) -> int:
        """Different blocks."""
        return len(self.parents)

    @property
    def num_visits(self) -> int:
        """Blocks of all requests together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def has_times(self) -> bool:
        """Whether it says when requests came."""
        return all(request.seconds is not None for request in self.requests)

    def add(self, names: Iterable[Hashable], num_tokens: int, seconds: float | None = None) -> None:
        """A request whose blocks have these names; one name means one block only after one prefix.

        ``num_tokens``: of its prompt.
        """
        blocks = array.array("i")
        numbers, parent = self._numbers, -1
        for name in names:
            number = numbers.setdefault((parent, name), len(self.parents))
            if number == len(self.parents):
                self.parents.append(parent)
            blocks.append(number)
            parent = number
        self.requests.append(Request(blocks, num_tokens, seconds))

    def hit_tokens(self, request: Request, num_hits: int) -> int:
        """Tokens in the first ``num_hits`` blocks of a request."""
        return min(num_hits * self.block_size, request.num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a trace."""

    format: str | None = None  # a name in _READERS; None: look at it
    sessions: str = "*"  # pattern of file names, in a trace that is many files
    in_flight: int = 16  # conversations of tau-bench at a time
    encode: Encode | None = None  # for logs of requests

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in _READERS:
            raise ConfigError(
                f"--format {self.format}: there is no such format; there are {', '.join(_READERS)}"
            )


def read_trace(source: str, options: ReadOptions) -> Trace:
    """From a file, a directory, a .tar.xz, or the name of a synthetic workload.

    Raises ``ConfigError`` that names the file, the line and what is wrong.
    """
    if source in SYNTHETIC:
        trace = SYNTHETIC[source]()
        trace.name = source
        return trace
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"{source}: no such trace; give a file, a directory, a .tar.xz, or one of "
            f"{', '.join(SYNTHETIC)}"
        )
    files = _Files(path, options.sessions)
    format_ = options.format or _detect(files)
    trace = _READERS[format_](files, options)
    if not trace.requests:
        raise ConfigError(f"{source}: there is no request in it")
    return trace


class _Files:
    """The files of a trace: of a directory, of an archive, or just one."""

    def __init__(self, path: Path, pattern: str) -> None:
        self.path = path
        self._pattern = pattern  # of names in a directory or archive

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Name and text of each, in the order of their names."""
        return iter(self._texts)

    @functools.cached_property
    def _texts(self) -> list[tuple[str, str]]:
        texts = []
        for name, content in sorted(self._contents()):
            try:
                texts.append((name, content.decode()))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{name}: it is not text in UTF-8 ({error})") from None
        if not texts:
            raise ConfigError(f"{self.path}: no file in it matches --sessions {self._pattern!r}")
        return texts

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        if self.path.is_dir():
            for path in self.path.rglob("*.json*"):
                name = str(path.relative_to(self.path))
                if fnmatch.fnmatch(name, self._pattern):
                    yield name, path.read_bytes()
        elif not tarfile.is_tarfile(self.path):
            yield str(self.path), self.path.read_bytes()
        else:
            try:
                with tarfile.open(self.path) as archive:
                    for member in archive:
                        content = archive.extractfile(member)
                        if content is not None and fnmatch.fnmatch(member.name, self._pattern):
                            yield member.name, content.read()
            except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
                raise ConfigError(f"{self.path}: the archive is damaged ({error})") from None


def _detect(files: _Files) -> str:
    name, text = next(iter(files))
    first = text.lstrip()[:1]
    try:
        if first == "[":
            return "tau-bench"
        lines = text.strip().splitlines()
        record = json.loads(text if len(lines) > 1 and lines[0].strip() == "{" else lines[0])
    except (json.JSONDecodeError, IndexError):
        record = None
    if isinstance(record, dict):
        for field, format_ in _TELLING.items():
            if field in record:
                return format_
    raise ConfigError(
        f"{name}: what kind of trace is this? Give --format, one of {', '.join(_READERS)}"
    )


# A field in the first record, and the format that has it.
_TELLING = {
    "hash_id_scope": "kv-cache-tester",
    "hash_ids": "mooncake",
    "input": "lmcache",
    "messages": "openai",
    "prompt": "openai",
    "body": "openai",
}


def _json_lines(name: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the value of each line."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _object(place, line)


def _object(place: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: it is a {type(value).__name__}, expected an object")
    return value


def _field(place: str, record: dict[str, Any], name: str, *types: type) -> Any:
    if name not in record:
        raise ConfigError(f"{place}: it has no {name!r}; it has {', '.join(record) or 'nothing'}")
    value = record[name]
    if not isinstance(value, types) or isinstance(value, bool):
        expected = " or ".join(type_.__name__ for type_ in types)
        raise ConfigError(f"{place}: {name!r} is a {type(value).__name__}, expected {expected}")
    return value


def _ids(place: str, record: dict[str, Any], num_tokens: int, block_size: int) -> list[int]:
    ids: list[int] = _field(place, record, "hash_ids", list)
    if not all(type(id_) is int for id_ in ids):
        raise ConfigError(f"{place}: 'hash_ids' has something that is no integer")
    if len(ids) > -(-num_tokens // block_size):
        raise ConfigError(
            f"{place}: {len(ids)} 'hash_ids' are too many for {num_tokens} tokens in blocks of "
            f"{block_size}"
        )
    return ids


def _read_mooncake(files: _Files, _: ReadOptions) -> Trace:
    """JSON lines of timestamp (ms), input_length and hash_ids, one for each 512 tokens."""
    trace = Trace(files.path.name, 512)
    for name, text in files:
        for place, record in _json_lines(name, text):
            num_tokens = _field(place, record, "input_length", int)
            ids = _ids(place, record, num_tokens, trace.block_size)
            trace.add(ids, num_tokens, _field(place, record, "timestamp", int, float) / 1000)
    return trace


def _read_sessions(files: _Files, _: ReadOptions) -> Trace:
    """kv-cache-tester: a file for each session, merged by the time since its session began.

    The requests of a sub-agent count from the moment at which it was started.
    """
    trace = Trace(files.path.name, 64)
    requests: list[tuple[float, str, list[int], int]] = []
    for name, text in files:
        session = _object(name, text)
        if _field(name, session, "block_size", int) != trace.block_size:
            raise ConfigError(f"{name}: 'block_size' is {session['block_size']}, expected 64")
        entries = [
            (f"{name}, request {number}", 0.0, entry)
            for number, entry in enumerate(_field(name, session, "requests", list), 1)
        ]
        for place, start, entry in entries:  # grows while it is read
            if not isinstance(entry, dict):
                raise ConfigError(f"{place}: it is a {type(entry).__name__}, expected an object")
            seconds = start + _field(place, entry, "t", int, float)
            if "requests" in entry:
                entries += [
                    (f"{place}.{number}", seconds, inner)
                    for number, inner in enumerate(_field(place, entry, "requests", list), 1)
                ]
            else:
                num_tokens = _field(place, entry, "in", int)
                ids = _ids(place, entry, num_tokens, trace.block_size)
                requests.append((seconds, name, ids, num_tokens))
    requests.sort(key=lambda request: request[0])
    for seconds, name, ids, num_tokens in requests:
        trace.add([(name, id_) for id_ in ids], num_tokens, seconds)
    return trace


def _read_agents(files: _Files, _: ReadOptions) -> Trace:
    """lmcache-agent-trace: a file of full texts for each session; all sessions go in step.

    Requests without one full block are left out.
    """
    trace = Trace(files.path.name, _TEXT_BLOCK // _CHARACTERS_PER_TOKEN)
    sessions: list[list[str]] = []
    for name, text in files:
        inputs = [_field(place, rec, "input", str) for place, rec in _json_lines(name, text)]
        sessions.append([text for text in inputs if len(text) >= _TEXT_BLOCK])
    for round_ in itertools.zip_longest(*sessions):
        for text in filter(None, round_):
            _add_text(trace, text)
    return trace


def _read_tau_bench(files: _Files, options: ReadOptions) -> Trace:
    """tau-bench: a list of conversations; a request is all messages before an assistant's.

    ``options.in_flight`` go on at the same time, each by one request in turn; when one ends the
    next begins.
    """
    trace = Trace(files.path.name, _TEXT_BLOCK // _CHARACTERS_PER_TOKEN)
    conversations: list[list[str]] = []
    for name, text in files:
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}: it is not JSON: {error}") from None
        if not isinstance(entries, list):
            raise ConfigError(f"{name}: it is no list of conversations")
        for number, entry in enumerate(entries, 1):
            place = f"{name}, conversation {number}"
            if not isinstance(entry, dict):
                raise ConfigError(f"{place}: it is a {type(entry).__name__}, expected an object")
            conversations.append(_prompts(place, _field(place, entry, "traj", list)))
    waiting = iter(conversations)
    running = [iter(prompts) for prompts in itertools.islice(waiting, options.in_flight)]
    while running:
        still_running = []
        for prompts in running:
            prompt = next(prompts, None)
            while prompt is None and (following := next(waiting, None)) is not None:
                prompts = iter(following)
                prompt = next(prompts, None)
            if prompt is not None:
                _add_text(trace, prompt)
                still_running.append(prompts)
        running = still_running
    return trace


def _prompts(place: str, messages: list[Any]) -> list[str]:
    """The text before each of the assistant's messages."""
    text, prompts = "", []
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: a message is no object")
        role = _field(place, message, "role", str)
        if role == "assistant":
            prompts.append(text)
        said = message.get("content") or json.dumps(message.get("tool_calls"))
        text += f"{role}: {said}\n"
    return prompts


def _add_text(trace: Trace, text: str) -> None:
    """Full blocks of characters only."""
    starts = range(0, len(text) - _TEXT_BLOCK + 1, _TEXT_BLOCK)
    blocks = [text[start : start + _TEXT_BLOCK] for start in starts]
    trace.add(blocks, len(blocks) * trace.block_size)


def _read_openai(files: _Files, options: ReadOptions) -> Trace:
    """JSON lines, each a request to /v1/chat/completions or /v1/completions."""
    trace = Trace(files.path.name, 16)
    assert options.encode is not None, "a log of requests needs a tokenizer"
    for name, text in files:
        for place, body in _json_lines(name, text):
            body = body.get("body", body)  # of the batch API
            if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
                raise ConfigError(f"{place}: it has neither 'messages' nor 'prompt'")
            try:
                ids = options.encode(body)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{place}: its prompt cannot be used: {error}") from None
            ends = range(trace.block_size, len(ids) + 1, trace.block_size)
            trace.add([tuple(ids[end - trace.block_size : end]) for end in ends], len(ids))
    return trace


_READERS: dict[str, Callable[[_Files, ReadOptions], Trace]] = {
    "mooncake": _read_mooncake,
    "kv-cache-tester": _read_sessions,
    "lmcache": _read_agents,
    "tau-bench": _read_tau_bench,
    "openai": _read_openai,
}


def _shared_prefixes(num_prefixes: int, num_each: int, prefix: int, suffix: int) -> Trace:
    """Each of the prefixes with so many suffixes of its own, shuffled; lengths in tokens."""
    trace = Trace("", _SYNTHETIC_BLOCK)
    order = [(group, question) for group in range(num_prefixes) for question in range(num_each)]
    random.Random(0).shuffle(order)
    for group, question in order:
        shared = [(group, index) for index in range(prefix // trace.block_size)]
        own = [(group, question, index) for index in range(suffix // trace.block_size)]
        trace.add([*shared, *own], prefix + suffix)
    return trace


# The defaults of SGLang's generated-shared-prefix and of vLLM's prefix_repetition, and llm-d's
# guide for precise routing. All lengths are multiples of a block.
SYNTHETIC: dict[str, Callable[[], Trace]] = {
    "gsp": functools.partial(_shared_prefixes, 64, 16, 2048, 128),
    "prefix-repetition": functools.partial(_shared_prefixes, 10, 100, 256, 256),
    "llm-d": functools.partial(_shared_prefixes, 150, 5, 6000, 1200),
}
