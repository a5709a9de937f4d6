"""What several commands share: options, and the tables they print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from typer import rich_utils

from anaphora.config import Dtype, EngineConfig, parse_size
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.batch.client import Client

API_KEY_VARIABLE = "ANAPHORA_API_KEY"
ADMIN_KEY_VARIABLE = "ANAPHORA_ADMIN_KEY"


def option(help_text: str, panel: str, *names: str, **more: Any) -> Any:
    """An option in one panel of --help."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


MODEL_HELP = "An alias (see [bold]anaphora pull[/bold]), a GGUF file, a directory or a hub id."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
DtypeOption = Annotated[Dtype, option("Precision of the weights.", "Model")]
Threads = Annotated[
    int | None, option("Compute threads. [dim](the cores we may use)[/dim]", "Scheduling")
]
CacheMemory = Annotated[
    str | None,
    option(
        "Size of the cache, for example 2GiB; wins over --gpu-memory-utilization.",
        "Cache",
        metavar="SIZE",
    ),
]

Url = Annotated[
    str | None,
    option("A server's base URL, as http://127.0.0.1:8000/v1, instead of a model here.", "Server"),
]
Model = Annotated[
    str | None,
    option(f"{MODEL_HELP} At --url: its name there. [dim](smollm2; the first)[/dim]", "Model"),
]
ApiKey = Annotated[str | None, option(f"Key for --url. [dim]({API_KEY_VARIABLE})[/dim]", "Server")]


_PIPE_WIDTH = 200
DATABASE_VARIABLE = "ANAPHORA_DATABASE"
DatabaseOption = Annotated[
    str | None,
    option(
        "Where tenants, keys, limits, usage, files and batches are kept: a path of SQLite, a "
        f"postgresql:// URL, or memory. [dim]({DATABASE_VARIABLE}, else "
        "~/.local/share/anaphora/anaphora.db)[/dim]",
        "Database",
        "--database",
        metavar="PATH",
    ),
]


def database_of(given: str | None) -> str:
    """The option's value, or the environment's, or the default path."""
    if given is None:
        given = os.environ.get(DATABASE_VARIABLE)
    if given == "":
        raise ConfigError(f"--database (or {DATABASE_VARIABLE}) is empty; give a path, or 'memory'")
    if given is not None:
        return given
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return str(Path(data).expanduser() / "anaphora" / "anaphora.db")


def open_client(
    model: str | None,
    url: str | None,
    api_key: str | None,
    concurrency: int | None,
    dtype: Any,
    kv_cache_memory: str | None,
    threads: int | None,
) -> Client:
    """What answers: the server at ``url``, or an engine process of our own."""
    from anaphora.batch.client import STEP_TOKENS, Client

    if url is not None:
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        return Client(url, model=model, api_key=key, concurrency=concurrency)
    if api_key is not None:
        raise ConfigError("--api-key is for --url; leave it out")
    given: dict[str, Any] = {}
    if kv_cache_memory is not None:
        given["kv_cache_memory"] = parse_size(kv_cache_memory)
    config = EngineConfig(
        model=model or EngineConfig().model,
        dtype=dtype,
        threads=threads,
        max_num_batched_tokens=STEP_TOKENS,
        **given,
    )
    return Client(config, concurrency=concurrency)


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; where there is none, as wide as tables are, so that no line is
    folded in a pipe."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


def fold_help() -> None:
    """Has typer's --help go on in the next line where a narrow terminal would cut words off."""
    for module in (rich_utils, columns):
        vars(module)["Table"] = _FoldedTable


class _FoldedTable(Table):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Words that do not fit go on in the next line."""
        for column in self.columns:
            column.overflow = "fold"
        return super().__rich_console__(console, options)


def table(title: str | None = None) -> Table:
    """Names and values, without a header."""
    result = Table(title=title, title_justify="left", show_header=False)
    result.add_column(style="bold")
    result.add_column(overflow="fold")
    return result
