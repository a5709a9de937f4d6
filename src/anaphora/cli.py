"""The ``anaphora`` command. Heavy imports wait until a command needs them, so --help is quick."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from anaphora.cli_admin import keys_app, limits_app, tenants_app, usage
from anaphora.cli_batch import batch_app
from anaphora.cli_common import (
    API_KEY_VARIABLE,
    MODEL_HELP,
    CacheMemory,
    DtypeOption,
    ModelArgument,
    Threads,
    fold_help,
    option,
    table,
)
from anaphora.cli_serve import repeat_lora_modules, serve
from anaphora.cli_sql import sql
from anaphora.config import EngineConfig, format_size
from anaphora.errors import AnaphoraError, EngineError, MeasurementError

_DEFAULTS = EngineConfig()
_SHOWN_PACKAGES = ("numpy", "tokenizers", "gguf", "safetensors", "fastapi", "uvicorn", "pyzmq")

app = typer.Typer(
    help="Serve open-weight language models; compute every prompt prefix once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

ModelOption = Annotated[str, option(MODEL_HELP, "Model")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. A mistake of the user's is one red line and exit status 2."""
    try:
        words = sys.argv[1:] if argv is None else argv
        fold_help()
        app(args=repeat_lora_modules(words), prog_name="anaphora")
    except AnaphoraError as error:
        line = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(line)
        is_ours = isinstance(error, EngineError | MeasurementError)
        raise SystemExit(1 if is_ours else 2) from None
    except KeyboardInterrupt:  # while a command was still being loaded
        raise SystemExit(130) from None
    except OSError as error:  # for example a full disk behind standard output
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
        raise SystemExit(1) from None


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"anaphora {_version('anaphora')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command()(serve)
app.add_typer(batch_app, name="batch")
app.command()(sql)
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(limits_app, name="limits")
app.command()(usage)


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(help="What to answer, or to continue with --raw; - reads standard input."),
    ],
    model: ModelOption = _DEFAULTS.model,
    max_tokens: Annotated[int, option("Tokens to generate at most.", "Sampling", min=1)] = 256,
    temperature: Annotated[float, option("0 always takes the best token.", "Sampling")] = 0.0,
    seed: Annotated[int | None, option("Makes sampling repeatable.", "Sampling")] = None,
    raw: Annotated[
        bool, option("Send the prompt as a user's message or as it is.", "Model", "--raw/--chat")
    ] = False,
    dtype: DtypeOption = _DEFAULTS.dtype,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Print a model's answer to one prompt."""
    from anaphora.types import SamplingParams

    if prompt == "-":
        prompt = sys.stdin.read()
    config = EngineConfig(model=model, dtype=dtype, threads=threads, max_num_seqs=1)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    asyncio.run(_generate(config, prompt, params, raw))


async def _generate(config: EngineConfig, prompt: str, params: Any, is_raw: bool) -> None:
    from anaphora.async_llm import AsyncLLM

    llm = AsyncLLM(config)
    try:
        await llm.start()
        if llm.chat_template is None and not is_raw:
            typer.echo("this model has no chat template: the text is completed as it is", err=True)
        if is_raw or llm.chat_template is None:
            ids = llm.tokenizer.encode(prompt, parse_special=True)
        else:
            ids = llm.chat_template.encode([{"role": "user", "content": prompt}])
            params = llm.chat_template.reading(params)
        async for delta in llm.generate(ids, params):
            typer.echo(delta.text, nl=False)
            if sys.stdout is not None:  # closed by the shell
                sys.stdout.flush()
        typer.echo()
    finally:
        await llm.close()


