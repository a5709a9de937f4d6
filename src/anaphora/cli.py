"""The ``anaphora`` command. Heavy imports wait until a command needs them, so --help is quick."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anaphora.config import Dtype, EngineConfig, KVCacheDtype, format_size, parse_size
from anaphora.errors import AnaphoraError, EngineError, MeasurementError

if TYPE_CHECKING:
    import uvicorn

    from anaphora.async_llm import AsyncLLM
    from anaphora.server.tenants import Tenants
    from anaphora.types import ModelInfo

API_KEY_VARIABLE = "ANAPHORA_API_KEY"
_DEFAULTS = EngineConfig()
_GRACE_SECONDS = 10.0
_SHOWN_PACKAGES = ("numpy", "tokenizers", "gguf", "safetensors", "fastapi", "uvicorn", "pyzmq")

app = typer.Typer(
    help="Serve open-weight language models; compute every prompt prefix once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)


def _option(help_text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


_MODEL_HELP = "An alias (see [bold]anaphora pull[/bold]), a GGUF file, a directory or a hub id."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelOption = Annotated[str, _option(_MODEL_HELP, "Model")]
ServedNames = Annotated[
    list[str] | None,
    _option("Name that clients send as model; repeat for several.", "Model", "--served-model-name"),
]
MaxModelLen = Annotated[
    int | None,
    _option(
        "Tokens of prompt and answer together. [dim](what model and cache allow)[/dim]", "Model"
    ),
]
DtypeOption = Annotated[Dtype, _option("Precision of the weights.", "Model")]
Host = Annotated[str, _option("Address to listen on. Others than loopback need a key.", "Server")]
Port = Annotated[
    int, _option("Port to listen on; 0 takes a free one and prints it.", "Server", max=65535, min=0)
]
ApiKeys = Annotated[
    list[str] | None,
    _option(
        "KEY or NAME=KEY; repeat for several. Each key is a tenant with a prefix cache of its own, "
        f"keys of one NAME share it. [dim](comma separated in {API_KEY_VARIABLE})[/dim]",
        "Server",
        "--api-key",
        metavar="[NAME=]KEY",
    ),
]
MaxNumSeqs = Annotated[int, _option("Sequences computed in one step.", "Scheduling")]
MaxBatchedTokens = Annotated[int, _option("Tokens computed in one step.", "Scheduling")]
Threads = Annotated[
    int | None, _option("Compute threads. [dim](the cores we may use)[/dim]", "Scheduling")
]
PrefixCaching = Annotated[
    bool, _option("Reuse what earlier prompts computed. Off only serves to measure.", "Cache")
]
BlockSize = Annotated[int, _option("Tokens in one block of the cache.", "Cache")]
CacheMemory = Annotated[
    str | None,
    _option(
        "Size of the cache, for example 2GiB; wins over --gpu-memory-utilization.",
        "Cache",
        metavar="SIZE",
    ),
]
KVDtypeOption = Annotated[KVCacheDtype, _option("Precision of K and V.", "Cache")]
MemoryShare = Annotated[
    float,
    _option(
        "Share of the device's memory that weights and cache may take together. On a CPU: of the "
        "RAM this process may use, a cgroup's limit included.",
        "Cache",
    ),
]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. A mistake of the user's is one red line and exit status 2."""
    try:
        app(args=None if argv is None else list(argv), prog_name="anaphora")
    except AnaphoraError as error:
        line = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(line)
        is_ours = isinstance(error, EngineError | MeasurementError)
        raise SystemExit(1 if is_ours else 2) from None
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


