"""Where commands print their tables."""

from __future__ import annotations

from rich.console import Console

FILE_COLUMNS = 1000


def table_console() -> Console:
    """As wide as the terminal; where there is none, wide: lines broken in a file can be neither read nor searched."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(markup=False, width=FILE_COLUMNS)
