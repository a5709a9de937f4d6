"""``anaphora tenants``, ``keys``, ``limits`` and ``usage``: the database from the command line.

A server that runs takes changes over within seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from anaphora.cli_common import DatabaseOption, console, database_of, option
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.server.registry import Registry
    from anaphora.server.store import Store

tenants_app = typer.Typer(help="Who may use the server.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
limits_app = typer.Typer(help="What tenants may have in a minute.", no_args_is_help=True)

_DAY = 86400.0
_WHOLE = ("key", "tenant", "endpoint")  # columns that people copy from
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]
KeyDays = Annotated[
    float | None, option("Days until it expires. [dim](never)[/dim]", "Key", metavar="DAYS")
]
IsAdmin = Annotated[
    bool, option("A key of the administrator: it belongs to no tenant.", "Key", "--admin")
]
_SUMMED = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost", "saved")
Every = "0: none at all. [dim](no limit)[/dim]"


@contextlib.contextmanager
def _registry(database: str | None) -> Iterator[Registry]:
    from anaphora.server.registry import Registry

    with _store(database) as store:
        yield Registry(store)


@contextlib.contextmanager
def _store(database: str | None) -> Iterator[Store]:
    from anaphora.server.store import MEMORY, Store

    where = database_of(database)
    if where == MEMORY:
        raise ConfigError("--database is 'memory', which ends with this command; give a path")
    store = Store(where)
    try:
        yield store
    finally:
        store.close()


@tenants_app.command("add")
def add_tenant(tenant: TenantArgument, database: DatabaseOption = None) -> None:
    """Add a tenant, and print its first key."""
    with _registry(database) as registry:
        registry.add_tenant(tenant)
        key, secret = registry.create_key(tenant)
    _show_secret(secret, f"tenant {tenant} may use the server with {key.id}")


@tenants_app.command("list")
def list_tenants(database: DatabaseOption = None) -> None:
    """List tenants."""
    with _registry(database) as registry:
        rows = registry.tenants()
    table = _table("tenant", "keys", "since")
    for row in rows:
        table.add_row(row["name"], str(row["num_keys"]), _time(row["created_at"]))
    console().print(table)


@tenants_app.command("remove")
def remove_tenant(
    tenant: TenantArgument,
    yes: Annotated[bool, option("Do not ask.", "Tenant", "--yes")] = False,
    database: DatabaseOption = None,
) -> None:
    """Remove a tenant with its keys, limits, files and batches; its usage stays on record."""
    if sys.stdin.isatty() and not yes:
        typer.confirm(f"Delete {tenant}, its keys, limits, files and batches?", abort=True)
    with _registry(database) as registry:
        registry.remove_tenant(tenant)
    typer.echo(f"tenant {tenant} is removed; running servers erase what they have cached for it")


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")] = "",
    admin: IsAdmin = False,
    days: KeyDays = None,
    database: DatabaseOption = None,
) -> None:
    """Create a further key, and print it: it is shown this once."""
    if admin == bool(tenant):
        raise ConfigError("give a TENANT, or --admin for a key of the administrator")
    seconds = None if days is None else days * _DAY
    with _registry(database) as registry:
        key, secret = registry.create_key(tenant, is_admin=admin, seconds=seconds)
    _show_secret(secret, f"{key.id} of {'the administrator' if admin else tenant}")


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(metavar="TENANT")] = None,
    database: DatabaseOption = None,
) -> None:
    """List keys, without their secrets."""
    with _registry(database) as registry:
        keys = registry.keys(tenant)
        usable = {key.id for key in registry.usable_keys()}
    table = _table("key", "ends in", "tenant", "created", "expires", "state")
    for key in keys:
        state = "works" if key.id in usable else "revoked" if key.revoked_at else "expired"
        table.add_row(
            key.id, f"…{key.hint}", key.tenant, _time(key.created_at), _time(key.expires_at), state
        )
    console().print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID")], database: DatabaseOption = None
) -> None:
    """Revoke a key by its id."""
    with _registry(database) as registry:
        registry.revoke_key(key_id)
    typer.echo(f"{key_id} opens nothing any more")


@limits_app.command("set")
def set_limits(
    tenant: Annotated[str, typer.Argument(help="A tenant, or * for each without its own.")],
    endpoint: Annotated[str, typer.Argument(help="An endpoint, or * for all together.")] = "*",
    requests: Annotated[int | None, option(f"Requests a minute. {Every}", "Limits")] = None,
    input_tokens: Annotated[int | None, option(f"Input tokens a minute. {Every}", "Limits")] = None,
    output_tokens: Annotated[
        int | None, option(f"Output tokens a minute. {Every}", "Limits")
    ] = None,
    concurrent: Annotated[int | None, option(f"Requests at a time. {Every}", "Limits")] = None,
    database: DatabaseOption = None,
) -> None:
    """Replace what limits a tenant; without any option nothing limits it any more."""
    from anaphora.server.registry import LimitTerms

    terms = LimitTerms(
        requests_per_minute=requests,
        input_tokens_per_minute=input_tokens,
        output_tokens_per_minute=output_tokens,
        concurrent_requests=concurrent,
    )
    with _registry(database) as registry:
        registry.set_limits(tenant, endpoint, terms)
        known = {row["name"] for row in registry.tenants()}
    if tenant != "*" and tenant not in known:
        message = f"the database has no tenant {tenant}; the limits wait for one of that name"
        console(stderr=True).print(message, style="yellow")
    _print_limits(database)


@limits_app.command("list")
def list_limits(database: DatabaseOption = None) -> None:
    """List limits; those of endpoints are in anaphora.yaml."""
    _print_limits(database)


def _print_limits(database: str | None) -> None:
    import dataclasses

    with _registry(database) as registry:
        limits = registry.limits()
    table = _table(
        "tenant", "endpoint", "requests/min", "input tokens/min", "output tokens/min", "at a time"
    )
    for (tenant, endpoint), terms in limits.items():
        values = dataclasses.astuple(terms)
        table.add_row(tenant, endpoint, *["" if v is None else f"{v:,}" for v in values])
    console().print(table)


def usage(
    by: Annotated[
        str,
        option("Columns to sum up by, with commas: tenant, key_id, endpoint, class, adapter, "
               "finish_reason, status, day.", "Totals"),
    ] = "tenant,endpoint",
    tenant: Annotated[str | None, option("Only this tenant. [dim](all)[/dim]", "Rows")] = None,
    since: Annotated[
        str | None, option("From this time on, for example 2026-11-30. UTC.", "Rows")
    ] = None,
    until: Annotated[str | None, option("Before this time.", "Rows")] = None,
    config: Annotated[
        Path | None,
        option("anaphora.yaml with the prices that turn tokens into money.", "Totals"),
    ] = None,
    csv: Annotated[
        Path | None, option("Write every row to this file instead; - is standard output.", "Export")
    ] = None,
    parquet: Annotated[Path | None, option("The same as Parquet.", "Export")] = None,
    database: DatabaseOption = None,
) -> None:  # fmt: skip
    """Show what was used, what it cost and what caching saved; or export every row."""
    from anaphora.server.admin import parse_time
    from anaphora.server.usage_report import Filter, csv_chunks, rows, totals, write_parquet

    with _store(database) as store:
        which = Filter(
            tenant=tenant, since=parse_time("--since", since), until=parse_time("--until", until)
        )
        if parquet is not None:
            write_parquet(rows(store, which), parquet)
        if csv is not None:
            with _output(csv) as file:
                file.writelines(csv_chunks(rows(store, which)))
        if csv is None and parquet is None:
            names = [name for name in by.split(",") if name]
            found = totals(store, names, which, _prices(config))
            console().print(_usage_table(names, found))


def _prices(config: Path | None) -> Any:
    from anaphora.server.endpoints_file import read_prices

    return {} if config is None else read_prices(config)


def _usage_table(names: list[str], found: list[dict[str, Any]]) -> Table:
    has_money = any("cost" in row for row in found)
    money = ("cost", "saved") if has_money else ()
    columns = ("requests", "input", "cached", "hit rate", "output", *money)
    table = Table(title="Usage, in tokens", title_justify="left")
    if has_money and not all("cost" in row for row in found):
        table.caption = "rows without a price belong to endpoints that the file does not price"
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    sums = {name: sum(row.get(name, 0) for row in found) for name in _SUMMED}
    total = [{**dict.fromkeys(names, ""), names[0]: "all", **sums}] if len(found) > 1 else []
    for row in found + total:
        rate = row["cached_tokens"] / row["input_tokens"] if row["input_tokens"] else 0.0
        cells = [f"{row['requests']:,}", f"{row['input_tokens']:,}", f"{row['cached_tokens']:,}"]
        cells += [f"{rate:.1%}", f"{row['output_tokens']:,}"]
        if has_money:
            cells += [f"{row[name]:,.6g}" if name in row else "" for name in ("cost", "saved")]
        table.add_row(*[str(row[name]) for name in names], *cells)
    return table


@contextlib.contextmanager
def _output(path: Path) -> Iterator[Any]:
    if str(path) == "-":
        yield sys.stdout
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            yield file


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, no_wrap=name in _WHOLE, overflow="fold")
    return table


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _show_secret(secret: str, what: str) -> None:
    """The secret alone on standard output, so that it can be piped to where it is kept."""
    if os.isatty(1):
        typer.echo(f"{what}\n\n    {secret}\n\nIt is shown this once; only its hash is kept.")
    else:
        typer.echo(secret)
