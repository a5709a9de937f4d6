"""``anaphora bench``: connects to servers, or starts our own, and measures what was asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from anaphora.bench.client import CompletionClient, connect
from anaphora.bench.hitrate import Sizes, run_sweep
from anaphora.bench.limits import Limits
from anaphora.bench.report import Report, make_lines
from anaphora.bench.rounds import CACHING_OFF, CACHING_ON, Notice, Rounds
from anaphora.bench.server import own_server
from anaphora.bench.workloads import ALL, Client, SharedPrefix, Workload
from anaphora.config import DEFAULT_MODEL, Dtype
from anaphora.errors import ConfigError
from anaphora.loaders.sources import resolve
from anaphora.ops.native import measure_peaks

HIT_RATE = "hit-rate"
NAMES = (*(workload.name for workload in ALL), HIT_RATE)
FOREIGN_VOCAB_SIZE = 30_000  # of a server that does not say: fewer than any current model has


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the operator chooses. Raises ``ConfigError`` that names the option."""

    model: str = DEFAULT_MODEL
    url: str | None = None  # None: start our own server
    served_model: str | None = None  # at the url; None: the first one it lists
    api_key: str | None = None
    workloads: tuple[str, ...] = ()  # none: all
    repeats: int = 3
    seed: int | None = None  # None: a new one, so that a running server has not seen the prompts
    dtype: Dtype = "int8"
    kv_cache_memory: str = "2GiB"
    sizes: Sizes = Sizes()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        unknown = [name for name in self.workloads if name not in NAMES]
        if unknown:
            raise ConfigError(
                f"--workload {unknown[0]}: there is no such workload; there are {', '.join(NAMES)}"
            )
        if self.url is None and self.served_model is not None:
            raise ConfigError(
                f"--model is {self.served_model}; it names a model at --url. Give the model to "
                "serve as the argument"
            )
        own = {"MODEL": "model", "--dtype": "dtype", "--kv-cache-memory": "kv_cache_memory"}
        for flag, field in own.items():
            default = type(self).__dataclass_fields__[field].default
            if self.url is not None and getattr(self, field) != default:
                raise ConfigError(
                    f"{flag} is {getattr(self, field)}, but the server at --url runs already; "
                    "leave one of the two out"
                )
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}; it must be at least 1")

    @property
    def chosen(self) -> list[Workload]:
        """The workloads other than the hit-rate sweep, in their order."""
        return [w for w in ALL if not self.workloads or w.name in self.workloads]

    @property
    def has_sweep(self) -> bool:
        """Whether the hit-rate sweep was asked for."""
        return not self.workloads or HIT_RATE in self.workloads


async def run(options: BenchOptions) -> Report:
    """Measures. Raises ``MeasurementError`` and ``ModelError``."""
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    with showing_progress() as notice:
        async with _connected(options, notice) as (cached, uncached):
            rounds = Rounds(
                seed=seed,
                vocab_size=cached.vocab_size or FOREIGN_VOCAB_SIZE,
                repeats=options.repeats,
                notice=notice,
            )
            limits = None
            if options.url is None and cached.info is not None:
                notice("this machine's limits")
                limits = Limits(cached.info, measure_peaks())
            on: dict[str, Client] = {CACHING_ON: cached}
            both = on if uncached is None else {CACHING_OFF: uncached, **on}
            plan = [(w, both if isinstance(w, SharedPrefix) else on) for w in options.chosen]
            samples = await rounds.run(plan)
            sweep = None
            if options.has_sweep:
                sweep = await run_sweep(rounds, cached, uncached, options.sizes)
    return Report(
        url=options.url,
        model=cached.model,
        info=cached.info,
        seed=seed,
        repeats=options.repeats,
        limits=limits,
        lines=make_lines(options.chosen, samples, limits),
        sweep=sweep,
    )


@contextlib.asynccontextmanager
async def _connected(
    options: BenchOptions, notice: Notice
) -> AsyncIterator[tuple[CompletionClient, CompletionClient | None]]:
    """The server to measure and, if it is ours and a workload compares, one with its cache off."""
    async with contextlib.AsyncExitStack() as stack:
        if options.url is not None:
            foreign = connect(options.url, model=options.served_model, api_key=options.api_key)
            yield await stack.enter_async_context(foreign), None
            return
        arguments = [
            *(str(resolve(options.model).path), "--dtype", options.dtype),
            *("--kv-cache-memory", options.kv_cache_memory),
        ]

        async def start(*more: str) -> CompletionClient:
            notice("starting a server")
            url = await stack.enter_async_context(own_server([*arguments, *more]))
            return await stack.enter_async_context(connect(url))

        cached = await start()
        compares = options.has_sweep or any(isinstance(w, SharedPrefix) for w in options.chosen)
        yield cached, await start("--no-enable-prefix-caching") if compares else None


@contextlib.contextmanager
def showing_progress() -> Iterator[Notice]:
    """Says on standard error what runs; standard output is for results."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    is_off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off) as progress:
        task = progress.add_task("", total=None)

        def notice(text: str) -> None:
            progress.update(task, description=text)

        yield notice
