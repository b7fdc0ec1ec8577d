"""Requests to an app without a socket, for answers that do not stream."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sample_parts import sample_parts

from advisor.api.app import create_app
from advisor.views import AdvisorReader


class Direct:
    """The admin view over `reader` and `parts`. `raises` lets a fault of the app through instead of answering 500."""

    def __init__(self, reader: AdvisorReader, *, raises: bool = True, **parts: Any) -> None:
        app = create_app(sample_parts(reader=reader, **parts))
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=raises)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1:8470") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())