@app.command()
def bench(
    model: ModelArgument = _DEFAULTS.model,
    url: Annotated[
        str | None,
        option(
            "Measure the server at this base URL, for example http://127.0.0.1:8000/v1, instead of "
            "one that is started for the run.",
            "Server",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        option("Its name at --url. [dim](the first one listed)[/dim]", "Server", "--model"),
    ] = None,
    api_key: Annotated[
        str | None, option(f"Key for --url. [dim]({API_KEY_VARIABLE})[/dim]", "Server")
    ] = None,
    workload: Annotated[
        list[str] | None,
        option("Measure only this; repeat for several. [dim](all)[/dim]", "Measurement"),
    ] = None,
    repeats: Annotated[
        int, option("Times that everything is measured; medians are shown.", "Measurement")
    ] = 3,
    seed: Annotated[
        int | None,
        option(
            "Decides all prompts. A server that has seen them answers from its cache, so take "
            "another one for each run. [dim](a new one)[/dim]",
            "Measurement",
        ),
    ] = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    kv_cache_memory: CacheMemory = "2GiB",
    capacity: Annotated[
        bool,
        option(
            "Measure how many model units anaphora.yaml may sell, and keep the answer.",
            "Measurement",
            "--capacity",
        ),
    ] = False,
    profile: Annotated[
        bool,
        option(
            "Show where the time of a decode step goes, and nothing else.",
            "Measurement",
            "--profile",
        ),
    ] = False,
) -> None:
    """Measure a server: prefill, decode, cache hits, and how far this machine's limits are.

    Workloads: prefill-512, prefill-2048, hot-2048, decode-1, decode-8,
    decode-32, shared16, chat, hit-rate.

    Without --url it starts servers of its own; shared16 and hit-rate then
    compare one with its cache and one without. Tables come first; the last
    line of output is one JSON document. All workloads take about four minutes a repeat.
    """
    from anaphora.bench.run import BenchOptions, run

    options = BenchOptions(
        model=model,
        url=url,
        served_model=served_model,
        api_key=api_key or (os.environ.get(API_KEY_VARIABLE) if url else None),
        workloads=tuple(workload or ()),
        repeats=repeats,
        seed=seed,
        dtype=dtype,
        kv_cache_memory=kv_cache_memory or "2GiB",
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exit that ends its servers
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    report: Any
    if profile:
        from anaphora.bench.profile import profile_decode

        report = profile_decode(options)
    elif capacity:
        from anaphora.bench.capacity import measure_capacity

        report = asyncio.run(measure_capacity(options))
    else:
        report = asyncio.run(run(options))
    report.show(Console())
    typer.echo(report.to_json())


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file, a directory or a .tar.xz; or gsp, prefix-repetition or llm-d, which are "
            "generated.",
        ),
    ],
    policy: Annotated[str, option("Which block goes first: reuse or lru.", "Cache")] = "reuse",
    capacity: Annotated[
        list[str] | None,
        option(
            "Blocks, or a share of the trace's different blocks; repeat for several. "
            "[dim](1% 2% 5% 10% 20%)[/dim]",
            "Cache",
            metavar="BLOCKS|SHARE%",
        ),
    ] = None,
    host_capacity: Annotated[
        str | None,
        option(
            "Blocks of a second tier, into which evicted ones go. [dim](none)[/dim]",
            "Cache",
            metavar="BLOCKS|SHARE%",
        ),
    ] = None,
    ttl: Annotated[
        float | None,
        option(
            "Also replay with no limit but so many seconds to live since the latest use.", "Cache"
        ),
    ] = None,
    format_: Annotated[
        str | None,
        option(
            "mooncake, kv-cache-tester, lmcache, tau-bench or openai. [dim](look at it)[/dim]",
            "Trace",
            "--format",
        ),
    ] = None,
    sessions: Annotated[
        str,
        option("Only files with names like this, of many: '*0.json', 'miniswe/*'.", "Trace"),
    ] = "*",
    in_flight: Annotated[
        int, option("Conversations of tau-bench that go on at a time.", "Trace")
    ] = 16,
    model: Annotated[str, option("Whose tokenizer reads a log of requests.", "Trace")] = (
        _DEFAULTS.model
    ),
    plot: Annotated[
        Path | None, option("Write the picture to this file, as .svg and as .png.", "Trace")
    ] = None,
) -> None:
    """Replay a trace of requests through the cache, without a model.

    Shows the hit rate beside that of LRU and that of the best possible choice. The table comes
    first; the last line of output is one JSON document.
    """
    from anaphora.bench.simulate import SimulateOptions, run
    from anaphora.bench.traces import ReadOptions

    options = SimulateOptions(
        trace=trace,
        policy=policy,
        host_capacity=host_capacity,
        ttl=ttl,
        plot=plot,
        model=model,
        reading=ReadOptions(format=format_, sessions=sessions, in_flight=in_flight),
        **({"capacities": tuple(capacity)} if capacity else {}),
    )
    simulation = run(options)
    simulation.show(Console())
    if plot is not None:
        simulation.plot(plot)
    typer.echo(simulation.to_json())


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An alias (smollm2, gemma3-270m) or a hub id."),
    ] = _DEFAULTS.model,
    accept_license: Annotated[
        bool,
        typer.Option(
            "--accept-license", help="Accept the model's terms. Without it they are shown."
        ),
    ] = False,
) -> None:
    """Download a model into the local cache, check it, and print its path."""
    from anaphora.loaders.sources import ALIASES, resolve
    from anaphora.loaders.sources import pull as pull_model

    if model in ALIASES:
        typer.echo(pull_model(model, accept_license=accept_license))
    else:
        typer.echo(resolve(model).path)


@app.command()
def doctor() -> None:
    """Show what this machine offers and what Anaphora makes of it."""
    from anaphora.loaders.sources import models_dir, packed_dir
    from anaphora.machine import usable_cores, usable_memory
    from anaphora.ops.native import (
        available_kernels,
        cpu_features,
        kernel_name,
    )

    report = table("Anaphora on this machine")
    report.add_row("anaphora", _version("anaphora"))
    report.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for package in _SHOWN_PACKAGES:
        report.add_row(package, _version(package))
    report.add_row("CPU features", " ".join(cpu_features()) or "none")
    report.add_row("kernels", f"{kernel_name()} (of {', '.join(available_kernels())})")
    report.add_row("threads", f"{usable_cores()} of {os.cpu_count()} cores")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = usable_memory()
    report.add_row("memory", f"{format_size(usable)} usable of {format_size(machine)}")
    directory = models_dir()
    report.add_row("model cache", str(directory))
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        report.add_row("", f"{path.relative_to(directory)} ({format_size(path.stat().st_size)})")
    packed = sum(path.stat().st_size for path in packed_dir().glob("*.weights"))
    report.add_row("packed weights", f"{packed_dir()} ({format_size(packed)})")
    Console().print(report)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
