"""Opening the API's port: loopback only, and a plain word when it is taken."""

from __future__ import annotations

import asyncio
import socket

import pytest

from advisor.api.errors import ApiError
from advisor.api.server import open_socket


def test_answers_of_two_parts_do_not_wait_for_the_reader() -> None:
    """Without TCP_NODELAY each took 40 ms: Nagle's algorithm holds the second part, and the reader its confirmation."""

    async def accepted() -> int:
        came: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = open_socket("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            with socket.create_connection(listener.getsockname(), timeout=60):
                return await came

    assert asyncio.run(accepted())


def test_port_zero_takes_a_free_one() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_port_in_use_is_named_with_the_remedy(free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        with pytest.raises(ApiError, match=rf"port {free_port} of 127\.0\.0\.1 is in use: .* api\.port"):
            open_socket("localhost", free_port)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_address_that_others_reach_is_refused(host: str) -> None:
    with pytest.raises(ApiError, match="without a login"):
        open_socket(host, 0)


def test_name_that_is_no_address_is_refused() -> None:
    with pytest.raises(ApiError, match=r"'db\.example'"):
        open_socket("db.example", 0)


def test_who_connects_before_it_is_served_waits_and_the_port_is_taken_at_once() -> None:
    with open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass
        with pytest.raises(ApiError, match="in use"):
            open_socket("127.0.0.1", port)
