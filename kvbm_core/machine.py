"""What this machine has for pools, read from the kernel and from CUDA, for `budget`."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from kvbm_core.budget import MachineFacts

_CAP_IPC_LOCK = 14


def read_machine(root: Path = Path("/")) -> MachineFacts:
    """Facts as they are now. `root` is where /proc and /sys are looked for."""
    available_bytes = _meminfo(root / "proc/meminfo")["MemAvailable"]
    room_bytes = _control_group_room(root)
    return MachineFacts(
        host_available_bytes=available_bytes if room_bytes is None else min(available_bytes, room_bytes),
        locked_bytes_max=_locked_bytes_max(root),
        device_free_bytes=torch.cuda.mem_get_info(0)[0] if torch.cuda.is_available() else None,
    )


def _meminfo(file: Path) -> dict[str, int]:
    """In bytes; the file says kB and means KiB."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1_024 for words in lines}


def _control_group_room(root: Path) -> int | None:
    """The least that any control group above this process has left, or None where none has a limit."""
    groups = root / "sys/fs/cgroup"
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = groups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = base / path.lstrip("/")
        # A container may see its own group as the root, whatever path the kernel names.
        for folder in (inside, *inside.parents) if inside.is_dir() else (base,):
            room = _room_in(folder, limit, usage)
            if room is not None:
                rooms.append(room)
            if folder == base:
                break
    return min(rooms, default=None)


def _room_in(folder: Path, limit: str, usage: str) -> int | None:
    limits, used = _lines(folder / limit), _lines(folder / usage)
    if not limits or not used or limits[0] == "max":
        return None
    statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
    # File pages that were not used lately are given up before anything is refused.
    reclaimable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return max(0, int(limits[0]) - int(used[0]) + reclaimable)


def _locked_bytes_max(root: Path) -> int | None:
    """None also where nothing locks host memory: only network adapters count it against the limit."""
    adapters = root / "sys/class/infiniband"
    if not adapters.is_dir() or not any(adapters.iterdir()):
        return None
    status = dict(line.split(":", 1) for line in _lines(root / "proc/self/status") if ":" in line)
    if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _lines(file: Path) -> list[str]:
    """Empty where there is no such file: which of them there are depends on the kernel."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
