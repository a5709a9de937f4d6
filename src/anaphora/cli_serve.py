"""``anaphora serve``: what it prints at start, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anaphora.cli_common import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    DATABASE_VARIABLE,
    CacheMemory,
    DatabaseOption,
    DtypeOption,
    ModelArgument,
    Threads,
    console,
    database_of,
    table,
)
from anaphora.cli_serve_options import (
    LORA_MODULES,
    AdminKey,
    ApiKeys,
    AuditHits,
    BlockSize,
    CacheShares,
    ChatDate,
    ConfigFile,
    CorsOrigins,
    DiskCache,
    DiskCacheKeyFile,
    DiskCachePersist,
    DiskCacheSize,
    DiskCacheTtl,
    DrainSeconds,
    EvictionPolicy,
    Host,
    KVDtypeOption,
    LockMemory,
    LogFormatOption,
    LoraModules,
    MaxBatchedTokens,
    MaxLoraRank,
    MaxLoras,
    MaxModelLen,
    MaxNumSeqs,
    MemoryShare,
    MetricsTenants,
    OtlpTraces,
    PinQuota,
    Port,
    PrefixCaching,
    PublicPrefixes,
    ServedNames,
    SslCertfile,
    SslKeyfile,
    Strict,
    SwapSpace,
)
from anaphora.config import (
    Dtype,
    EngineConfig,
    Weights,
    format_size,
    parse_size,
)
from anaphora.errors import ConfigError
from anaphora.logs import configure_logging

if TYPE_CHECKING:
    from anaphora.async_llm import AsyncLLM
    from anaphora.server.endpoints import Endpoint
    from anaphora.server.endpoints_file import ServerConfig
    from anaphora.server.listen import DrainingServer, Tls
    from anaphora.server.service import Service
    from anaphora.server.store import Store
    from anaphora.server.tenants import Tenants
    from anaphora.server.tracing import Tracing
    from anaphora.types import ModelInfo

_DEFAULTS = EngineConfig()
logger = logging.getLogger("anaphora.server")


def serve(
    context: typer.Context,
    model: ModelArgument = _DEFAULTS.model,
    served_model_name: ServedNames = None,
    max_model_len: MaxModelLen = _DEFAULTS.max_model_len,
    dtype: DtypeOption = _DEFAULTS.dtype,
    chat_date: ChatDate = _DEFAULTS.chat_date,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    admin_key: AdminKey = None,
    config_file: ConfigFile = None,
    database: DatabaseOption = None,
    metrics_tenants: MetricsTenants = 0,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    cors_origin: CorsOrigins = (),  # type: ignore[assignment]
    log_format: LogFormatOption = "auto",
    otlp_traces_endpoint: OtlpTraces = None,
    drain_seconds: DrainSeconds = 30.0,
    strict: Strict = False,
    enable_prefix_caching: PrefixCaching = _DEFAULTS.enable_prefix_caching,
    kv_cache_memory: CacheMemory = None,
    gpu_memory_utilization: MemoryShare = _DEFAULTS.gpu_memory_utilization,
    kv_cache_dtype: KVDtypeOption = _DEFAULTS.kv_cache_dtype,
    block_size: BlockSize = _DEFAULTS.block_size,
    eviction_policy: EvictionPolicy = _DEFAULTS.eviction_policy,
    audit_hits: AuditHits = _DEFAULTS.audit_hits,
    swap_space: SwapSpace = _DEFAULTS.swap_space,
    disk_cache: DiskCache = _DEFAULTS.disk_cache,
    disk_cache_size: DiskCacheSize = _DEFAULTS.disk_cache_size,
    disk_cache_persist: DiskCachePersist = _DEFAULTS.disk_cache_persist,
    disk_cache_key_file: DiskCacheKeyFile = _DEFAULTS.disk_cache_key_file,
    disk_cache_ttl: DiskCacheTtl = _DEFAULTS.disk_cache_ttl,
    lock_memory: LockMemory = _DEFAULTS.lock_memory,
    cache_share: CacheShares = _DEFAULTS.cache_share,  # type: ignore[assignment]
    public_prefix: PublicPrefixes = _DEFAULTS.public_prefix,  # type: ignore[assignment]
    pin_quota: PinQuota = _DEFAULTS.pin_quota,
    lora_modules: LoraModules = _DEFAULTS.lora_modules,  # type: ignore[assignment]
    max_loras: MaxLoras = _DEFAULTS.max_loras,
    max_lora_rank: MaxLoraRank = _DEFAULTS.max_lora_rank,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxBatchedTokens = _DEFAULTS.max_num_batched_tokens,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Serve a model over the APIs of OpenAI, Anthropic and Databricks."""
    from anaphora.server.listen import bind
    from anaphora.server.registry import Registry, stored_keys
    from anaphora.server.tracing import Tracing

    _raise_file_limit()
    terms = None
    if config_file is not None:
        source = context.get_parameter_source("model")
        is_given = source is not None and source.name != "DEFAULT"
        terms = _read_terms(config_file, model if is_given else None, dtype, threads)
        model = model if is_given else terms.model or model
        if served_model_name:
            raise ConfigError("--served-model-name and --config both name endpoints; give one")
    config = EngineConfig(
        model=model,
        max_model_len=max_model_len,
        dtype=dtype,
        chat_date=chat_date,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_memory=(
            None
            if kv_cache_memory is None
            else parse_size(kv_cache_memory, option="--kv-cache-memory")
        ),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        eviction_policy=eviction_policy,
        audit_hits=audit_hits,
        swap_space=swap_space,
        disk_cache=disk_cache,
        disk_cache_size=disk_cache_size,
        disk_cache_persist=disk_cache_persist,
        disk_cache_key_file=disk_cache_key_file,
        disk_cache_ttl=disk_cache_ttl,
        lock_memory=lock_memory,
        cache_share=tuple(cache_share),
        public_prefix=tuple(map(_read_prefix, public_prefix)),
        pin_quota=pin_quota,
        lora_modules=tuple(lora_modules),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        weights=Weights() if terms is None else terms.weights,
        bought_capacity=() if terms is None else terms.bought_capacity,
    )
    tenants = _tenants(api_key, admin_key)
    configure_logging(log_format)
    served = _Served(
        config,
        names=tuple(served_model_name or ()),
        terms=terms,
        metrics_tenants=metrics_tenants,
        tls=_tls(ssl_certfile, ssl_keyfile),
        cors_origins=tuple(cors_origin),
        strict=strict,
        tracing=None if otlp_traces_endpoint is None else Tracing(otlp_traces_endpoint),
        drain_seconds=drain_seconds,
    )
    with contextlib.closing(_open_store(database)) as store:
        tenants.update(stored_keys(Registry(store)))
        with bind(host, port, tenants=tenants) as sock:
            asyncio.run(_serve(served, tenants, store, sock))


