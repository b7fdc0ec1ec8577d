"""Owners and users of remote blocks in one process, over NIXL: what is refused, what goes stale, what is kept."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvbm_core.block import CompleteBlock, MutableBlock
from kvbm_core.errors import (
    BlockStateError,
    LayoutError,
    LayoutFormatError,
    RemoteBlockDamagedError,
    RemoteBlockGoneError,
    RemoteMemoryError,
    RemotePeerError,
    RemoteSealsExhaustedError,
)
from kvbm_core.remote import MutableNixlBlockSet
from kvbm_core.remote_wire import WrittenNote, encode_note
from storage_agent.nixl_window import NixlWindow
from tests.remote_ranks import HEADS, Rank, identity, keys

Made = Callable[..., Rank]


@pytest.fixture
def made() -> Iterator[Made]:
    ranks: list[Rank] = []

    def make(rank: int, size: int, **options: object) -> Rank:
        ranks.append(Rank(rank, size, **options))  # type: ignore[arg-type]
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def read(reader: Rank, number: int) -> CompleteBlock | RemoteMemoryError:
    (remote,) = reader.memory.get_remote_blocks_immutable(keys([number]))
    (outcome,) = reader.memory.read([remote], reader.pool.allocate(1).blocks)
    return outcome


def grant(owner: Rank, *numbers: int, deadline_s: float = 30.0) -> MutableNixlBlockSet:
    blocks = owner.pool.allocate(len(numbers)).blocks
    return owner.registration.mutable_block_set(blocks, [identity(n) for n in numbers], deadline_s=deadline_s)


def wait_for(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.002)


# Reads


def test_a_block_is_found_where_all_its_heads_are_offered_up_to_the_first_that_is_not(made: Made) -> None:
    whole, first, second = made(0, 1), made(0, 2), made(1, 2)
    whole.memory.import_(first.registration.block_set(first.computed([1, 2, 3])).export())
    assert whole.memory.get_remote_blocks_immutable(keys([1])) == []
    whole.memory.import_(second.registration.block_set(second.computed([1, 3])).export())
    assert [block.key for block in whole.memory.get_remote_blocks_immutable(keys([1, 2, 3]))] == keys([1])
    block = read(whole, 3)
    assert isinstance(block, CompleteBlock)
    assert whole.holds(block.index, 3)


def test_workers_that_hold_the_same_head_read_it_from_each_other(made: Made) -> None:
    third_of_sixteen, half = made(3, 16), made(0, 2)  # heads 1, and 0 to 3
    third_of_sixteen.memory.import_(half.registration.block_set(half.computed([1])).export())
    block = read(third_of_sixteen, 1)
    assert isinstance(block, CompleteBlock)
    assert third_of_sixteen.holds(block.index, 1)


def test_a_dropped_block_is_gone_although_its_bytes_and_its_seal_serve_another(made: Made) -> None:
    owner, reader = made(0, 1, blocks=1, seals=1), made(0, 2)
    (block,) = owner.computed([1])
    with owner.registration.block_set([block]) as offered:
        reader.memory.import_(offered.export())
        block.release()
        assert owner.pool.occupancy().active == 1, "the set holds it"
    with pytest.raises(RemoteBlockGoneError, match="this set of 1 blocks was dropped: offer them again"):
        offered.export()
    owner.registration.block_set(owner.computed([2]))
    assert owner.removed == [1]
    gone = read(reader, 1)
    assert isinstance(gone, RemoteBlockGoneError)
    assert "of worker 0 of 1: its owner took it back; compute it, or import a set that has it" in str(gone)


def test_a_block_that_changed_under_its_set_is_damaged_and_its_target_is_still_empty(made: Made) -> None:
    owner, reader = made(0, 1), made(1, 2)
    (block,) = owner.computed([1])
    reader.memory.import_(owner.registration.block_set([block]).export())
    owner.storage.layer_view(block.index, 2)[1, 3, 6, 0] += 1
    (remote,) = reader.memory.get_remote_blocks_immutable(keys([1]))
    targets = reader.pool.allocate(1).blocks
    (damaged,) = reader.memory.read([remote], targets)
    assert isinstance(damaged, RemoteBlockDamagedError)
    assert "heads [6] are not what was offered; read it again, or compute it" in str(damaged)
    targets[0].release()
    assert reader.pool.occupancy().reset == reader.pool.blocks


def test_a_reader_never_takes_bytes_of_another_block_for_those_it_asked_for(made: Made) -> None:
    owner, reader = made(0, 1, blocks=1, seals=1), made(0, 2, order="universal")
    offers: list[bytes] = []
    right: list[int] = []
    over = threading.Event()
    last = 60

    def turn_over() -> None:
        for number in range(1, last + 1):
            (block,) = owner.computed([number])
            with block, owner.registration.block_set([block]) as offered:
                offers.append(offered.export())
                time.sleep(0.002 * (number % 4))
                if number == last:
                    wait_for(lambda: last in right)
        over.set()

    thread = threading.Thread(target=turn_over)
    thread.start()
    while not over.is_set():
        if not offers:
            continue
        number = len(offers)
        reader.memory.import_(offers[number - 1])
        block = read(reader, number)
        if isinstance(block, CompleteBlock):
            right.append(number)
            assert reader.holds(block.index, number)
            block.release()
        else:
            assert isinstance(block, RemoteBlockGoneError | RemoteBlockDamagedError)
    thread.join()


def test_guards_end_by_release_and_by_the_drop_of_the_imported_set(made: Made) -> None:
    owner, reader = made(0, 1), made(0, 1)
    exported = owner.registration.block_set(owner.computed([1, 2])).export()
    imported = reader.memory.import_(exported)
    assert reader.memory.import_(exported) is imported
    first, second = reader.memory.get_remote_blocks_immutable(keys([1, 2]))
    targets = reader.pool.allocate(1).blocks
    with first:
        pass
    with pytest.raises(RemoteBlockGoneError, match=r"RemoteImmutableBlock of block 0+10+1 was released: get it again"):
        reader.memory.read([first], targets)
    imported.drop()
    with pytest.raises(RemoteBlockGoneError, match=r"the imported set of block 0+20+2 was dropped: import it again"):
        reader.memory.read([second], targets)
    assert reader.memory.get_remote_blocks_immutable(keys([2])) == []


def test_reads_go_into_as_many_empty_blocks_of_the_own_pool(made: Made) -> None:
    owner, reader = made(0, 1), made(0, 1)
    reader.memory.import_(owner.registration.block_set(owner.computed([1])).export())
    remote = reader.memory.get_remote_blocks_immutable(keys([1]))
    with pytest.raises(LayoutError, match="1 remote blocks and 0 of ours: give one for each"):
        reader.memory.read(remote, [])
    with pytest.raises(BlockStateError, match="is not of pool device:0"):
        reader.memory.read(remote, owner.pool.allocate(1).blocks)
    (used,) = reader.pool.allocate(1).blocks
    used.init_sequence()
    with pytest.raises(BlockStateError, match=f"block {used.index} is Partial: read into empty blocks"):
        reader.memory.read(remote, [used])


def test_what_cannot_be_imported_says_why(made: Made) -> None:
    owner, reader = made(0, 1, model_layers=2), made(0, 1)
    with pytest.raises(LayoutFormatError, match="9 bytes are not a block set: they start with b'whatever'"):
        reader.memory.import_(b"whatever!")
    with pytest.raises(LayoutError, match="their blocks have layers = 2, ours 3: they are not of one model"):
        reader.memory.import_(owner.registration.block_set([]).export())


def test_more_blocks_than_seals_are_not_offered_and_none_twice(made: Made) -> None:
    owner = made(0, 1, seals=1)
    blocks = owner.computed([1, 2])
    with pytest.raises(RemoteSealsExhaustedError, match="2 blocks cannot be offered: 1 of 1 seals are free"):
        owner.registration.block_set(blocks)
    with pytest.raises(LayoutError, match="a set of 2 blocks has one twice"):
        owner.registration.block_set([blocks[0], blocks[0]])
    owner.pool.release_many(blocks)
    assert owner.pool.occupancy().active == 0
    owner.registration.close()
    with pytest.raises(RemoteMemoryError, match="the registration is closed: register the storage again"):
        owner.registration.block_set([])


# Writes


def test_a_block_is_taken_when_the_last_of_its_writers_is_through(made: Made) -> None:
    owner, writers = made(0, 1), [made(0, 2, order="HND"), made(1, 2)]
    offered = grant(owner, 1)
    outcomes: list[list[RemoteMemoryError | None]] = []

    def write(writer: Rank) -> None:
        writer.memory.import_(offered.export())
        outcomes.append(writer.memory.write(writer.memory.get_remote_blocks_mutable(keys([1])), writer.computed([1])))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    (written,) = offered.collect()
    for thread in threads:
        thread.join()
    assert outcomes == [[None], [None]]
    assert written.block is not None
    assert owner.holds(written.block.index, 1)
    offered.drop()
    assert written.block.identity == identity(1), "what was collected is the caller's"


def test_a_guard_writes_once_and_alone(made: Made) -> None:
    owner, writer = made(0, 1), made(0, 1)
    writer.memory.import_(grant(owner, 1, 2).export())
    with pytest.raises(LayoutError, match="2 blocks are to be written, and one of them twice: name each once"):
        writer.memory.get_remote_blocks_mutable(keys([2, 2]))
    (remote,) = writer.memory.get_remote_blocks_mutable(keys([1]))
    with pytest.raises(RemoteBlockGoneError, match=r"block 0+10+1 is not offered to be written, or was written or giv"):
        writer.memory.get_remote_blocks_mutable(keys([2, 1]))
    sources = writer.computed([1])
    assert writer.memory.write([remote], sources) == [None]
    with pytest.raises(RemoteBlockGoneError, match=r"block 0+10+1 was written: a guard writes once"):
        writer.memory.write([remote], sources)
    assert len(writer.memory.get_remote_blocks_mutable(keys([2]))) == 1, "nothing was taken by the call that failed"


@pytest.mark.parametrize("how", ["release", "collector", "close"])
def test_a_guard_that_ends_unwritten_gives_the_block_back_to_its_owner(made: Made, how: str) -> None:
    owner, writer = made(0, 1), made(0, 1)
    offered = grant(owner, 1)
    writer.memory.import_(offered.export())
    remote = writer.memory.get_remote_blocks_mutable(keys([1]))
    if how == "release":
        remote[0].release()
    elif how == "collector":
        del remote
        gc.collect()
        assert writer.memory.write([], []) == []  # the next word
    else:
        remote.clear()
        writer.memory.close()
    (written,) = offered.collect()
    assert (written.block, written.reason) == (None, "a writer gave it up")
    wait_for(lambda: owner.pool.occupancy().reset == owner.pool.blocks)


def test_a_set_that_its_owner_drops_is_kept_from_use_until_its_writers_have_ended(made: Made) -> None:
    owner, writer = made(0, 1), made(0, 1)
    offered = grant(owner, 1)
    writer.memory.import_(offered.export())
    (remote,) = writer.memory.get_remote_blocks_mutable(keys([1]))
    offered.drop()
    assert (owner.registration.doomed_blocks, owner.pool.occupancy().active) == (1, 1)
    (gone,) = writer.memory.write([remote], writer.computed([1]))
    assert isinstance(gone, RemoteBlockGoneError)
    assert "its owner does not wait for it any more; nothing was written" in str(gone)
    wait_for(lambda: owner.registration.doomed_blocks == 0 and owner.pool.occupancy().active == 0)


def test_blocks_that_a_lost_writer_keeps_come_back_when_all_peers_are_cut_off(made: Made) -> None:
    owner, peer = made(0, 1), made(0, 1)
    computed = owner.computed([2])
    read_only, offered = owner.registration.block_set(computed), grant(owner, 1)
    for each in (read_only, offered):
        peer.memory.import_(each.export())
    (remote,) = peer.memory.get_remote_blocks_mutable(keys([1]))
    offered.drop()
    assert owner.registration.cut_off() == 1
    assert owner.registration.doomed_blocks == 0
    assert (owner.pool.occupancy().active, owner.pool.occupancy().reset) == (1, owner.pool.blocks - 1)
    assert isinstance(read(peer, 2), RemotePeerError)
    (error,) = peer.memory.write([remote], peer.computed([1]))
    assert isinstance(error, RemotePeerError)
    peer.memory.import_(read_only.export())
    block = read(peer, 2)
    assert isinstance(block, CompleteBlock)
    assert peer.holds(block.index, 2)


def test_blocks_that_nobody_collected_are_reset_with_their_set(made: Made) -> None:
    owner, writer = made(0, 1), made(0, 1)
    offered = grant(owner, 1)
    writer.memory.import_(offered.export())
    assert writer.memory.write(writer.memory.get_remote_blocks_mutable(keys([1])), writer.computed([1])) == [None]
    offered.drop()
    assert owner.pool.occupancy().reset == owner.pool.blocks


def test_bytes_that_are_not_those_announced_are_refused_and_notes_that_mean_nothing_are_counted(made: Made) -> None:
    owner = made(0, 1)
    offered = grant(owner, 1)
    layout, generation = owner.registration.layout, offered.blocks[0].generation
    window = NixlWindow("stranger", 1 << 16)

    def tell(note: bytes) -> None:
        seal, here, length = (np.array([n], dtype=np.uint64) for n in (layout.seals.address, 0, 8))
        with window.exclusive():
            window.pull(layout.metadata, seal, here, length, notification=note)

    tell(b"garbage")
    tell(encode_note(WrittenNote(layout.mark ^ 1, 0, [(generation, [0] * HEADS)])))
    tell(encode_note(WrittenNote(layout.mark, 0, [(generation + 1, [0] * HEADS)])))
    tell(encode_note(WrittenNote(layout.mark, 1, [(generation, [0] * HEADS)])))
    wait_for(lambda: owner.registration.ignored_notes == 4)
    tell(encode_note(WrittenNote(layout.mark, 0, [(generation, [0] * HEADS)])))
    (written,) = offered.collect()
    window.close()
    assert (written.block, written.reason) == (None, f"heads {list(range(HEADS))} are not what its writer sent")
    assert owner.pool.occupancy().reset == owner.pool.blocks


def test_only_empty_blocks_of_the_own_pool_are_offered_to_be_written(made: Made) -> None:
    owner, other = made(0, 1), made(0, 1)

    def offer(block: MutableBlock) -> None:
        owner.registration.mutable_block_set([block], [identity(1)], deadline_s=1.0)

    with pytest.raises(BlockStateError, match="is not of pool device:0"):
        offer(other.pool.allocate(1).blocks[0])
    (used,) = owner.pool.allocate(1).blocks
    used.init_sequence()
    with pytest.raises(BlockStateError, match="is Partial: give an empty one"):
        offer(used)
    used.reset()
    offer(used)
    with pytest.raises(BlockStateError, match="was released"):
        offer(used)
