"""The log of a running service, as its admin view asks it."""

from __future__ import annotations

from advisor.log_queries import LogQueries
from advisor.service import AdvisorService


class LogDesk:
    """Queries that are opened when they are first asked for. On one event loop, which closes them at its end."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._queries: LogQueries | None = None

    @property
    def queries(self) -> LogQueries:
        """Raises `LogError`."""
        if self._queries is None:
            self._queries = self._service.open_queries()
        return self._queries

    async def close(self) -> None:
        """Idempotent."""
        if self._queries is not None:
            await self._queries.close()
            self._queries = None
