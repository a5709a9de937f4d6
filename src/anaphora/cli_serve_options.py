"""The options of ``anaphora serve``, panel by panel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from anaphora.cli_common import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, option
from anaphora.config import EvictionPolicyName, KVCacheDtype, parse_size
from anaphora.logs import LogFormat

LORA_MODULES = "--lora-modules"
_TIERS, _SHARING, _ADAPTERS = "Tiers below the cache", "Sharing the cache", "Adapters"


def _size(name: str) -> Callable[[str | int], int]:
    """A parser of sizes whose error names the option; the default comes as a number."""

    def parse(value: str | int) -> int:
        return parse_size(value, option=name) if isinstance(value, str) else value

    return parse


ServedNames = Annotated[
    list[str] | None,
    option("Name that clients send as model; repeat for several.", "Model", "--served-model-name"),
]
MaxModelLen = Annotated[
    int | None,
    option(
        "Tokens of prompt and answer together. [dim](what model and cache allow)[/dim]", "Model"
    ),
]
ChatDate = Annotated[
    str | None,
    option(
        "The date for chat templates that print one. With a new date no old prefix is found. "
        "[dim](the day of the start)[/dim]",
        "Model",
        metavar="YYYY-MM-DD",
    ),
]
Host = Annotated[str, option("Address to listen on. Others than loopback need a key.", "Server")]
Port = Annotated[
    int, option("Port to listen on; 0 takes a free one and prints it.", "Server", max=65535, min=0)
]
ApiKeys = Annotated[
    list[str] | None,
    option(
        "KEY or NAME=KEY; repeat for several. Each key is a tenant with a prefix cache of its own, "
        f"keys of one NAME share it. [dim](comma separated in {API_KEY_VARIABLE})[/dim]",
        "Server",
        "--api-key",
        metavar="[NAME=]KEY",
    ),
]
AdminKey = Annotated[
    str | None,
    option(
        "Key that may also purge what is not its own; with one, /metrics needs it. "
        f"[dim]({ADMIN_KEY_VARIABLE})[/dim]",
        "Server",
        metavar="KEY",
    ),
]
Strict = Annotated[
    bool,
    option(
        "Refuse request fields that the route does not know, instead of ignoring them.",
        "Server",
        "--strict",
    ),
]
SslCertfile = Annotated[
    Path | None, option("Certificate for TLS, PEM. [dim](no TLS)[/dim]", "Server", metavar="FILE")
]
SslKeyfile = Annotated[Path | None, option("Its key, PEM.", "Server", metavar="FILE")]
CorsOrigins = Annotated[
    list[str],
    option(
        "Origin of web pages that may read answers, such as https://chat.example.com; repeat for "
        "several. [dim](none)[/dim]",
        "Server",
        "--cors-origin",
        metavar="ORIGIN",
    ),
]
LogFormatOption = Annotated[
    LogFormat, option("Log lines; auto is text on a terminal, else JSON.", "Server", "--log-format")
]
OtlpTraces = Annotated[
    str | None,
    option(
        "Send OpenTelemetry spans to this collector, such as http://localhost:4318/v1/traces. "
        "[dim](none)[/dim]",
        "Server",
        "--otlp-traces-endpoint",
        metavar="URL",
    ),
]
DrainSeconds = Annotated[
    float, option("Seconds that running requests have to end after SIGTERM.", "Server", min=0.0)
]
ConfigFile = Annotated[
    Path | None,
    option(
        "anaphora.yaml: endpoints with their classes, limits and prices. "
        "[dim](one interactive endpoint)[/dim]",
        "Server",
        "--config",
        metavar="FILE",
    ),
]
MetricsTenants = Annotated[
    int,
    option(
        "Tenants that /metrics shows by name, the first ones seen; all others are one, 'other'.",
        "Server",
        min=0,
    ),
]
MaxNumSeqs = Annotated[int, option("Sequences computed in one step.", "Scheduling")]
MaxBatchedTokens = Annotated[int, option("Tokens computed in one step.", "Scheduling")]
PrefixCaching = Annotated[
    bool, option("Reuse what earlier prompts computed. Off only serves to measure.", "Cache")
]
BlockSize = Annotated[int, option("Tokens in one block of the cache.", "Cache")]
KVDtypeOption = Annotated[KVCacheDtype, option("Precision of K and V.", "Cache")]
MemoryShare = Annotated[
    float,
    option(
        "Share of the device's memory that weights and cache may take together. On a CPU: of the "
        "RAM this process may use, a cgroup's limit included.",
        "Cache",
    ),
]
EvictionPolicy = Annotated[
    EvictionPolicyName, option("Which block goes first when room is needed.", "Cache")
]
AuditHits = Annotated[
    float,
    option(
        "Part of the hits, 0 to 1, that are computed again and compared: one at a time, while the "
        "server is idle; others are counted as skipped.",
        "Cache",
    ),
]
SwapSpace = Annotated[
    int,
    option(
        "Host memory for blocks that the cache has no room for, for example 4GiB. "
        "[dim](none)[/dim]",
        _TIERS,
        metavar="SIZE",
        parser=_size("--swap-space"),
        show_default=False,
    ),
]
LockMemory = Annotated[
    bool, option("Keep cached blocks in memory out of the swap partition.", _TIERS, "--lock-memory")
]
DiskCache = Annotated[
    str | None,
    option("Existing directory for blocks on disk, always encrypted. [dim](none)[/dim]", _TIERS,
           metavar="DIR"),
]  # fmt: skip
DiskCacheSize = Annotated[
    int | None,
    option(
        "How much of it may be used, for example 20GiB.",
        _TIERS,
        metavar="SIZE",
        parser=_size("--disk-cache-size"),
    ),
]
DiskCachePersist = Annotated[
    bool,
    option(
        "Find the blocks on disk again after a restart; needs a key file.",
        _TIERS,
        "--disk-cache-persist",
    ),
]
DiskCacheKeyFile = Annotated[
    str | None,
    option(
        "The key that they are encrypted under: 32 bytes or 64 hex digits, mode 600.",
        _TIERS,
        metavar="FILE",
    ),
]
DiskCacheTtl = Annotated[
    float,
    option("Seconds after which a kept block is not used any more.", _TIERS, metavar="SECONDS"),
]
CacheShares = Annotated[
    list[str],
    option(
        "Percent of each tier kept for, and at most filled by, a tenant or a class (provisioned, "
        "interactive, batch): tenant:alice=20:60, class:batch=0:10, tenant:*=0:50; repeat for "
        "several.",
        _SHARING,
        "--cache-share",
        metavar="WHO=MIN:MAX",
    ),
]
PinQuota = Annotated[float, option("Part of the cache that one tenant may pin, 0 to 1.", _SHARING)]
LoraModules = Annotated[
    list[str],
    option(
        "LoRA adapter to load: a directory as PEFT saves it, and the model name that clients send "
        "for it; repeat for several.",
        _ADAPTERS,
        LORA_MODULES,
        metavar="NAME=PATH",
    ),
]
MaxLoras = Annotated[
    int | None,
    option(
        "Adapters loaded at a time, also those that the admin loads later; memory is kept free for "
        "them. [dim](those of --lora-modules)[/dim]",
        _ADAPTERS,
    ),
]
MaxLoraRank = Annotated[int, option("Highest rank of an adapter.", _ADAPTERS)]
PublicPrefixes = Annotated[
    list[str],
    option(
        "Text file with a system prompt that is no secret: all tenants share its blocks; repeat "
        "for several. A newline at the file's end is not part of it.",
        _SHARING,
        "--public-prefix",
        metavar="FILE",
    ),
]
