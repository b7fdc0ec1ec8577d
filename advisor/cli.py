"""The command line: finds the rooms' commands by entry point and imports only the one that is asked for.

A command is an entry point of the group `kvadvisor.commands` that names a plain function with Typer's annotations, or
a `typer.Typer`. `--help` shows the first line of its docstring, or of its module's, read from the source.

Errors: an exception whose class has an int attribute `exit_status` is expected (bad input, a full disk, a port in
use). Its text is one sentence a line that says what, where and what to do; the command line prints it to standard
error and ends with that status. Each room's base error sets `exit_status = 2`. Everything else is a fault of ours and
keeps its traceback. Ctrl-C ends with 130. Standard output that cannot be written ends with 1: in silence where its
reader went away (`| head`), else with a sentence.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup

from advisor.errors import CommandError
from advisor.log_format import LogFormat, LogLevel

ENTRY_POINT_GROUP = "kvadvisor.commands"
INTERRUPTED_STATUS = 130
OUTPUT_LOST_STATUS = 1


class EntryPointGroup(TyperGroup):
    """Lists stand-ins that know only their name and first line, and loads the command that is invoked."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entry_points = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
        for name, entry_point in sorted(self._entry_points.items()):
            self.add_command(TyperCommand(name=name, help=summary(entry_point)))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        # Imported with a command alone: `--help` stays quick.
        from advisor.command_log import log_to_standard_error

        log_to_standard_error(LogFormat(ctx.params["log_format"]), LogLevel(ctx.params["log_level"]))
        return name, command if name is None else load(self._entry_points[name]), rest


def load(entry_point: EntryPoint) -> Any:
    """The command that an entry point names. Raises `CommandError` where it cannot be imported."""
    # An import makes no garbage: to look for some takes a seventh of the time until a command begins.
    gc.disable()
    try:
        target = entry_point.load()
    except ImportError as error:
        package = entry_point.dist.name if entry_point.dist is not None else entry_point.module
        raise CommandError(f"command {entry_point.name} cannot be loaded ({error}): install {package} again") from error
    finally:
        gc.enable()
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    single = typer.Typer(add_completion=False)
    single.command(entry_point.name)(target)
    return typer.main.get_command(single)


def summary(entry_point: EntryPoint) -> str:
    """First docstring line of the function that an entry point names, of the module where it names no function.

    Without importing the module; empty if there is none.
    """
    try:
        spec = find_spec(entry_point.module)
    except ImportError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    module = ast.parse(Path(spec.origin).read_bytes())
    named = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr)
    return (ast.get_docstring(next(named, module)) or "").partition("\n")[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvadvisor {version('kvadvisor')}")
        raise typer.Exit


app = typer.Typer(cls=EntryPointGroup, add_completion=False, no_args_is_help=True)


@app.callback()
def kvadvisor(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Of what is logged to standard error: for people, or an object a line.")
    ] = LogFormat.CONSOLE,
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.INFO,
) -> None:
    """See which KV blocks live where, and have them moved to the right volume."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line, the process's by default, and ends with `SystemExit`."""
    output = _Output(sys.stdout)
    with contextlib.redirect_stdout(cast(TextIO, output)):
        status = _status_of(arguments, output)
    sys.exit(OUTPUT_LOST_STATUS if output.is_lost() else status)


def _status_of(arguments: Sequence[str] | None, output: _Output) -> str | int | None:
    try:
        typer.main.get_command(app).main(arguments, prog_name="kvadvisor")
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except SystemExit as ended:
        return ended.code
    except Exception as error:
        status = getattr(type(error), "exit_status", None)
        if isinstance(status, int):
            for line in str(error).splitlines():
                print(f"kvadvisor: {line}", file=sys.stderr)
            return status
        if error is not output.fault:
            raise
    return OUTPUT_LOST_STATUS


class _Output:
    """Standard output that remembers its own fault, so that it is told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self.fault: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as fault:
            self.fault = fault
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as fault:
            self.fault = fault
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def is_lost(self) -> bool:
        """Whether something printed could not be written. Says so, unless who read it went away (`| head`)."""
        with contextlib.suppress(OSError):
            self.flush()
        if self.fault is None:
            return False
        # The interpreter writes what is left when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self.fault.errno != errno.EPIPE:
            remedy = "free space there, or send it elsewhere"
            print(f"kvadvisor: standard output cannot be written ({self.fault.strerror}): {remedy}", file=sys.stderr)
        return True


if __name__ == "__main__":
    main()
