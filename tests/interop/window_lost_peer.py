"""A process whose windows lose their peers in the middle of transfers, and are closed: says `end` if it still can."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import numpy as np

from storage_agent.errors import TransferError
from storage_agent.nixl_memory import MemoryRegion, NixlMemory
from storage_agent.nixl_window import PROGRESS_INTERVAL_S, NixlWindow

SIZE_BYTES = 1 << 20
LOSSES = 8


def main() -> None:
    memory = mmap.mmap(-1, SIZE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    there, here, length = (np.array([number], dtype=np.uint64) for number in (address, 0, SIZE_BYTES))
    for number in range(LOSSES):
        owner = NixlMemory(f"owner-{number}", [MemoryRegion(address, SIZE_BYTES)])
        window = NixlWindow(f"writer-{number}", SIZE_BYTES, deadline_s=5.0)
        met = threading.Event()

        def serve(owner: NixlMemory = owner, met: threading.Event = met) -> None:
            until_s = float("inf")
            while time.monotonic() < until_s:
                owner.notifications()
                if met.is_set():
                    until_s = min(until_s, time.monotonic() + 0.02)
                time.sleep(PROGRESS_INTERVAL_S)
            owner.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with window.exclusive():
                while True:
                    window.push(owner.metadata, there, here, length, notification=bytes(20_000))
                    met.set()
        except TransferError as error:
            met.set()  # also where the first did not get through in time
            print(error, flush=True)
        thread.join()
        window.close()
    print("end", flush=True)


if __name__ == "__main__":
    main()
