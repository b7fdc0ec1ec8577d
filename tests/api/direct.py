"""Requests to an app without a socket, for answers that do not stream."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sample_actions import SampleActions
from sample_deletions import SampleDeletions

from advisor.api.app import create_app
from advisor.deletion_views import AdvisorDeletions
from advisor.views import AdvisorActions, AdvisorReader

METRICS = b"# TYPE kvadvisor_blocks gauge\nkvadvisor_blocks 7\n"


class Direct:
    """The admin view over `reader`. `raises` lets a fault of the app through instead of answering 500."""

    def __init__(
        self,
        reader: AdvisorReader,
        *,
        raises: bool = True,
        actions: AdvisorActions | None = None,
        deletions: AdvisorDeletions | None = None,
    ) -> None:
        app = create_app(
            reader,
            metrics=lambda: METRICS,
            actions=actions or SampleActions(),
            deletions=deletions or SampleDeletions(),
        )
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=raises)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1:8470") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())
