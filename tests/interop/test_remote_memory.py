"""Two processes over NIXL UCX and TCP, tensor-parallel size 2 here and 4 there, that use each other's memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.block import CompleteBlock
from kvbm_core.errors import RemotePeerError
from tests.remote_ranks import Rank, identity, keys
from tests.stopping import stop

SCRIPT = Path(__file__).with_name("remote_peer.py")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1.0


class Peer:
    """The process of four."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.answer() == "ready"

    def ask(self, *command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module", autouse=True)
def over_tcp() -> Iterator[None]:
    # As between hosts: on one host UCX would copy out of a process that is stopped.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def peer(over_tcp: None) -> Iterator[Peer]:
    command = [sys.executable, str(SCRIPT)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(0, 2, order="HND"), Rank(1, 2, order="NHD")]
    yield made
    for rank in made:
        rank.close()


def read(rank: Rank, *numbers: int) -> list[CompleteBlock | RemotePeerError]:
    remote = rank.memory.get_remote_blocks_immutable(keys(numbers))
    assert len(remote) == len(numbers)
    return rank.memory.read(remote, rank.pool.allocate(len(numbers)).blocks)  # type: ignore[return-value]


def test_workers_of_two_and_of_four_read_each_others_blocks(ranks: list[Rank], peer: Peer) -> None:
    theirs = [peer.ask("offer", number, [1, 2, 3]) for number in range(4)]
    for rank in ranks:
        for each in theirs:
            rank.memory.import_(bytes.fromhex(each))
        for number, block in zip((1, 2, 3), read(rank, 1, 2, 3), strict=True):
            assert isinstance(block, CompleteBlock)
            assert rank.holds(block.index, number)
    ours = [rank.registration.block_set(rank.computed([5, 6])) for rank in ranks]
    exported = [each.export().hex() for each in ours]
    for number in range(4):
        assert peer.ask("read", number, exported, [5, 6]) == ["right", "right"]
    for each in ours:
        each.drop()
    for number in range(4):
        (said,) = peer.ask("read", number, [], [5])
        assert said.startswith("RemoteBlockGoneError: block 00000000000000050000000000000005 of worker ")
        assert said.endswith("its owner took it back; compute it, or import a set that has it")


def test_four_workers_write_blocks_that_two_wait_for(ranks: list[Rank], peer: Peer) -> None:
    numbers = [31, 32]
    identities = [identity(number) for number in numbers]
    sets = [
        rank.registration.mutable_block_set(rank.pool.allocate(2).blocks, identities, deadline_s=30.0)
        for rank in ranks
    ]
    assert peer.ask("write", [each.export().hex() for each in sets], numbers) == [["None", "None"]] * 4
    for rank, offered in zip(ranks, sets, strict=True):
        assert rank.stored == [], "what is written is nobody's to find before it is registered"
        for number, written in zip(numbers, offered.collect(), strict=True):
            assert written.block is not None
            assert written.identity == identity(number)
            with rank.pool.register(written.block) as registered:
                assert rank.holds(registered.index, number)
        offered.drop()
        assert (rank.stored, rank.registration.doomed_blocks) == (numbers, 0)


def test_a_worker_of_two_writes_into_the_memory_of_two_of_four(ranks: list[Rank], peer: Peer) -> None:
    for number in (0, 1):
        ranks[0].memory.import_(bytes.fromhex(peer.ask("grant", number, [41])))
    (remote,) = ranks[0].memory.get_remote_blocks_mutable(keys([41]))
    assert ranks[0].memory.write([remote], ranks[0].computed([41])) == [None]


def test_a_stopped_process_gives_a_named_error_and_is_read_again_when_it_goes_on(
    ranks: list[Rank], peer: Peer
) -> None:
    hasty = Rank(0, 2, deadline_s=DEADLINE_S)
    ranks.append(hasty)
    for number in (0, 1):
        offered = bytes.fromhex(peer.ask("offer", number, [51]))
        for rank in (ranks[0], hasty):
            rank.memory.import_(offered)
    stop(peer.process.pid)
    try:
        (error,) = read(hasty, 51)
        assert isinstance(error, RemotePeerError)
        assert f"the peer did not answer in {DEADLINE_S} s; check that it runs" in str(error)
    finally:
        os.kill(peer.process.pid, signal.SIGCONT)
    (block,) = read(ranks[0], 51)
    assert isinstance(block, CompleteBlock)
    assert ranks[0].holds(block.index, 51)


def test_a_killed_process_gives_a_named_error_and_what_it_was_to_write_is_kept_from_use(
    ranks: list[Rank], peer: Peer
) -> None:  # the last in this file: it ends the peer
    owner = ranks[0]
    for number in (0, 1):
        owner.memory.import_(bytes.fromhex(peer.ask("offer", number, [61, 62])))
        owner.memory.import_(bytes.fromhex(peer.ask("grant", number, [64])))
    empty = owner.pool.allocate(1).blocks
    offered = owner.registration.mutable_block_set(empty, [identity(63)], deadline_s=DEADLINE_S)
    assert peer.ask("take", 0, [offered.export().hex()], [63]) == 1
    (block,) = read(owner, 61)
    assert isinstance(block, CompleteBlock)
    peer.process.kill()
    peer.process.wait()
    for _ in range(2):
        for error in read(owner, 61, 62):
            assert isinstance(error, RemotePeerError)
            assert "another worker's memory cannot be reached" in str(error)
    with owner.memory.get_remote_blocks_mutable(keys([64]))[0] as remote:
        (refused,) = owner.memory.write([remote], owner.computed([64]))
    assert isinstance(refused, RemotePeerError)
    (written,) = offered.collect()
    assert (written.block, written.reason) == (None, f"it was not written within {DEADLINE_S} s")
    offered.drop()
    assert owner.registration.doomed_blocks == 1
    active = owner.pool.occupancy().active
    owner.registration.close()
    assert owner.pool.occupancy().active == active - 1
