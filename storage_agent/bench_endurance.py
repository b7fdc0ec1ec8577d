"""For `kvadvisor bench agent`: how soon a large slab serves after a crash, and whether hours of work leave anything."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np

from event_plane.figures import Figure, at_most
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.block_header import checksum
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.kinds import prepare
from storage_agent.port import BlockKey, PutBlock

PAYLOAD_BYTES = 4096
SLOTS = 1_000_000
SLOTS_QUICK = 50_000
NEWER = 2_000
"""Blocks put after the table was saved: what a recovery must look at."""
LOAD_S = 600.0
LOAD_S_QUICK = 4.0
_NAMESPACE = Namespace(tenant="bench")
_BATCH = 256


def recovery_figures(folder: Path, quick: bool) -> list[Figure]:
    """A full slab is opened after its owner ended without a word."""
    slots = SLOTS_QUICK if quick else SLOTS
    name = f"recovery of {slots:,} slots of {PAYLOAD_BYTES // 1024} KiB"
    status = os.statvfs(folder)
    needed_bytes = slots * 2 * PAYLOAD_BYTES * 1.1
    if status.f_bavail * status.f_frsize < needed_bytes:
        return [at_most(name, None, "s", 5, note=f"{needed_bytes / 1e9:.0f} GB are not free in {folder}")]
    descriptor = _large_slab(folder, slots)
    filling = multiprocessing.get_context("spawn").Process(target=_fill_and_vanish, args=(folder, slots))
    filling.start()
    filling.join()
    kind, opening = prepare(descriptor, [folder])
    started_s = time.perf_counter()
    volume = kind.open(opening)
    seconds = time.perf_counter() - started_s
    blocks = volume.stat().blocks
    volume.close()
    Path(descriptor.path).unlink()
    note = "" if blocks == slots else f"only {blocks} blocks were found"
    figure = at_most(name, seconds if not note else None, "s", 5, note)
    return [Figure(figure.name, figure.value, figure.unit, note=note)] if quick else [figure]


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
        before: tuple[float, int] | None = None
        number = 0
        while (now_s := time.monotonic()) < ends_s:
            if before is None and now_s >= warm_s:
                before = _memory_mib(), _open_files()
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
        grown_mib, more_files = _memory_mib() - before[0], _open_files() - before[1]
    label = f"{seconds:,.0f} s of mixed load with moves"
    return [
        at_most(f"memory grown in {label}", grown_mib, "MiB", 8),
        at_most(f"descriptors left by {label}", more_files, "", 0),
    ]


def _large_slab(folder: Path, slots: int) -> VolumeDescriptor:
    path = folder / "recovered.slab"
    return VolumeDescriptor(id="recovered", path=str(path), capacity_blocks=slots, block_bytes_max=PAYLOAD_BYTES)


def _fill_and_vanish(folder: Path, slots: int) -> None:
    """Fill a slab, save its table, change some of it, and end as a crash would."""
    content = memoryview(np.arange(PAYLOAD_BYTES, dtype=np.uint8).tobytes())
    first = [BlockKey(_NAMESPACE.namespace_id, 0, checksum(b"%d" % n) << 64 | n) for n in range(slots)]
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


def _memory_mib() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