def repeat_lora_modules(argv: Sequence[str]) -> list[str]:
    """One option for each NAME=PATH: as in vLLM, several may follow one."""
    result: list[str] = []
    is_module = False
    for word in argv:
        if is_module and "=" in word and not word.startswith("-"):
            if result[-1] != LORA_MODULES:
                result.append(LORA_MODULES)
        else:
            is_module = word == LORA_MODULES
        result.append(word)
    return result


@dataclasses.dataclass(frozen=True)
class _Served:
    """What the operator chose beside keys and database."""

    config: EngineConfig
    names: tuple[str, ...]
    terms: ServerConfig | None
    metrics_tenants: int
    tls: Tls | None
    cors_origins: tuple[str, ...]
    strict: bool
    tracing: Tracing | None
    drain_seconds: float


async def _serve(served: _Served, tenants: Tenants, store: Store, sock: socket.socket) -> None:
    from anaphora.async_llm import AsyncLLM
    from anaphora.server.app import MAX_REQUESTS, create_app
    from anaphora.server.listen import build_server, shorten_pauses, url_of

    # uvicorn shuts down gracefully and then raises the signal again; without a handler that would
    # end this process before the engine's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    llm = AsyncLLM(served.config)
    service: Service | None = None
    try:
        await llm.start()
        terms = served.terms
        web_app = create_app(
            llm,
            tenants,
            served_model_names=served.names or (llm.model_name,),
            endpoints=() if terms is None else terms.endpoints,
            store=store,
            weights=served.config.weights,
            max_requests=MAX_REQUESTS if terms is None else terms.max_requests,
            metrics_tenants=served.metrics_tenants,
            cors_origins=served.cors_origins,
            tracing=served.tracing,
            strict=served.strict,
        )
        service = web_app.state.service
        _warn_of_strangers(service)
        shorten_pauses()
        Console().print(_resolved(served, llm.info, service, store, url_of(sock, served.tls)))
        server = build_server(web_app, served.tls)
        running = asyncio.create_task(service.run(web_app))
        leave = _leave(server, service, running, llm, served.drain_seconds)
        leaving = asyncio.create_task(leave)
        await server.serve(sockets=[sock])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)  # lines of batches are given back
        leaving.cancel()
    finally:
        await llm.close()
        if service is not None:
            service.close()
        if served.tracing is not None:
            served.tracing.close()


