"""The advisor moves blocks while threads read the same ones: agent, sockets, log and mover are all real."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from advisor.cli import main
from advisor.entries import EntryKind
from advisor.fold import Fold
from advisor.log import SqlLog, read_decoded
from advisor.moves import MoveKind, MoveState
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.schema import Namespace, producer_id
from storage_agent.agent import StorageAgent
from storage_agent.config import load_settings
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.service import AgentService
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme")
BLOCK_BYTES = 6_000
BLOCKS = 128
READERS = 3
AGENT = """
name = "agent-1"
command_url = "ipc://{folder}/commands"
event_url = "zmq+tcp://127.0.0.1:{port}"
allowed_roots = ["."]
[[volumes]]
id = "fast"
path = "fast.slab"
capacity_blocks = 32
block_bytes_max = 6000
[[volumes]]
id = "slow"
path = "slow.slab"
speed_rank = 1
capacity_blocks = {slow_blocks}
block_bytes_max = 6000
"""


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


PAYLOADS = [payload(number) for number in range(BLOCKS)]


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(PAYLOADS[number]), block_tokens=16)


class Readers:
    """Threads that read random blocks, a few hot ones most, and put back what was a miss, as an engine would."""

    def __init__(self, agent: StorageAgent) -> None:
        self.hits: Counter[str] = Counter()
        """By volume."""
        self.missed: set[int] = set()
        self.wrong: list[object] = []
        self._agent = agent
        self._ending = threading.Event()
        self._guard = threading.Lock()
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(READERS)]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _read(self, seed: int) -> None:
        choice = random.Random(seed)
        hot = 0
        while not self._ending.is_set():
            hot = (hot + choice.randrange(8)) % BLOCKS  # what is hot wanders, so that blocks come and go
            some = [hot + choice.randrange(6) for _ in range(3)] + [choice.randrange(BLOCKS) for _ in range(3)]
            numbers = sorted({number % BLOCKS for number in some})
            buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
            outcomes = self._agent.get([key(n) for n in numbers], [memoryview(b) for b in buffers])
            again = [n for n, outcome in zip(numbers, outcomes, strict=True) if outcome.result is Result.MISS]
            with self._guard:
                self.missed.update(again)
                for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
                    if outcome.result is Result.HIT and buffer == PAYLOADS[number]:
                        self.hits[outcome.volume] += 1
                    elif outcome.result is not Result.MISS:
                        self.wrong.append((number, outcome))
            for outcome in self._agent.put("slow", [block(number) for number in again]):
                if outcome.result not in (Result.STORED, Result.PRESENT, Result.BUSY, Result.FULL):
                    self.wrong.append(outcome)


def eventually(holds: Callable[[], bool], what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.02)


def folded_moves(folder: Path) -> tuple[Fold, dict[MoveKind, set[int]]]:
    """The log folded again, and the blocks that moves of each kind were planned for."""
    log, fold = SqlLog(folder / "log.db", read_only=True), Fold()
    planned: dict[MoveKind, set[int]] = {kind: set() for kind in MoveKind}
    for entry, batch in read_decoded(log, folder / "log.db"):
        fold.apply(entry, batch)
        if entry.kind is EntryKind.TICK:
            for move in fold.moves.open.values():
                planned[move.kind].add(move.key.sequence_hash - 1)
    log.close()
    return fold, planned


@pytest.mark.parametrize("slow_blocks", [256, 140], ids=["room for all", "room for some"])
def test_blocks_are_read_right_while_they_are_promoted_demoted_and_dropped(
    tmp_path: Path, slow_blocks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    port, _ = free_ports(2)
    file = tmp_path / "agent.toml"
    file.write_text(AGENT.format(folder=tmp_path, port=port, slow_blocks=slow_blocks))
    settings = load_settings(file)
    publisher = open_publisher(settings.event_url, producer=producer_id(settings.name), flush_interval_s=0.05)
    agent = StorageAgent(settings.name, publisher=publisher, allowed_roots=settings.allowed_roots)
    for volume in settings.volumes:
        agent.register_volume(volume)
    agent.put("slow", [block(number) for number in range(BLOCKS - 20)])
    agent.put("fast", [block(number) for number in range(BLOCKS - 20, BLOCKS)])
    service = AdvisorService(
        AdvisorSettings(
            directory=tmp_path,
            tick_interval_s=0.1,
            sources=(SourceSettings(name="agent", url=settings.event_url),),
            agents=(AgentSettings(name=settings.name, command_url=settings.command_url),),
            policy=PolicySettings(admission="touch-2", promote_moves_max=16),
        )
    )
    wanted = {MoveKind.PROMOTE: MoveState.KEPT, MoveKind.DEMOTE: MoveState.FREED, MoveKind.DROP: MoveState.FREED}
    if slow_blocks == 140:
        wanted[MoveKind.DELETE] = MoveState.FREED

    def counts() -> dict[MoveKind, int]:
        with service.lock:
            return {kind: service.fold.moves.counts[kind, state] for kind, state in wanted.items()}

    with AgentService(agent, settings.command_url), service, Readers(agent) as readers:
        eventually(lambda: min(counts().values()) >= 3 and sum(counts().values()) > 150, counts)
    assert service.failure is None
    assert readers.wrong == []
    assert readers.hits["fast"] > 0
    assert readers.hits["slow"] > 0
    for stat in agent.stat().volumes:
        assert stat.blocks + stat.slots_free == stat.descriptor.capacity_blocks
    agent.close()
    publisher.close()

    fold, planned = folded_moves(tmp_path)
    assert readers.missed <= planned[MoveKind.DELETE], "a block was missed that nobody deleted"
    # The law: folding the log again gives the state and the plans that the service had.
    assert fold.digest() == service.fold.digest()
    assert folded_moves(tmp_path)[0].digest() == fold.digest()
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 0, capsys.readouterr()
