"""For `kvadvisor bench agent`: how soon a large slab serves after a crash, and whether hours of work leave anything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from event_plane.figures import Figure, at_most
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.block_header import checksum
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.kinds import prepare
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slab_file import open_slab_read_only

PAYLOAD_BYTES = 4096
SLOTS = 1_000_000
SLOTS_QUICK = 50_000
NEWER = 2_000
"""Blocks put after the table was saved: what a recovery must look at."""
LOAD_S = 600.0
LOAD_S_QUICK = 4.0
RECOVERY_S_MAX = 5
NOT_QUICK = "not run by --quick"
_NAMESPACE = Namespace(tenant="bench")
_BATCH = 256
_SLAB = "recovered.slab"
_HELD = (
    ("memory grown", "MiB", 8),
    ("files left open", "", 0),
    ("NIXL handles left", "", 0),
    ("threads left", "", 0),
)
"""What must not grow, with its unit and bound."""


def recovery_figures(folder: Path, quick: bool) -> list[Figure]:
    """A full slab is opened after its owner ended without a word."""
    goal = f"recovery of {SLOTS:,} slots, {PAYLOAD_BYTES // 1024} KiB payload"
    slots = SLOTS_QUICK if quick else SLOTS
    needed_bytes = slots * 2 * PAYLOAD_BYTES * 1.1
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < needed_bytes:
        return [at_most(goal, None, "s", RECOVERY_S_MAX, f"{needed_bytes / 1e9:.0f} GB are not free in {folder}")]
    filling = multiprocessing.get_context("spawn").Process(target=_fill_and_vanish, args=(folder, slots))
    filling.start()
    filling.join()
    try:
        seconds, fault = _recover(folder, slots)
    finally:
        for file in folder.glob(f"{_SLAB}*"):
            file.unlink()
    value = None if fault else seconds
    if not quick:
        return [at_most(goal, value, "s", RECOVERY_S_MAX, fault)]
    return [
        at_most(goal, None, "s", RECOVERY_S_MAX, NOT_QUICK),
        Figure(f"recovery of {slots:,} slots", value, "s", note=fault),
    ]


def _recover(folder: Path, slots: int) -> tuple[float, str]:
    """Seconds until the slab serves, and what it does not do as it should.

    The last block's header is damaged before: it lies in no region that changed since the table was saved, so a
    recovery that looks at no more than it must takes the block for good, and its first get finds out.
    """
    descriptor = _large_slab(folder, slots)
    with closing(open_slab_read_only(descriptor, Path(descriptor.path))) as slab, open(descriptor.path, "r+b") as file:
        file.seek(slab.superblock.slot_offset(slots - 1))
        file.write(b"damaged")
    kind, opening = prepare(descriptor, [folder])
    started_s = time.perf_counter()
    volume = kind.open(opening)
    seconds = time.perf_counter() - started_s
    blocks = volume.stat().blocks
    keys = [_key(0), _key(0)._replace(group=1), _key(slots // 2), _key(slots - 1)]
    found = [read.outcome.result for read in volume.read(keys, lambda number, header, payload: "")]
    volume.close()
    if blocks != slots:
        return seconds, f"{blocks} blocks were found"
    wanted = [Result.MISS, Result.HIT, Result.HIT, Result.CORRUPT]
    return seconds, "" if found == wanted else f"first gets answered {', '.join(found)}"


def flat_memory(folder: Path, quick: bool) -> list[Figure]:
    """Puts, gets, deletes and moves between two volumes, at random; what memory and descriptors grow by."""
    seconds = LOAD_S_QUICK if quick else LOAD_S
    chance = random.Random(1)
    payload = memoryview(chance.randbytes(PAYLOAD_BYTES * 8))
    with StorageAgent("bench", publisher=None, allowed_roots=[folder]) as agent:
        for rank, name in enumerate(("fast", "slow")):
            agent.register_volume(
                VolumeDescriptor(
                    id=name, path=str(folder / name), capacity_blocks=2048, block_bytes_max=payload.nbytes,
                    speed_rank=rank,
                )
            )  # fmt: skip
        held: list[BlockKey] = []
        buffers = [memoryview(bytearray(payload.nbytes)) for _ in range(32)]
        ends_s = time.monotonic() + seconds
        warm_s = ends_s - seconds * 0.75
        before: tuple[float, ...] | None = None
        number = 0
        while (now_s := time.monotonic()) < ends_s:
            if before is None and now_s >= warm_s:
                before = _held()
            keys = [BlockKey(_NAMESPACE.namespace_id, 0, number + each + 1) for each in range(32)]
            number += len(keys)
            agent.put("slow", [PutBlock(key, _NAMESPACE, payload) for key in keys])
            held += keys
            agent.get(chance.sample(held, 32), buffers)
            agent.move("", chance.sample(held, 8), "slow", "fast", keep=chance.random() < 0.5)
            while len(held) > 1024:
                gone = [held.pop(chance.randrange(len(held))) for _ in range(32)]
                for volume in ("fast", "slow"):
                    agent.delete("", volume, gone)
        assert before is not None
        grown = [now - then for now, then in zip(_held(), before, strict=True)]
    goals = [
        at_most(f"{name} by ten minutes of mixed load with moves", None if quick else value, unit, bound)
        for value, (name, unit, bound) in zip(grown, _HELD, strict=True)
    ]
    if not quick:
        return goals
    short = [
        Figure(f"{name} by {seconds:.0f} s of it", value, unit)
        for value, (name, unit, _) in zip(grown, _HELD, strict=True)
    ]
    return [replace(goal, note=NOT_QUICK) for goal in goals] + short


def _large_slab(folder: Path, slots: int) -> VolumeDescriptor:
    path = folder / _SLAB
    return VolumeDescriptor(id="recovered", path=str(path), capacity_blocks=slots, block_bytes_max=PAYLOAD_BYTES)


def _fill_and_vanish(folder: Path, slots: int) -> None:
    """Fill a slab, save its table, change some of it, and end as a crash would."""
    content = memoryview(np.arange(PAYLOAD_BYTES, dtype=np.uint8).tobytes())
    first = [_key(number) for number in range(slots)]
    descriptor = _large_slab(folder, slots)
    kind, opening = prepare(descriptor, [folder])
    volume = kind.open(opening)
    for start in range(0, slots, _BATCH):
        volume.put([PutBlock(key, _NAMESPACE, content) for key in first[start : start + _BATCH]])
    volume.close()  # saves the table
    volume = kind.open(opening)
    for start in range(0, NEWER, _BATCH):
        gone = first[start : min(start + _BATCH, NEWER)]
        volume.delete(gone)
        volume.put([PutBlock(key._replace(group=1), _NAMESPACE, content) for key in gone])
    os._exit(0)


def _key(number: int) -> BlockKey:
    return BlockKey(_NAMESPACE.namespace_id, 0, checksum(b"%d" % number) << 64 | number)


def _held() -> tuple[float, ...]:
    """What this process holds of each of `_HELD`."""
    gc.collect()
    with open("/proc/self/status") as status:
        memory_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    handles = sum(type(each).__name__.startswith("nixl_") for each in gc.get_objects())
    return memory_kib / 1024, len(os.listdir("/proc/self/fd")), handles, threading.active_count()
