"""What commands log goes to standard error, a line each: standard output is for whoever starts them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Final, TextIO, cast

import stamina
import structlog
from structlog.typing import Processor

from advisor.log_format import LogFormat, LogLevel

_LEVELS: Final = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}


class _StandardError:
    """Standard error as it is at each write. A reader that went away ends what it would read, and no thread."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def log_to_standard_error(log_format: LogFormat = LogFormat.CONSOLE, level: LogLevel = LogLevel.INFO) -> None:
    """Set it up for this process. Warnings of libraries that log by themselves come in the same form."""
    # Connections say themselves when they fall and when they stand again, not at each attempt between.
    stamina.instrumentation.set_on_retry_hooks([])
    stream = cast("TextIO", _StandardError())
    first: list[Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    last = _rendering(log_format)
    structlog.configure(
        processors=[*first, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=first,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    ))  # fmt: skip
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[level], logging.WARNING), force=True)


def _rendering(log_format: LogFormat) -> Sequence[Processor]:
    if log_format is LogFormat.JSON:
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
        ]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
