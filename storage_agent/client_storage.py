"""The storage port in another process than its agent's: tensor-parallel workers share the volumes of one agent.

Slabs' bytes move straight from and to the file (`slab_client`), so that several workers' shards make one block. Of
other kinds the agent lends blocks, and pulls what is put (`remote_volume`). All else is asked of the agent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn, Protocol, TypeVar

import structlog

from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.block_wire import keys_to_wire, require_answers, shard_to_wire
from storage_agent.buffers import require_one_each
from storage_agent.client import AgentClient
from storage_agent.command_nats import SCHEME as NATS_SCHEME
from storage_agent.data_wire import LOCATED_MAX, HoldingReply, HoldingRequest
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_path import read_blocks
from storage_agent.errors import (
    AgentUnreachable,
    NotTheOwner,
    ServiceError,
    StorageAgentError,
    VolumeError,
)
from storage_agent.port import (
    AgentStat,
    BlockKey,
    Buffer,
    CommandOutcome,
    CompactReport,
    Outcome,
    PutBlock,
    Result,
    ScrubReport,
    VolumeStat,
)
from storage_agent.remote_volume import ABSENT_S, RemoteVolume
from storage_agent.shards import Shard
from storage_agent.slab_client import SlabClient

_log = structlog.get_logger()
T = TypeVar("T")

VOLUMES_S = 5.0
"""The agent is asked so often which volumes it has."""
PROBE_S = 2.0
"""An agent that did not answer, or was never asked, is waited for so long before anything is asked of it; and so is
the connection to one that was lost."""
SCHEMES = ("tcp://", "ipc://", NATS_SCHEME)
_SEARCHES_MAX = 8
"""Times a get looks for blocks that move on whenever it does."""


class _Reach(Protocol):
    """A volume of the agent's, for one batch at a time."""

    def put(self, blocks: Sequence[PutBlock]) -> list[Outcome]: ...

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]: ...

    def close(self) -> None: ...


class _LentVolume:
    """Implements `_Reach` by what the agent lends and pulls."""

    def __init__(self, volume: RemoteVolume) -> None:
        self._volume = volume
        self._lock = threading.Lock()

    def put(self, blocks: Sequence[PutBlock]) -> list[Outcome]:
        with self._lock:
            return self._volume.put(blocks)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        with self._lock:
            return [read.outcome for read in read_blocks(self._volume, keys, buffers, wanted)]

    def close(self) -> None:
        with self._lock:
            self._volume.close()


