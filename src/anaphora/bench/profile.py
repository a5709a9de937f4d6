"""Where the time of a decode step goes: ``anaphora bench --profile``.

An engine in this process decodes twice: once as it is, which gives a step's true time, and once
with a clock around every native kernel, operation and part of the step, which gives its parts.
The clocks cost time themselves, most of it outside the kernels; so what is outside native code is
the true step less the kernels, and the parts outside are shown as measured, clocks included.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anaphora.bench.report import Report
from anaphora.bench.run import BenchOptions, run, showing_progress
from anaphora.bench.workloads import Decode, Prompts
from anaphora.config import EngineConfig, parse_size
from anaphora.engine import process, runner, sampler
from anaphora.engine.engine import Engine
from anaphora.errors import ConfigError, MeasurementError
from anaphora.llm import RequestOutputs, TextSide
from anaphora.loaders.sources import resolve
from anaphora.ops import native
from anaphora.types import EngineRequest, SamplingParams, SequenceOutput

BATCH_SIZES = (1, 8)
_NUM_PROMPT_TOKENS = 64
_NUM_STEPS = 64
_KERNEL, _OPERATION = "kernel: ", "operation, without kernels: "


class Clocks:
    """Seconds spent in each of several nested functions, without those that they call."""

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self._inner = [0]  # of the calls that run now: what clocked calls within took

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with a clock."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - start
                self.nanoseconds[name] += spent - self._inner.pop()
                self._inner[-1] += spent

        return clocked


class Clocked:
    """Stands for a module or an object; each function that is called through it has a clock."""

    def __init__(self, target: object, clocks: Clocks, prefix: str) -> None:
        self._target = target
        self._clocks = clocks
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value) and not isinstance(value, type):
            value = self._clocks.around(self._prefix + name, value)
            setattr(self, name, value)  # found at once from now on
        return value


class _Loop:
    """The engine process's loop without its socket, and what the parent does with an output."""

    def __init__(self, engine: Engine, text: TextSide) -> None:
        self.engine = engine
        self.encode: Callable[[Any], bytes] = process.encode
        self.decode: Callable[[bytes], Any] = process.decode_up
        self._text = text
        self._outputs: dict[str, RequestOutputs] = {}

    def begin(self, prompts: list[list[int]]) -> None:
        """Prefills ``prompts``; from here on every turn decodes one token of each."""
        params = SamplingParams(
            temperature=0, max_tokens=_NUM_STEPS + len(prompts) + 1, ignore_eos=True
        )
        for index, prompt in enumerate(prompts):
            request = EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params)
            self._outputs[request.request_id] = RequestOutputs(self._text.tokenizer, params)
            self.engine.add(request)
        scheduler = self.engine.scheduler
        while scheduler.waiting or any(not seq.num_generated_tokens for seq in scheduler.running):
            self.turn()

    def end(self) -> None:
        """Forgets all requests."""
        for request_id in self._outputs:
            self.engine.abort(request_id)
        self._outputs.clear()

    def turn(self) -> None:
        """One step with its messages."""
        message = self.encode(process.StepOutputs(self.engine.step(), self.engine.stats()))
        self.detokenize(self.decode(message).outputs)

    def detokenize(self, outputs: list[SequenceOutput]) -> None:
        """Text of new tokens."""
        for output in outputs:
            self._outputs[output.request_id].add(output)


