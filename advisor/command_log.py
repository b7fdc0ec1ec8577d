"""What commands log goes to standard error, a line each: standard output is for whoever starts them."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO, cast

import stamina
import structlog


class _StandardError:
    """Standard error as it is at each write. A reader that went away ends what it would read, and no thread."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def log_to_standard_error() -> None:
    """Set it up for this process."""
    # Connections say themselves when they fall and when they stand again, not at each attempt between.
    stamina.instrumentation.set_on_retry_hooks([])
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
    )
