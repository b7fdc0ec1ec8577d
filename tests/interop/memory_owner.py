"""A process with memory that others read and write: prints metadata and address, then each notification it gets.

A line on its standard input is a command: `show OFFSET LENGTH` prints bytes in hexadecimal, `close` ends the sharing.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import sys

from storage_agent.nixl_memory import MemoryRegion, NixlMemory
from storage_agent.nixl_window import PROGRESS_INTERVAL_S

SIZE_BYTES = 1 << 20


def main() -> None:
    memory = mmap.mmap(-1, SIZE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    shared = NixlMemory("owner", [MemoryRegion(address, SIZE_BYTES)])
    print(shared.metadata.hex(), hex(address), flush=True)
    while True:
        for told in shared.notifications():
            print("told", told.hex(), flush=True)
        if not select.select([sys.stdin], [], [], PROGRESS_INTERVAL_S)[0]:
            continue
        match sys.stdin.readline().split():
            case ["show", offset, length]:
                print("bytes", memory[int(offset) : int(offset) + int(length)].hex(), flush=True)
            case ["close"]:
                shared.close()
                print("closed", flush=True)
            case _:
                return


if __name__ == "__main__":
    main()