@contextlib.contextmanager
def _clocks_everywhere(loop: _Loop) -> Iterator[Clocks]:
    """Clocks around all parts of ``loop`` as long as the block runs."""
    clocks = Clocks()
    engine: Any = loop.engine
    model = engine.runner.model
    parts = [
        (loop, "turn", "this loop"),
        (loop, "encode", "messages: encode"),
        (loop, "decode", "messages: decode"),
        (loop, "detokenize", "text from tokens"),
        (engine, "stats", "counters"),
        (engine, "step", "engine: the rest of a step"),
        (engine.scheduler, "schedule", "scheduler and cache"),
        (engine.scheduler, "complete", "scheduler and cache"),
        (engine.scheduler, "finish", "scheduler and cache"),
        (sampler, "sample", "sampling"),
        (engine.runner, "run", "batch building"),
        (runner, "make_batch", "batch building"),
        (model, "forward", "model: between operations"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in parts:
            clocked = clocks.around(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, clocked))
        stack.enter_context(patch.object(model, "ops", Clocked(model.ops, clocks, _OPERATION)))
        kernels = Clocked(vars(native)["_native"], clocks, _KERNEL)
        stack.enter_context(patch.object(native, "_native", kernels))
        yield clocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A decode step of ``batch_size`` sequences, in seconds."""

    batch_size: int
    step: float  # without clocks
    clocked_step: float
    parts: dict[str, float]  # with clocks, by name
    served_step: float | None  # as a client of the server sees it

    @property
    def kernels(self) -> float:
        """In native code."""
        return sum(s for name, s in self.parts.items() if name.startswith(_KERNEL))

    @property
    def outside(self) -> float:
        """Everything else of the true step."""
        return self.step - self.kernels


def measure_breakdown(
    loop: _Loop, prompts: Prompts, batch_size: int, *, repeats: int, served_step: float | None
) -> Breakdown:
    """Alternates between steps without and with clocks; medians over ``repeats``."""
    plain, clocked, parts = [], [], []
    for _ in range(repeats):
        loop.begin([prompts.fresh(_NUM_PROMPT_TOKENS) for _ in range(batch_size)])
        plain.append(_seconds(loop))
        loop.end()
        loop.begin([prompts.fresh(_NUM_PROMPT_TOKENS) for _ in range(batch_size)])
        with _clocks_everywhere(loop) as clocks:
            clocked.append(_seconds(loop))
        loop.end()
        parts.append(clocks.nanoseconds)
    medians = {
        name: statistics.median(part[name] for part in parts) / 1e9 / _NUM_STEPS
        for name in parts[0]
    }
    return Breakdown(
        batch_size=batch_size,
        step=statistics.median(plain),
        clocked_step=statistics.median(clocked),
        parts=dict(sorted(medians.items(), key=lambda item: -item[1])),
        served_step=served_step,
    )


def _seconds(loop: _Loop) -> float:
    """Of a step, over many."""
    start = time.perf_counter()
    for _ in range(_NUM_STEPS):
        loop.turn()
    return (time.perf_counter() - start) / _NUM_STEPS


@dataclasses.dataclass(frozen=True)
class Profile:
    """One run of ``anaphora bench --profile``."""

    model: str
    breakdowns: list[Breakdown]

    def to_json(self) -> bytes:
        """One line."""
        steps = [
            msgspec.to_builtins(b)
            | {"kernels": b.kernels, "outside": b.outside, "share_outside": b.outside / b.step}
            for b in self.breakdowns
        ]
        return msgspec.json.encode({"model": self.model, "unit": "s", "decode_steps": steps})

    def show(self, console: Console) -> None:
        """A table for each batch size."""
        for breakdown in self.breakdowns:
            console.print(_table(self.model, breakdown))
        console.print(_FOOTNOTE, soft_wrap=True)


_FOOTNOTE = """\
Shares are of the step without clocks. Outside is that step less the time in native kernels; the \
parts outside include their clocks' own time, so they add up to more. A kernel's time includes the \
call from Python and its checks. Served: decode over HTTP with a server of its own; what it takes \
longer is the socket, HTTP, and a client on the same cores."""


def _table(model: str, breakdown: Breakdown) -> Table:
    table = Table(title=f"{escape(model)}: a decode step, batch of {breakdown.batch_size}")
    table.title_justify = "left"
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")

    def add(name: str, seconds: float, **style: Any) -> None:
        table.add_row(name, f"{seconds * 1e3:.3f} ms", f"{seconds / breakdown.step:.1%}", **style)

    is_kernel = {name: name.startswith(_KERNEL) for name in breakdown.parts}
    add("step", breakdown.step, style="bold")
    add("in native kernels", breakdown.kernels, style="bold")
    for name, seconds in breakdown.parts.items():
        if is_kernel[name]:
            add("  " + name.removeprefix(_KERNEL), seconds)
    add("outside native code", breakdown.outside, style="bold")
    for name, seconds in breakdown.parts.items():
        if not is_kernel[name]:
            add("  " + name, seconds)
    add("step with clocks", breakdown.clocked_step, end_section=True)
    if breakdown.served_step is not None:
        add("served: step as a client sees it", breakdown.served_step)
    return table


def _serve(options: BenchOptions, names: tuple[str, ...]) -> tuple[Report, dict[str, float]]:
    """Decodes over HTTP; tokens per second by workload.

    A very small model's streams may end before all have begun: then only one stream is measured.
    """
    try:
        served = asyncio.run(run(dataclasses.replace(options, workloads=names)))
    except MeasurementError:
        served = asyncio.run(run(dataclasses.replace(options, workloads=names[:1])))
    return served, {line.workload: line.median for line in served.lines}


def profile_decode(options: BenchOptions) -> Profile:
    """Serves and decodes, then decodes in this process. Raises ``ConfigError``, ``ModelError``."""
    if options.url is not None:
        raise ConfigError("--profile looks into an engine in this process; leave out --url")
    names = tuple(Decode(batch_size).name for batch_size in BATCH_SIZES)
    served, rates = _serve(options, names)
    path = resolve(options.model).path
    config = EngineConfig(
        model=str(path),
        dtype=options.dtype,
        kv_cache_memory=parse_size(options.kv_cache_memory, option="--kv-cache-memory"),
    )
    breakdowns = []
    with showing_progress() as notice:
        notice("loading the model")
        loop = _Loop(Engine(config), TextSide(path))
        prompts = Prompts(loop.engine.info.vocab_size, served.seed, "profile")
        for batch_size, name in zip(BATCH_SIZES, names, strict=True):
            notice(f"decode steps, batch of {batch_size}")
            loop.begin([prompts.fresh(_NUM_PROMPT_TOKENS) for _ in range(batch_size)])
            loop.end()
            served_step = batch_size / rates[name] if name in rates else None
            breakdowns.append(
                measure_breakdown(
                    loop, prompts, batch_size, repeats=options.repeats, served_step=served_step
                )
            )
    return Profile(served.model, breakdowns)
