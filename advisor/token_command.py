"""Make, list and revoke the tokens that open a service's admin API."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from advisor.access.errors import TokensError
from advisor.access.identity import Scope
from advisor.access.token_file import TokenFile
from advisor.settings import load_settings

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

NEVER = "never"
_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
_FOR = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)

Config = Annotated[Path | None, typer.Option("--config", help="The service's settings (TOML), as serve takes them.")]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Whose it is; the audit names them.")],
    scope: Annotated[str, typer.Option(help="What it may do: read, plan, operate or admin.")],
    tenant: Annotated[str, typer.Option(help="The one tenant whose blocks it sees; left out, all.")] = "",
    expires: Annotated[str, typer.Option(help="After how long: 12h, 30d, or never.")] = "90d",
    config: Config = None,
) -> None:
    """Make a token and show it, this once. A running service takes it at once."""
    try:
        wanted = Scope.named(scope)
    except ValueError as error:
        raise TokensError(str(error)) from error
    file = _file(config)
    others = [each.id for each in file.book().named(name, time.time_ns() // 1000)]
    token, text = file.create(name, wanted, tenant, valid_s=_seconds(expires))
    typer.echo(text)
    seen = f"tenant {tenant} alone" if tenant else "all tenants"
    facts = f"{scope}, {seen}, {_until(token.expires_us)}"
    typer.echo(f"token {token.id} of {name}: {facts}; it is not shown again", err=True)
    if others:
        ids = ", ".join(others)
        said = f"{name} has other good tokens, {ids}: the audit does not tell them apart; revoke those, or rename this"
        typer.echo(f"warning: {said}", err=True)


@app.command("list")
def list_tokens(config: Config = None) -> None:
    """The tokens there are, without their secrets, which are not kept."""
    table = Table("id", "name", "scope", "tenant", "made", "good")
    for token in _file(config).book():
        made, good = _day(token.created_us), _until(token.expires_us)
        table.add_row(token.id, token.name, token.scope, token.tenant or "all", made, good)
    Console(markup=False).print(table)


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(help="Its id, as list names it.")],
    config: Config = None,
) -> None:
    """Take a token back. A running service refuses it at once, and ends the sessions that it opened."""
    token = _file(config).revoke(token_id)
    typer.echo(f"token {token.id} of {token.name} is revoked")


def _file(config: Path | None) -> TokenFile:
    directory = load_settings(config, os.environ).directory
    if os.geteuid() == 0 and directory.is_dir():
        _become(directory.stat())
    return TokenFile(directory)


def _become(owner: os.stat_result) -> None:
    """Root goes on as the user that serves, so that what it makes is that user's, and it follows no trap of theirs."""
    if owner.st_uid != 0:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)


def _seconds(text: str) -> float:
    if text == NEVER:
        return 0.0
    form = _FOR.fullmatch(text)
    if form is None:
        raise TokensError(f"a token cannot be good for {text!r}: give minutes, hours or days (30d), or never")
    return float(int(form[1]) * _UNITS_S[form[2]])


def _day(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="minutes").replace("+00:00", "Z")


def _until(expires_us: int) -> str:
    return f"until {_day(expires_us)}" if expires_us else "for ever"