class ClientStorage:
    """Implements `port.StoragePort` over an agent's command socket. Thread-safe: one batch a volume at a time.

    Each volume is opened when it is first used, and anew after it failed: an agent may be restarted meanwhile. Puts and
    gets raise nothing for an agent that does not answer: their blocks are `failed` with the reason, and for `ABSENT_S`
    nobody waits for it again. It is logged once that an agent does not answer, and once that it does again. Commands
    raise as `AgentClient`'s. After a fork only the parent may use it.
    """

    def __init__(
        self,
        command_url: str,
        *,
        timeout_s: float = 30.0,
        deadline_s: float = 30.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """`timeout_s`: for each answer of the agent; `deadline_s`: for each transfer. Asks nothing yet.

        Raises `ServiceError` for a URL that no agent can have.
        """
        if not command_url.startswith(SCHEMES):
            raise ServiceError(
                f"the agent's URL {command_url!r} begins with none of {', '.join(SCHEMES)}: give the command_url of "
                "its settings, such as tcp://127.0.0.1:5600"
            )
        self.command_url = command_url
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._credentials = credentials
        self._connect_s = PROBE_S
        self._commands = AgentClient(command_url, timeout_s, credentials)
        self._looking = AgentClient(command_url, timeout_s, credentials, connect_s=self._connect_s)
        """Never behind a command, which may take long."""
        self._probing = AgentClient(command_url, min(timeout_s, PROBE_S), credentials)
        self._lock = threading.Lock()
        """Guards what follows. Held while the agent is asked for its volumes: who waits finds out as well."""
        self._reaches: dict[str, _Reach] = {}
        self._volumes: list[VolumeDescriptor] = []
        self._volumes_until_s = 0.0
        self._absent_until_s = 0.0
        self._is_doubtful = True
        """Whether it did not answer when it was last asked, or was not asked yet."""
        self._is_told_absent = False
        self._closed = False

    # Blocks

    def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        """See `StoragePort.put`, and `SlabClient.put` for shards: `partial` until the other workers' are there."""
        return self._move(volume, [block.key for block in blocks], lambda reach: reach.put(blocks))

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        """See `StoragePort.get`. Raises `ValueError` unless each key has a buffer.

        Volumes of other agents, which are views to this one, are not looked at.
        """
        require_one_each(len(keys), len(buffers))
        outcomes: dict[int, Outcome] = {}
        try:
            with self._lock:
                volumes = self._known_volumes()
            waiting = list(range(len(keys)))
            for _ in range(_SEARCHES_MAX):
                self._search(volumes, keys, buffers, wanted, waiting, outcomes)
                waiting = [number for number in waiting if number not in outcomes]
                if not waiting or len(volumes) == 1:
                    break
                # The agent sees all volumes at once: a block that moved past this search is somewhere.
                where = self.holding([keys[number] for number in waiting], wanted)
                waiting = [number for number, volume in zip(waiting, where, strict=True) if volume]
        except StorageAgentError as error:
            failed = {n: Outcome(key, Result.FAILED, reason=str(error)) for n, key in enumerate(keys)}
            outcomes = failed | outcomes
        return [
            outcomes.get(number) or Outcome(key, Result.MISS, reason="no volume holds it")
            for number, key in enumerate(keys)
        ]

    def holding(self, keys: Sequence[BlockKey], wanted: Shard | None = None) -> list[str]:
        """The fastest volume that serves each block now as `get` would give it; empty where none does.

        No use of a block is counted. A block that `wanted` could not be given is not there. What is said may have
        changed by the time of the `get`. Raises `StorageAgentError`: the agent does not answer.
        """
        found: list[str] = []
        with self._lock:
            self._require_present()
        for start in range(0, len(keys), LOCATED_MAX):
            some = keys[start : start + LOCATED_MAX]
            request = HoldingRequest(keys_to_wire(some), shard_to_wire(wanted))
            reply = self._look(partial(self._looking.ask, request, HoldingReply))
            require_answers(len(reply.volumes), len(some))
            found += reply.volumes
        return found

    # Commands

    def stat(self) -> AgentStat:
        """See `AgentPort.stat`. One that does not answer is waited for as briefly as for blocks."""
        with self._lock:
            self._require_present()
        return self._look(self._looking.stat)

    def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.copy`."""
        return self._commands.copy(command_id, keys, source, target, term=term)

    def delete(self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0) -> CommandOutcome:
        """See `AgentPort.delete`."""
        return self._commands.delete(command_id, volume, keys, term=term)

    def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.move`."""
        return self._commands.move(command_id, keys, source, target, keep=keep, term=term)

    def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        """See `AgentPort.scrub`."""
        return self._commands.scrub(command_id, volume, term=term)

    def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        """See `AgentPort.compact`."""
        return self._commands.compact(command_id, volume, keys, term=term)

    def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None:
        """See `AgentPort.refuse_tenants`."""
        self._commands.refuse_tenants(tenants, term=term)

    # What the owner alone does

    def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat:
        """Raises `NotTheOwner`."""
        self._refuse(f"volume {descriptor.id!r} cannot be registered")

    def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None:
        """Raises `NotTheOwner`."""
        self._refuse(f"volume {volume!r} cannot be unregistered")

    def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat:
        """Raises `NotTheOwner`."""
        self._refuse(f"volume {volume!r} cannot be given {capacity_blocks} blocks")

    def close(self) -> None:
        """Wait for the batches under way; the agent stays as it is. Idempotent."""
        self._closed = True  # without the lock: a question under way has it, until its client is closed
        for client in (self._looking, self._probing, self._commands):
            client.close()
        with self._lock:
            reaches, self._reaches = self._reaches, {}
        for reach in reaches.values():
            reach.close()

    def __enter__(self) -> ClientStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse(self, what: str) -> NoReturn:
        raise NotTheOwner(f"{what} from here: the agent at {self.command_url} owns it; do it there")

    # Volumes

    def _move(
        self, volume: str, keys: Sequence[BlockKey], move: Callable[[_Reach], list[Outcome]]
    ) -> list[Outcome]:
        """What `move` says of the blocks, or why they are all `failed`."""
        if not keys:
            return []
        reach: _Reach | None = None
        try:
            with self._lock:
                reach = self._reach_of(volume)
            return move(reach)
        except StorageAgentError as error:
            if reach is not None:
                self._give_up(volume, reach, error)
            return [Outcome(key, Result.FAILED, volume, reason=str(error)) for key in keys]

    def _search(
        self,
        volumes: Sequence[VolumeDescriptor],
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        wanted: Shard | None,
        numbers: Sequence[int],
        outcomes: dict[int, Outcome],
    ) -> None:
        """Read these blocks from the first volume that can give them; one that none holds has no outcome."""
        for volume in volumes:
            waiting = [n for n in numbers if n not in outcomes or not outcomes[n].result.ok]
            if not waiting:
                break
            some = [keys[n] for n in waiting]
            read = partial(_get, keys=some, buffers=[buffers[n] for n in waiting], wanted=wanted)
            answers = zip(waiting, self._move(volume.id, some, read), strict=True)
            outcomes.update((number, answer) for number, answer in answers if answer.result is not Result.MISS)

    def _reach_of(self, volume: str) -> _Reach:
        """Hold the lock. Raises `StorageAgentError`."""
        self._require_present()
        reach = self._reaches.get(volume)
        if reach is None:
            self._volumes_until_s = 0.0
            described = next((each for each in self._known_volumes() if each.id == volume), None)
            if described is None:
                raise VolumeError(
                    f"the agent at {self.command_url} owns no volume {volume!r}: register it there, or name one of "
                    f"{[each.id for each in self._volumes]}"
                )
            reach = self._reaches[volume] = self._asking(lambda: self._open(described))
        return reach

    def _known_volumes(self) -> list[VolumeDescriptor]:
        """The fastest first. Hold the lock. Raises `StorageAgentError`."""
        self._require_present()
        if time.monotonic() >= self._volumes_until_s:
            found = [volume.descriptor for volume in self._asking(self._looking.stat).volumes]
            self._volumes = sorted(found, key=lambda each: (each.speed_rank, each.id))
            self._volumes_until_s = time.monotonic() + VOLUMES_S
        return self._volumes

    def _open(self, described: VolumeDescriptor) -> _Reach:
        if described.kind == "slab":
            return SlabClient(
                self.command_url,
                described.id,
                timeout_s=self._timeout_s,
                deadline_s=self._deadline_s,
                credentials=self._credentials,
                connect_s=self._connect_s,
            )
        connect = partial(
            AgentClient, self.command_url, credentials=self._credentials, connect_s=self._connect_s
        )
        return _LentVolume(
            RemoteVolume(
                described, described.id, connect, timeout_s=self._timeout_s, deadline_s=self._deadline_s
            )
        )

    def _asking(self, ask: Callable[[], T]) -> T:
        """Hold the lock."""
        try:
            return ask()
        except AgentUnreachable as error:
            self._note_absent(error)
            raise

    def _look(self, ask: Callable[[], T]) -> T:
        """As `_asking`, without the lock."""
        try:
            return ask()
        except AgentUnreachable as error:
            with self._lock:
                self._note_absent(error)
            raise

    def _give_up(self, volume: str, reach: _Reach, error: StorageAgentError) -> None:
        """The next use opens the volume anew."""
        with self._lock:
            if self._reaches.get(volume) is not reach:
                return  # another thread was faster, and this one found it closed
            del self._reaches[volume]
            if isinstance(error, AgentUnreachable):
                self._note_absent(error)
        reach.close()

    def _note_absent(self, error: AgentUnreachable) -> None:
        """Hold the lock."""
        self._absent_until_s = time.monotonic() + ABSENT_S
        self._is_doubtful = True
        if self._is_told_absent or self._closed:
            return
        self._is_told_absent = True
        _log.warning(
            "storage agent does not answer, its volumes are not used meanwhile",
            agent_url=self.command_url,
            reason=str(error),
            remedy="start the agent, or correct the URL; it is asked again by itself",
        )

    def _require_present(self) -> None:
        """Hold the lock. Raises `StorageAgentError`."""
        if self._closed:
            raise AgentUnreachable(f"the storage client of {self.command_url} is closed")
        if time.monotonic() < self._absent_until_s:
            raise AgentUnreachable(f"the agent at {self.command_url} did not answer; it is asked again soon")
        if self._is_doubtful:
            self._asking(self._probing.stat)
            self._is_doubtful = False
            if self._is_told_absent:
                self._is_told_absent = False
                _log.info("storage agent answers again", agent_url=self.command_url)


def _get(
    reach: _Reach, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None
) -> list[Outcome]:
    return reach.get(keys, buffers, wanted)
