"""What several commands share: options, and the tables they print."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from anaphora.config import Dtype

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


def table(title: str) -> Table:
    """Names and values, without a header."""
    result = Table(title=title, title_justify="left", show_header=False)
    result.add_column(style="bold")
    result.add_column(overflow="fold")
    return result
