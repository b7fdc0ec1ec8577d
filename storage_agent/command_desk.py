"""Commands come in as bytes from whatever carries them, are carried out by an agent, and answered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from event_plane.errors import EventPlaneError
from storage_agent.block_wire import KeyWire, keys_from_wire
from storage_agent.command_lane import Turns
from storage_agent.command_wire import (
    CompactReply,
    CompactRequest,
    CopyRequest,
    DeleteRequest,
    MoveRequest,
    RefusedReply,
    RefuseRequest,
    RegisterRequest,
    Reply,
    Request,
    ResizeRequest,
    ScrubReply,
    ScrubRequest,
    StatReply,
    StatRequest,
    UnregisterRequest,
    VolumeReply,
    decode_request,
    encode,
    outcome_to_wire,
)
from storage_agent.data_wire import BorrowRequest, DoneReply, OfferRequest
from storage_agent.errors import CommandRefused, DescriptorError, StaleTerm, StorageAgentError
from storage_agent.port import AgentPort

if TYPE_CHECKING:  # callers import this file too, and need no agent
    from storage_agent.data_desk import DataDesk
    from storage_agent.registered_volumes import VolumeOrders

WAITING_COMMANDS_MAX = 1024
DRAIN_S_MAX = 60.0
MOVE_THREADS = 16
"""Copies, deletes and moves under way at once. A store that does not answer keeps one for each command, and one each
time that is asked again before it has ended."""

Answer = Callable[[bytes], None]
"""Sends an answer to whoever asked. May be called from any thread."""


class CommandDesk:
    """Answers `stat` beside what is under way; several threads carry out copies, deletes and moves, those on the same
    blocks in the order they came; another what takes longer, one what is asked of volumes, two what clients and other
    agents ask.

    A command that was given up by its caller still runs, and the agent keeps its answer for when it is asked again.
    """

    def __init__(self, agent: AgentPort, data: DataDesk, volumes: VolumeOrders, name: str) -> None:
        """`name` is seen in the threads' names. `data` answers those that move bytes themselves."""
        self._agent = agent
        self._data = data
        self._orders = volumes
        self._looks = _Row(self._carry_out, f"stats-{name}")
        self._short = _Row(self._carry_out, f"moves-{name}", MOVE_THREADS)
        self._long = _Row(self._carry_out, f"scrubs-{name}")
        self._volumes = _Row(self._carry_out, f"volumes-{name}")
        self._clients = _Row(self._carry_out, f"clients-{name}")
        self._loans = _Row(self._carry_out, f"loans-{name}")

    def take(self, payload: bytes, answer: Answer) -> None:
        """Never waits for a command. Whatever `payload` is, it is answered, unless the desk is closed before."""
        try:
            request = decode_request(payload)
        except CommandRefused as error:
            answer(encode(RefusedReply(str(error))))
            return
        match request:
            case StatRequest() | RefuseRequest():
                self._looks.put(request, answer)
            case ScrubRequest() | CompactRequest():
                self._long.put(request, answer)
            case RegisterRequest() | UnregisterRequest() | ResizeRequest():
                self._volumes.put(request, answer)
            case CopyRequest() | DeleteRequest() | MoveRequest():
                self._short.put(request, answer)
            case BorrowRequest() | OfferRequest():
                self._loans.put(request, answer)
            case _:
                self._clients.put(request, answer)

    def close(self) -> None:
        """Finish the commands under way, forget those that wait. Idempotent."""
        self._looks.close()
        self._short.close()
        self._long.close()
        self._volumes.close()
        self._clients.close()
        self._loans.close()

    def _carry_out(self, request: Request) -> Reply:
        agent = self._agent
        try:
            match request:
                case CopyRequest(command_id, keys, source, target, term):
                    return outcome_to_wire(agent.copy(command_id, keys_from_wire(keys), source, target, term=term))
                case DeleteRequest(command_id, volume, keys, term):
                    return outcome_to_wire(agent.delete(command_id, volume, keys_from_wire(keys), term=term))
                case MoveRequest(command_id, keys, source, target, keep, term):
                    blocks = keys_from_wire(keys)
                    return outcome_to_wire(agent.move(command_id, blocks, source, target, keep=keep, term=term))
                case ScrubRequest(command_id, volume, term):
                    return ScrubReply(agent.scrub(command_id, volume, term=term))
                case CompactRequest(command_id, volume, term, keys):
                    return CompactReply(agent.compact(command_id, volume, keys_from_wire(keys), term=term))
                case RefuseRequest(tenants, term):
                    agent.refuse_tenants(tenants, term=term)
                    return DoneReply()
                case RegisterRequest(descriptor, term):
                    return VolumeReply(self._orders.register(descriptor, term=term))
                case UnregisterRequest(volume, drain_s, term):
                    wait_s = min(max(drain_s, 0.0), DRAIN_S_MAX)
                    self._orders.unregister(volume, wait_s, term=term)
                    return DoneReply()
                case ResizeRequest(volume, capacity_blocks, term):
                    return VolumeReply(self._orders.resize(volume, capacity_blocks, term=term))
                case StatRequest():
                    return StatReply(agent.stat())
                case _:
                    return self._data.carry_out(request)
        except EventPlaneError as error:  # bytes may have moved: asked again, the answer says what became of them
            return RefusedReply(f"the agent cannot publish what it did: {error}")
        except StorageAgentError as error:
            fault = error.fault if isinstance(error, DescriptorError) else None
            return RefusedReply(str(error), isinstance(error, StaleTerm), fault)


class _Row:
    """Commands that wait for one thread, or for one of several."""

    def __init__(self, carry_out: Callable[[Request], Reply], name: str, threads: int = 1) -> None:
        self._carry_out = carry_out
        self._waiting: queue.Queue[tuple[Request, Answer]] = queue.Queue(WAITING_COMMANDS_MAX)
        self._closed = threading.Event()
        self._taking = threading.Lock()
        """Held while a command is taken off and stands in line for its blocks, so that the order is kept."""
        self._turns = Turns()
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, request: Request, answer: Answer) -> None:
        try:
            self._waiting.put_nowait((request, answer))
        except queue.Full:
            answer(encode(RefusedReply(f"{WAITING_COMMANDS_MAX} commands wait already; ask again later")))

    def close(self) -> None:
        self._closed.set()
        for _ in self._threads:
            with suppress(queue.Full):  # then they are awake
                self._waiting.put_nowait((StatRequest(), lambda answer: None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._taking:
                request, answer = self._waiting.get()
                turn = self._turns.announce(_blocks_of(request))
            with self._turns.take(turn):
                if self._closed.is_set():
                    return
                answer(encode(self._carry_out(request)))


def _blocks_of(request: Request) -> list[KeyWire]:
    return request.keys if isinstance(request, CopyRequest | DeleteRequest | MoveRequest) else []