@app.command()
def serve(
    model: ModelArgument = _DEFAULTS.model,
    served_model_name: ServedNames = None,
    max_model_len: MaxModelLen = _DEFAULTS.max_model_len,
    dtype: DtypeOption = _DEFAULTS.dtype,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    enable_prefix_caching: PrefixCaching = _DEFAULTS.enable_prefix_caching,
    kv_cache_memory: CacheMemory = None,
    gpu_memory_utilization: MemoryShare = _DEFAULTS.gpu_memory_utilization,
    kv_cache_dtype: KVDtypeOption = _DEFAULTS.kv_cache_dtype,
    block_size: BlockSize = _DEFAULTS.block_size,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxBatchedTokens = _DEFAULTS.max_num_batched_tokens,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Serve a model over OpenAI's API."""
    from anaphora.server.listen import bind

    _raise_file_limit()
    config = EngineConfig(
        model=model,
        max_model_len=max_model_len,
        dtype=dtype,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_memory=(
            None
            if kv_cache_memory is None
            else parse_size(kv_cache_memory, option="--kv-cache-memory")
        ),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
    )
    tenants = _tenants(api_key)
    with bind(host, port, tenants=tenants) as sock:
        asyncio.run(_serve(config, tuple(served_model_name or ()), tenants, sock))


async def _serve(
    config: EngineConfig, names: tuple[str, ...], tenants: Tenants, sock: socket.socket
) -> None:
    from anaphora.async_llm import AsyncLLM
    from anaphora.server.app import create_app
    from anaphora.server.listen import build_server, url_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # uvicorn shuts down gracefully and then raises the signal again; without a handler that would
    # end this process before the engine's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    llm = AsyncLLM(config)
    try:
        await llm.start()
        names = names or (llm.model_name,)
        web_app = create_app(llm, tenants, served_model_names=names)
        Console().print(_resolved(llm.info, names, url_of(sock), tenants))
        server = build_server(web_app)
        leaving = asyncio.create_task(_close_when_leaving(server, llm))
        await server.serve(sockets=[sock])
        leaving.cancel()
    finally:
        await llm.close()


async def _close_when_leaving(server: uvicorn.Server, llm: AsyncLLM) -> None:
    """Running requests get a while to end; then they are told why they cannot."""
    while not server.should_exit:
        await asyncio.sleep(0.1)
    await asyncio.sleep(_GRACE_SECONDS)
    await llm.close()


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(help="What to answer, or to continue with --raw; - reads standard input."),
    ],
    model: ModelOption = _DEFAULTS.model,
    max_tokens: Annotated[int, _option("Tokens to generate at most.", "Sampling", min=1)] = 256,
    temperature: Annotated[float, _option("0 always takes the best token.", "Sampling")] = 0.0,
    seed: Annotated[int | None, _option("Makes sampling repeatable.", "Sampling")] = None,
    raw: Annotated[
        bool, _option("Send the prompt as a user's message or as it is.", "Model", "--raw/--chat")
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
        if is_raw or llm.chat_template is None:
            ids = llm.tokenizer.encode(prompt, parse_special=True)
        else:
            ids = llm.chat_template.encode([{"role": "user", "content": prompt}])
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
        _option(
            "Measure the server at this base URL, for example http://127.0.0.1:8000/v1, instead of "
            "one that is started for the run.",
            "Server",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        _option("Its name at --url. [dim](the first one listed)[/dim]", "Server", "--model"),
    ] = None,
    api_key: Annotated[
        str | None, _option(f"Key for --url. [dim]({API_KEY_VARIABLE})[/dim]", "Server")
    ] = None,
    workload: Annotated[
        list[str] | None,
        _option("Measure only this; repeat for several. [dim](all)[/dim]", "Measurement"),
    ] = None,
    repeats: Annotated[
        int, _option("Times that everything is measured; medians are shown.", "Measurement")
    ] = 3,
    seed: Annotated[
        int | None,
        _option(
            "Decides all prompts. A server that has seen them answers from its cache, so take "
            "another one for each run. [dim](a new one)[/dim]",
            "Measurement",
        ),
    ] = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    kv_cache_memory: CacheMemory = "2GiB",
    profile: Annotated[
        bool,
        _option(
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
    policy: Annotated[str, _option("Which block goes first: reuse or lru.", "Cache")] = "reuse",
    capacity: Annotated[
        list[str] | None,
        _option(
            "Blocks, or a share of the trace's different blocks; repeat for several. "
            "[dim](1% 2% 5% 10% 20%)[/dim]",
            "Cache",
            metavar="BLOCKS|SHARE%",
        ),
    ] = None,
    ttl: Annotated[
        float | None,
        _option(
            "Also replay with no limit but so many seconds to live since the latest use.", "Cache"
        ),
    ] = None,
    format_: Annotated[
        str | None,
        _option(
            "mooncake, kv-cache-tester, lmcache, tau-bench or openai. [dim](look at it)[/dim]",
            "Trace",
            "--format",
        ),
    ] = None,
    sessions: Annotated[
        str,
        _option("Only files with names like this, of many: '*0.json', 'miniswe/*'.", "Trace"),
    ] = "*",
    in_flight: Annotated[
        int, _option("Conversations of tau-bench that go on at a time.", "Trace")
    ] = 16,
    model: Annotated[str, _option("Whose tokenizer reads a log of requests.", "Trace")] = (
        _DEFAULTS.model
    ),
    plot: Annotated[
        Path | None, _option("Write the picture to this file, as .svg and as .png.", "Trace")
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
        str, typer.Argument(metavar="MODEL", help="An alias (smollm2) or a hub id.")
    ] = _DEFAULTS.model,
) -> None:
    """Download a model into the local cache, check it, and print its path."""
    from anaphora.loaders.sources import ALIASES, resolve
    from anaphora.loaders.sources import pull as pull_model

    typer.echo(pull_model(model) if model in ALIASES else resolve(model).path)


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

    table = _table("Anaphora on this machine")
    table.add_row("anaphora", _version("anaphora"))
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for package in _SHOWN_PACKAGES:
        table.add_row(package, _version(package))
    table.add_row("CPU features", " ".join(cpu_features()) or "none")
    table.add_row("kernels", f"{kernel_name()} (of {', '.join(available_kernels())})")
    table.add_row("threads", f"{usable_cores()} of {os.cpu_count()} cores")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = usable_memory()
    table.add_row("memory", f"{format_size(usable)} usable of {format_size(machine)}")
    directory = models_dir()
    table.add_row("model cache", str(directory))
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        table.add_row("", f"{path.relative_to(directory)} ({format_size(path.stat().st_size)})")
    packed = sum(path.stat().st_size for path in packed_dir().glob("*.weights"))
    table.add_row("packed weights", f"{packed_dir()} ({format_size(packed)})")
    Console().print(table)


def _raise_file_limit() -> None:
    """As many sockets as the system lets us have: the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tenants(keys: list[str] | None) -> Tenants:
    """From the flags or else from the environment; an empty variable is a mistake, not no key."""
    from anaphora.server.tenants import Tenants

    if not keys and API_KEY_VARIABLE in os.environ:
        keys = os.environ[API_KEY_VARIABLE].split(",")
    return Tenants.from_flags(keys or [])


def _resolved(info: ModelInfo, names: Sequence[str], url: str, tenants: Tenants) -> Table:
    """What is going to be served, after all defaults."""
    table = _table("Anaphora serves")
    size = f"{info.num_parameters / 1e6:,.0f} M parameters"
    cache = f"{info.num_cache_tokens:,} tokens in {format_size(info.kv_cache_bytes)}"
    caching = "on" if info.enable_prefix_caching else "off"
    rows = {
        "model": f"{info.name} ({info.architecture}, {size})",
        "served as": ", ".join(names),
        "context": f"{info.max_model_len:,} tokens",
        "weights": f"{format_size(info.weight_bytes)}, {info.dtype}",
        "cache": f"{cache}, {info.kv_cache_dtype}, blocks of {info.block_size}",
        "prefix caching": caching,
        "step": f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens at most",
        "kernels": f"{info.kernels}, {info.threads} threads",
        "keys": "none needed" if tenants.is_open else f"needed; tenants: {tenants.num_tenants}",
        "URL": f"{url}/v1",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