async def _leave(
    server: DrainingServer,
    service: Service,
    running: asyncio.Task[None],
    llm: AsyncLLM,
    seconds: float,
) -> None:
    """After a signal: new requests are handed back, and lines of batches. Those that run get
    ``seconds`` to end; then they are told why they cannot."""
    while not (server.is_leaving or server.should_exit):
        await asyncio.sleep(0.05)
    service.drain.is_draining = True
    running.cancel()
    num_running = service.limiter.num_running
    logger.info("ending: %d requests run and have %g seconds", num_running, seconds)
    end = time.monotonic() + seconds
    while service.limiter.num_running and time.monotonic() < end and not server.should_exit:
        await asyncio.sleep(0.05)
    if service.limiter.num_running:
        await llm.close()
    server.should_exit = True


def _tls(certfile: Path | None, keyfile: Path | None) -> Tls | None:
    from anaphora.server.listen import Tls

    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; give both")
    return Tls(certfile, keyfile)


def _raise_file_limit() -> None:
    """As many sockets as the system lets us have: the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tenants(keys: list[str] | None, admin_key: str | None) -> Tenants:
    """From the flags or else from the environment; an empty variable is a mistake, not no key."""
    from anaphora.server.tenants import Tenants

    if not keys and API_KEY_VARIABLE in os.environ:
        keys = os.environ[API_KEY_VARIABLE].split(",")
    if admin_key is None:
        admin_key = os.environ.get(ADMIN_KEY_VARIABLE)
    return Tenants.from_flags(keys or [], admin_key)


def _read_terms(path: Path, model: str | None, dtype: Dtype, threads: int | None) -> ServerConfig:
    """What the file says, with what was measured of the model that it will serve."""
    from anaphora.capacity import CapacityFile
    from anaphora.loaders.sources import capacity_path, name_of
    from anaphora.machine import usable_cores
    from anaphora.server.endpoints_file import read_config, read_model

    model = model or read_model(path) or _DEFAULTS.model
    measured = CapacityFile(capacity_path())
    capacity = measured.get(name_of(model), dtype, threads or usable_cores())
    return read_config(path, capacity, model)


def _open_store(given: str | None) -> Store:
    """The database; where its default place cannot be written one that ends with the server."""
    from anaphora.server.store import MEMORY, Store

    try:
        return Store(database_of(given))
    except ConfigError as error:
        if given is not None or DATABASE_VARIABLE in os.environ:
            raise
        message = f"{error}\nusage, tenants and limits are kept until the server ends"
        Console(stderr=True, soft_wrap=True).print(Text(message, style="yellow"))
        return Store(MEMORY)


def _read_prefix(path: str) -> str:
    """The system prompt in a file, without the newline that editors add."""
    where = f"--public-prefix {path}"
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8; save it as UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{where} is empty; write the system prompt into it")
    return text.removesuffix("\n")


def _resolved(served: _Served, info: ModelInfo, service: Service, store: Store, url: str) -> Table:
    """What is going to be served, after all defaults."""
    config, tenants = served.config, service.tenants
    result = table("Anaphora serves")
    size = f"{info.num_parameters / 1e6:,.0f} M parameters"
    keys = "none needed"
    if not tenants.is_open:
        keys = f"needed; tenants: {tenants.num_tenants}"
        keys += ", and an admin" if tenants.has_admin_key else ""
    rows = {
        "model": f"{info.name} ({info.architecture}, {size})",
        "served as": ", ".join(map(_describe, service.endpoints.all())),
        "context": f"{info.max_model_len:,} tokens",
        "weights": f"{format_size(info.weight_bytes)}, {info.dtype}",
        **_adapters(config, info),
        **dict(_tiers(config, info)),
        **_window(info),
        "prefix caching": "on" if info.enable_prefix_caching else "off",
        "step": f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens at most",
        "kernels": f"{info.kernels}, {info.threads} threads",
        "keys": keys,
        "database": "memory, ends with the server" if store.is_volatile else store.where,
        "URL": f"{url}/v1",
    }
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def _warn_of_strangers(service: Service) -> None:
    """A tenant that an endpoint names and nobody has a key of may be misspelt."""
    for endpoint in service.endpoints.all():
        for tenant in sorted((endpoint.tenants or frozenset()) - service.tenants.names):
            message = f"the endpoint {endpoint.name} is for {tenant}, who has no key"
            console(stderr=True).print(message, style="yellow")


def _describe(endpoint: Endpoint) -> str:
    """An endpoint in the table: its name, and its class if that is not the usual one."""
    if endpoint.workload == "interactive":
        return endpoint.name
    units = "" if endpoint.model_units is None else f", {endpoint.model_units} units"
    return f"{endpoint.name} ({endpoint.workload}{units})"


def _window(info: ModelInfo) -> dict[str, str]:
    if not info.num_window_blocks:
        return {}
    return {
        "windowed layers": f"see {info.sliding_window} tokens and keep blocks of their own for "
        "these, for the ends of prefixes and for one window in eight"
    }


def _adapters(config: EngineConfig, info: ModelInfo) -> dict[str, str]:
    if not info.max_loras:
        return {}
    kept = f"up to {info.max_loras} of rank {info.max_lora_rank}"
    loaded = f"{len(config.lora_modules)} loaded"
    return {"adapters": f"{loaded}, {kept}: {format_size(info.adapter_bytes)} kept free"}


def _tiers(config: EngineConfig, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Each tier of the cache: what it holds, and how much it takes of what was asked for."""
    asked = {
        "device": config.kv_cache_memory,
        "host": config.swap_space,
        "disk": config.disk_cache_size,
    }
    locked = "locked" if config.lock_memory else ""
    more = {"device": f"{info.kv_cache_dtype}, blocks of {info.block_size}", "host": locked}
    more["device"] += f", {locked}" if locked else ""
    kept = f"kept, used for {config.disk_cache_ttl:g} s" if config.disk_cache_persist else ""
    more["disk"] = f"{config.disk_cache}, {kept or 'ends with the server'}"
    for tier, num_bytes in info.tier_bytes.items():
        num_tokens = num_bytes * info.num_cache_tokens // max(info.kv_cache_bytes, 1)
        parts = [f"{num_tokens:,} tokens in {format_size(num_bytes)}"]
        if tier == "device" and info.num_window_blocks:
            parts[0] = f"{num_tokens:,} tokens, more of long prompts, in {format_size(num_bytes)}"
        if budget := asked.get(tier):
            parts[0] += f" of {format_size(budget)}"
        parts += [more[tier]] if more.get(tier) else []
        yield "cache" if tier == "device" else f"{tier} tier", ", ".join(parts)
